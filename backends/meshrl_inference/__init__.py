"""An inference engine in its own process, as a sampler: the common part of engine backends. It is not a backend.

On the rank's side: `options`, `memory` for its estimate, `group` for the GPUs of several ranks, `process` for the
engine's process, and `sampler` for the role. The folder `engine_side` runs in the engine's process. The registry finds
what the backend of an engine has by the names here.
"""

from collections.abc import Mapping, Sequence
from typing import Final

__all__ = ["AXES", "CHAT", "COUNTS", "ENDS", "MEMORY", "NEEDS", "READS", "TEXTS"]

AXES: Final[Mapping[str, Sequence[str]]] = {"Sampler": ("dp", "tp")}
"""The axes along which a sampler's ranks can be arranged, the last one fastest."""

CHAT: Final = "meshrl_torch.model.chat:read_chat"
"""Reads the tokenizer and the chat template, without a model."""

COUNTS: Final = "meshrl_torch.model.chat:count_rows"
"""Counts the tokens of prompts, without a model."""

ENDS: Final = "meshrl_torch.model.chat:find_ends"
"""Says why completions may never end, without a model."""

NEEDS: Final = "meshrl_inference.options:check_installed"
"""Refuses a table without an interpreter that has the engine."""

MEMORY: Final = "meshrl_inference.memory:estimate"
"""Estimates the memory of a role's rank, without weights."""

READS: Final = "meshrl_inference.reading:reads"
"""Says whether the engine has its own code for a role's model, without its values."""

TEXTS: Final = "meshrl_torch.model.texts:read_texts"
"""Gives the text of each token, without a model."""
