"""The ranks that compute one model together: what they have to agree on before they begin."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

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


class Peers(Protocol):
    """The ranks that compute one model together, each with rows of its own."""

    @property
    def size(self) -> int:
        """How many ranks have rows of their own."""
        ...

    @property
    def interruptible(self) -> bool:
        """Whether a call may end between two passes: where ranks wait for each other, it may not."""
        ...

    def total(self, share: Callable[[], Share]) -> Share:
        """The shares of all ranks together. Where it raises on one rank, all raise."""
        ...

    def agree(self, work: Callable[[], T]) -> Sequence[T]:
        """What `work` gives on each rank. Where it raises on one rank, all raise."""
        ...


class Alone:
    """One rank."""

    def __init__(self) -> None:
        self.size = 1
        self.interruptible = True

    def total(self, share: Callable[[], Share]) -> Share:
        """Its own."""
        return share()

    def agree(self, work: Callable[[], T]) -> Sequence[T]:
        """Its own."""
        return [work()]


ALONE: Final = Alone()
