"""The SGLang backend: a sampler on SGLang's engine, in processes and in an environment of its own."""

from collections.abc import Mapping, Sequence
from typing import Final

__all__ = ["AXES", "CHAT", "COUNTS", "MEMORY", "NEEDS", "OPTIONS", "ROLES"]

ROLES: Final[Mapping[str, str]] = {"Sampler": "meshrl_sglang.sampler:SglangSampler"}
"""Where each role's class is. Strings, so that looking a role up imports no torch."""

AXES: Final[Mapping[str, Sequence[str]]] = {"Sampler": ("dp", "tp")}
"""The axes that each role's ranks may stand along, the last one fastest; none where it takes one rank."""

OPTIONS: Final[Mapping[str, str]] = {"Sampler": "meshrl_sglang.options:SglangConfig"}
"""Where the schema of the backend's own options is: the table `sglang` in the role's."""

CHAT: Final = "meshrl_hf.chat:read_chat"
"""Reads the tokenizer and the chat template, without a model."""

COUNTS: Final = "meshrl_hf.prompts:count_prompts"
"""Tells the tokens of prompts, without a model."""

NEEDS: Final = "meshrl_sglang.options:check_installed"
"""Refuses a table that names no interpreter with SGLang."""

MEMORY: Final = "meshrl_inference.memory:held"
"""Tells what a rank holds of a role, without weights."""
