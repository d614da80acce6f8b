"""A Hugging Face model on torch, packed: from a role's table to a network, and from rows to log-probs."""
