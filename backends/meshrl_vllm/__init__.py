"""The vLLM backend: a sampler on vLLM's engine, and its server, in separate processes and their own environment."""

from collections.abc import Mapping
from typing import Final

from meshrl_inference import AXES, CHAT, COUNTS, ENDS, MEMORY, NEEDS, READS, TEXTS

__all__ = ["AXES", "CHAT", "COUNTS", "ENDS", "MASKS", "MEMORY", "NEEDS", "OPTIONS", "READS", "ROLES", "SEES", "TEXTS"]

MASKS: Final = "served"
"""Answers are held to any constraint, under masks of the engine's own."""

ROLES: Final[Mapping[str, str]] = {
    "Sampler": "meshrl_vllm.sampler:VllmSampler",
    "Server": "meshrl_vllm.server:VllmServer",
}
"""The class of each role. Strings, so that a look-up imports no torch."""

OPTIONS: Final[Mapping[str, str]] = dict.fromkeys(ROLES, "meshrl_vllm.options:VllmConfig")
"""The schema of each role's options: the table `vllm` in the role's."""

SEES: Final = "meshrl_vllm.image_models:check_images"
"""Refuses a model whose images vLLM may read otherwise than a policy."""
