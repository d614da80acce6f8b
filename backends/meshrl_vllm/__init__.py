"""The vLLM backend: a sampler on vLLM's engine, which runs in a process of its own, in an environment of its own."""

from collections.abc import Mapping
from typing import Final

__all__ = ["ROLES"]

ROLES: Final[Mapping[str, str]] = {"Sampler": "meshrl_vllm.sampler:VllmSampler"}
"""Where each role's class is. Strings, so that looking a role up imports no torch."""
