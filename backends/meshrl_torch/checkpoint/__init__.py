"""A run's checkpoints: a model in training, whole (`state`) or spread over ranks (`spread_state`)."""
