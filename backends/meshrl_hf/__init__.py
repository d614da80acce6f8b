"""Hugging Face models on torch, packed: what the training backends share. It is no backend itself.

From a role's table to a model: `files`, `loading`, `model`, `text`, `lora`. From rows to a gradient: `packing`,
`attention`, `scoring`, `training`, `optimizer`; `value_head` for a critic. Out again: `transfer` for weights,
`checkpoint` for a folder, `state` or, over several ranks, `spread_state` for what a run's checkpoints keep. `trainable`
puts these together, and `roles` writes the roles on them, once for all backends.
"""

__all__: list[str] = []
