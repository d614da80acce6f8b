"""The ranks that compute one model together, several processes or one rank, and how they agree before they begin."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar, cast

import torch.distributed as dist

from meshrl.errors import ConfigError, DataError, MeshrlError, ModelError

T = TypeVar("T")


@dataclass(frozen=True)
class Share:
    """A rank's contribution to a call, or that of all: sums, but the maximum of `passes`."""

    passes: int
    """Forward passes."""
    tokens: int = 0
    """Learned tokens."""
    rows: int = 0
    """Rows with learned tokens."""


@dataclass(frozen=True)
class RankGroup:
    """The ranks of torch's default group, each a process. The backend adds the layout of their computations."""

    size: int
    """Number of ranks with different rows."""
    place: tuple[int, ...]
    """This rank's number among these. Ranks with the same number have the same rows."""
    interruptible = False
    """True if a call may end between two passes. False if ranks wait for each other."""

    @property
    def number(self) -> int:
        """This rank's number among all."""
        return dist.get_rank()

    def total(self, share: Callable[[], Share]) -> Share:
        """Combine the shares of all ranks. An error of one rank is raised on all."""
        different = dict(self.agree(lambda: (self.place, share()))).values()
        return Share(
            max(each.passes for each in different),
            sum(each.tokens for each in different),
            sum(each.rows for each in different),
        )

    def first(self, work: Callable[[], None]) -> None:
        """Run `work` on one rank, while the others wait. An error is raised on all."""
        self.agree(work if self.number == 0 else lambda: None)

    def agree(self, work: Callable[[], T]) -> list[T]:
        """Run `work` on each rank and return the results of all. An error of one rank is raised on all.

        So no rank waits in a collective for one that has left.
        """
        if dist.get_world_size() == 1:
            return [work()]
        failure: Exception | None = None
        outcome: T | Failed
        try:
            outcome = work()
        except Exception as error:  # noqa: BLE001 -- it is raised after the others know of it
            failure, outcome = error, Failed.of(error)
        outcomes: list[T | Failed] = [outcome] * dist.get_world_size()
        dist.all_gather_object(outcomes, outcome)
        if failure is not None:
            raise failure
        for rank, each in enumerate(outcomes):
            if isinstance(each, Failed):
                raise each.kind(f"{each.text} (on rank {rank})")
        return cast("list[T]", outcomes)


@dataclass(frozen=True)
class SingleRank(RankGroup):
    """A single rank, which needs no process group."""

    size: int = 1
    place: tuple[int, ...] = ()
    interruptible = True

    @property
    def number(self) -> int:
        """Its number, the only one."""
        return 0

    def agree(self, work: Callable[[], T]) -> list[T]:
        """Return its own result."""
        return [work()]


SINGLE_RANK: Final = SingleRank()


class Failed(NamedTuple):
    """An exception as the other ranks receive it."""

    kind: type[MeshrlError]
    text: str

    @classmethod
    def of(cls, error: Exception) -> "Failed":
        """Convert an exception. A plain error of meshrl keeps its class."""
        if type(error) in (ConfigError, DataError, ModelError):
            return cls(cast("type[MeshrlError]", type(error)), str(error))
        return cls(ModelError, f"{type(error).__name__}: {error}")
