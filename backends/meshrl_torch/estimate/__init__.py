"""The memory and the operations of a role, without weights."""
