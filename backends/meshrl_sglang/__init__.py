"""The SGLang backend: a sampler on SGLang's engine, in separate processes and its own environment."""

from collections.abc import Mapping, Sequence
from typing import Final

__all__ = ["AXES", "CHAT", "COUNTS", "MEMORY", "NEEDS", "OPTIONS", "ROLES"]

ROLES: Final[Mapping[str, str]] = {"Sampler": "meshrl_sglang.sampler:SglangSampler"}
"""The class of each role. Strings, so that a look-up imports no torch."""

AXES: Final[Mapping[str, Sequence[str]]] = {"Sampler": ("dp", "tp")}
"""The axes along which each role's ranks can be arranged, the last one fastest. Empty if it takes one rank."""

OPTIONS: Final[Mapping[str, str]] = {"Sampler": "meshrl_sglang.options:SglangConfig"}
"""The schema of the backend's options: the table `sglang` in the role's."""

CHAT: Final = "meshrl_torch.model.chat:read_chat"
"""Reads the tokenizer and the chat template, without a model."""

COUNTS: Final = "meshrl_torch.model.chat:count_prompts"
"""Counts the tokens of prompts, without a model."""

NEEDS: Final = "meshrl_sglang.options:check_installed"
"""Refuses a table without an interpreter that has SGLang."""

MEMORY: Final = "meshrl_inference.memory:estimate"
"""Estimates the memory of a role's rank, without weights."""
