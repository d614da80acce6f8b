"""A run's checkpoints: a model in training, on one rank or spread over several (`state`), in safetensors (`boxes`)."""
