"""The ranks that compute one model together, several processes or one rank: what they agree on before they begin."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar, cast

import torch.distributed as dist

from meshrl.errors import ConfigError, DataError, MeshrlError, ModelError
from meshrl_hf.packing import IDLE, MicroBatch

T = TypeVar("T")


@dataclass(frozen=True)
class Share:
    """What a rank brings to a call, or what all bring: sums, but the most of `passes`."""

    passes: int
    """Forward passes."""
    tokens: int = 0
    """That are learned."""
    rows: int = 0
    """That have such tokens."""

    def padded(self, micros: list[MicroBatch]) -> list[MicroBatch]:
        """As many passes as the rank with the most makes."""
        return micros + [IDLE] * (self.passes - len(micros))


@dataclass(frozen=True)
class RankGroup:
    """The ranks of torch's default group, each a process. What they compute together has the layout a backend adds."""

    size: int
    """Ranks with rows of their own."""
    place: tuple[int, ...]
    """This rank's, among these: ranks of one place have the same rows."""
    interruptible = False
    """Whether a call may end between two passes: where ranks wait for each other, it may not."""

    @property
    def number(self) -> int:
        """This rank's, among all."""
        return dist.get_rank()

    def total(self, share: Callable[[], Share]) -> Share:
        """The shares of all ranks together. What one of them raises, all raise."""
        different = dict(self.agree(lambda: (self.place, share()))).values()
        return Share(
            max(each.passes for each in different),
            sum(each.tokens for each in different),
            sum(each.rows for each in different),
        )

    def first(self, work: Callable[[], None]) -> None:
        """Do on one rank what is to be done once. Where it raises, all raise; all have waited for it."""
        self.agree(work if self.number == 0 else lambda: None)

    def agree(self, work: Callable[[], T]) -> list[T]:
        """What `work` gives on each rank, on all of them. Where it raises on one, all raise.

        So no rank waits in a collective for one that has left.
        """
        if dist.get_world_size() == 1:
            return [work()]
        failure: Exception | None = None
        outcome: T | Failed
        try:
            outcome = work()
        except Exception as error:  # noqa: BLE001 -- it is raised when the others know of it
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
    """One rank, which needs no process group."""

    size: int = 1
    place: tuple[int, ...] = ()
    interruptible = True

    @property
    def number(self) -> int:
        """The only one."""
        return 0

    def agree(self, work: Callable[[], T]) -> list[T]:
        """Its own."""
        return [work()]


SINGLE_RANK: Final = SingleRank()


class Failed(NamedTuple):
    """What the other ranks are told of an exception."""

    kind: type[MeshrlError]
    text: str

    @classmethod
    def of(cls, error: Exception) -> "Failed":
        """A plain error of meshrl's keeps its kind."""
        if type(error) in (ConfigError, DataError, ModelError):
            return cls(cast("type[MeshrlError]", type(error)), str(error))
        return cls(ModelError, f"{type(error).__name__}: {error}")
