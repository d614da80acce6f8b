"""The http backend: a sampler on external inference servers, vLLM's or SGLang's."""

from collections.abc import Mapping
from typing import Final

__all__ = ["CHAT", "COUNTS", "NEEDS", "OPTIONS", "ROLES"]

ROLES: Final[Mapping[str, str]] = {"Sampler": "meshrl_http.sampler:HttpSampler"}
"""The class of each role. Strings, so that a look-up imports no torch."""

OPTIONS: Final[Mapping[str, str]] = {"Sampler": "meshrl_http.options:HttpConfig"}
"""The schema of the backend's options: the table `http` in the role's."""

CHAT: Final = "meshrl_torch.model.chat:read_chat"
"""Reads the tokenizer and the chat template, without a model."""

COUNTS: Final = "meshrl_torch.model.chat:count_prompts"
"""Counts the tokens of prompts, without a model."""

NEEDS: Final = "meshrl_http.found:check_servers"
"""Queries the servers in a table, and refuses it if one cannot be used."""
