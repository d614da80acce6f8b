"""The http backend: a sampler on external inference servers, vLLM's or SGLang's."""

from typing import Final

from meshrl_inference import CHAT, COUNTS, ENDS, TEXTS

__all__ = ["BLIND", "CHAT", "COUNTS", "ENDS", "MASKS", "NEEDS", "OPTIONS", "ROLES", "TEXTS"]

MASKS: Final = "plain"
"""Servers hold answers to plain constraints, under their own masks."""

ROLES: Final = {"Sampler": "meshrl_http.sampler:HttpSampler"}
"""The class of each role. Strings, so that a look-up imports no torch."""

OPTIONS: Final = {"Sampler": "meshrl_http.options:HttpConfig"}
"""The schema of the backend's options: the table `http` in the role's."""

NEEDS: Final = "meshrl_http.server_discovery:check_servers"
"""Queries the servers in a table, and refuses it if one cannot be used."""

BLIND: Final = True
"""It takes no images."""
