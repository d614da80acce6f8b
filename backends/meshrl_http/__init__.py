"""The http backend: a sampler on inference servers that run elsewhere, vLLM's own or SGLang's own."""

from collections.abc import Mapping
from typing import Final

__all__ = ["CHAT", "COUNTS", "NEEDS", "OPTIONS", "ROLES"]

ROLES: Final[Mapping[str, str]] = {"Sampler": "meshrl_http.sampler:HttpSampler"}
"""Where each role's class is. Strings, so that looking a role up imports no torch."""

OPTIONS: Final[Mapping[str, str]] = {"Sampler": "meshrl_http.options:HttpConfig"}
"""Where the schema of the backend's own options is: the table `http` in the role's."""

CHAT: Final = "meshrl_hf.chat:read_chat"
"""Reads the tokenizer and the chat template, without a model."""

COUNTS: Final = "meshrl_hf.prompts:count_prompts"
"""Tells the tokens of prompts, without a model."""

NEEDS: Final = "meshrl_http.found:check_servers"
"""Asks the servers that a table names, and refuses one whose servers cannot be used."""
