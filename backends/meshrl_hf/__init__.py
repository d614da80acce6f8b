"""Hugging Face models on torch, packed: what the training backends share. It is not a backend itself.

From a role's table to a model: `files`, `loading`, `model`, `text`, `lora`. From rows to a gradient: `packing`,
`attention`, `scoring`, `training`, `optimizer`, and `value_head` for a critic. Output: `transfer` for weights,
`live_weights` for weights that ranks broadcast (`broadcast` sends, `reading` receives, also in engines' processes),
`checkpoint` for model folders, and `state` or `spread_state` (several ranks) for a run's checkpoints. `trainable`
combines these, and `roles` implements the roles on them, once for all backends.
"""

__all__: list[str] = []
