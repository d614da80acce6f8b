"""Training: a loss, a step, an optimizer, and the roles. `one_rank` and `fsdp` lay a model out."""
