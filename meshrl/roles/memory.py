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
    """Of the role's ranks, by name."""
    prompt: int
    """Tokens of the longest prompt."""
    completion: int
    """Tokens of the longest completion."""
    rows: int
    """Of one update, or one call to generate, on all ranks together."""
    n: int
    """Of them, how many have the same prompt."""
    gpu: int
    """Bytes of a rank's GPU; 0 where it has none, and computes on the CPU."""

    @property
    def tokens(self) -> int:
        """Of the longest row."""
        return self.prompt + self.completion

    @property
    def own_rows(self) -> int:
        """Of one rank along `dp`, at most."""
        return -(-self.rows // self.axes.get("dp", 1))


@dataclass(frozen=True)
class Term:
    """A part of a rank's memory."""

    name: str
    nbytes: int
    during: str
    """The call that needs it, such as `update`; "" for what is held always."""
    formula: str
    """What it is made of, in words."""
    host: bool = False
    """Whether it is in the host's memory, and not in the GPU's."""


@dataclass(frozen=True)
class Memory:
    """The memory of a role on the rank that needs most."""

    terms: Sequence[Term]
    knobs: Sequence[str] = ()
    """Settings of the role's table that would make it less, as in `fsdp.cpu_offload=true`."""
    notes: Sequence[str] = ()
    """What else is to be known, such as how many rows of which length fit."""


def memory_of(config: ModelConfig, work: Work) -> Memory | None:
    """What the role's backend tells; None where it tells nothing.

    ConfigError where the axes do not fit, ModelError where the model's configuration cannot be read. No weights are.
    """
    tells = function_of(config.backend, "MEMORY")
    return None if tells is None else cast("Memory", tells(config, work))
