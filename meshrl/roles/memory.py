"""The memory that a role needs on a rank, which its backend estimates before anything is allocated."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from meshrl.roles.config import ModelConfig
from meshrl.roles.registry import function_of


@dataclass(frozen=True)
class Work:
    """The work that the ranks of a role must have memory for."""

    axes: Mapping[str, int]
    """The size of each axis of the role's ranks."""
    prompt: int
    """Tokens of the longest prompt."""
    completion: int
    """Tokens of the longest completion."""
    rows: int
    """Rows of one update, or of one call of `generate`, on all ranks together."""
    n: int
    """Number of these rows with the same prompt."""
    gpu: int
    """Bytes of a rank's GPU. 0 if it computes on the CPU."""

    @property
    def tokens(self) -> int:
        """Tokens of the longest row."""
        return self.prompt + self.completion

    @property
    def own_rows(self) -> int:
        """Most rows of one rank along `dp`."""
        return -(-self.rows // self.axes.get("dp", 1))


@dataclass(frozen=True)
class Term:
    """One part of a rank's memory."""

    name: str
    nbytes: int
    """Its size in bytes."""
    during: str
    """The call that needs it, such as `update`. "" if it is always held."""
    formula: str
    """How it is computed, as text."""
    host: bool = False
    """True if it is in the host's memory instead of the GPU's."""


@dataclass(frozen=True)
class Memory:
    """The memory of a role on the rank that needs the most."""

    terms: Sequence[Term]
    knobs: Sequence[str] = ()
    """Settings of the role's table that would reduce it, as in `fsdp.cpu_offload=true`."""
    notes: Sequence[str] = ()
    """More information, such as the number of rows of a length that fit."""


def memory_of(config: ModelConfig, work: Work) -> Memory | None:
    """Return the estimate of the role's backend, or None if it has none.

    ConfigError if the axes do not fit, ModelError if the model's configuration cannot be read. It reads no weights.
    """
    tells = function_of(config.backend, "MEMORY")
    return None if tells is None else cast("Memory", tells(config, work))
