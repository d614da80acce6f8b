"""The vLLM backend: a sampler on vLLM's engine, and its server, in separate processes and their own environment."""

from collections.abc import Mapping, Sequence
from typing import Final

__all__ = ["AXES", "CHAT", "COUNTS", "MEMORY", "NEEDS", "OPTIONS", "ROLES"]

ROLES: Final[Mapping[str, str]] = {
    "Sampler": "meshrl_vllm.sampler:VllmSampler",
    "Server": "meshrl_vllm.server:VllmServer",
}
"""The class of each role. Strings, so that a look-up imports no torch."""

AXES: Final[Mapping[str, Sequence[str]]] = {"Sampler": ("dp", "tp")}
"""The axes along which each role's ranks can be arranged, the last one fastest. Empty if it takes one rank."""

OPTIONS: Final[Mapping[str, str]] = dict.fromkeys(ROLES, "meshrl_vllm.options:VllmConfig")
"""The schema of each role's options: the table `vllm` in the role's."""

CHAT: Final = "meshrl_torch.model.chat:read_chat"
"""Reads the tokenizer and the chat template, without a model."""

COUNTS: Final = "meshrl_torch.model.chat:count_prompts"
"""Counts the tokens of prompts, without a model."""

NEEDS: Final = "meshrl_vllm.options:check_installed"
"""Refuses a table without an interpreter that has vLLM."""

MEMORY: Final = "meshrl_inference.memory:estimate"
"""Estimates the memory of a role's rank, without weights."""
