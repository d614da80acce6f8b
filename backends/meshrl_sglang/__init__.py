"""The SGLang backend: a sampler on SGLang's engine, in separate processes and its own environment."""

from typing import Final

from meshrl_inference import AXES, CHAT, COUNTS, ENDS, MEMORY, NEEDS, READS, TEXTS

__all__ = ["AXES", "BLIND", "CHAT", "COUNTS", "ENDS", "MEMORY", "NEEDS", "OPTIONS", "READS", "ROLES", "TEXTS"]

ROLES: Final = {"Sampler": "meshrl_sglang.sampler:SglangSampler"}
"""The class of each role. Strings, so that a look-up imports no torch."""

OPTIONS: Final = {"Sampler": "meshrl_sglang.options:SglangConfig"}
"""The schema of the backend's options: the table `sglang` in the role's."""

BLIND: Final = True
"""It takes no images."""
