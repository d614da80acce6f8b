"""The vLLM backend: a sampler on vLLM's engine, and its server, in processes and in an environment of their own."""

from collections.abc import Mapping, Sequence
from typing import Final

__all__ = ["AXES", "CHAT", "COUNTS", "MEMORY", "NEEDS", "OPTIONS", "ROLES"]

ROLES: Final[Mapping[str, str]] = {
    "Sampler": "meshrl_vllm.sampler:VllmSampler",
    "Server": "meshrl_vllm.server:VllmServer",
}
"""Where each role's class is. Strings, so that looking a role up imports no torch."""

AXES: Final[Mapping[str, Sequence[str]]] = {"Sampler": ("dp", "tp")}
"""The axes that each role's ranks may stand along, the last one fastest; none where it takes one rank."""

OPTIONS: Final[Mapping[str, str]] = dict.fromkeys(ROLES, "meshrl_vllm.options:VllmConfig")
"""Where the schema of each role's own options is: the table `vllm` in the role's."""

CHAT: Final = "meshrl_hf.chat:read_chat"
"""Reads the tokenizer and the chat template, without a model."""

COUNTS: Final = "meshrl_hf.prompts:count_prompts"
"""Tells the tokens of prompts, without a model."""

NEEDS: Final = "meshrl_vllm.options:check_installed"
"""Refuses a table that names no interpreter with vLLM."""

MEMORY: Final = "meshrl_inference.memory:held"
"""Tells what a rank holds of a role, without weights."""
