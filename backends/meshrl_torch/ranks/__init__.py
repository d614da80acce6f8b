"""The ranks of a mesh as torch sees them: their process group, what they agree on, and the loss of one."""
