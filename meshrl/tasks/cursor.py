"""The position of a run in its data: which prompts it has used, and which it had only drawn.

Each prompt of a run has a unique number, in `groups`. A checkpoint stores the numbers of used prompts. A resumed run
skips them and draws the others, even those in progress. For audits, the fate of each is recorded step by step.
"""

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, Literal, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshrl.errors import DataError
from meshrl.tasks.account import Happening, StepAccount, as_ranges

Numbers = NDArray[np.int64]

APART: Final = 1 << 40
"""Distance between the first numbers of two deals of a run."""


class Deal(msgspec.Struct, frozen=True):
    """The prompts of a call of `Task.batches`. An equal deal gives each number the same prompt."""

    prompts: int
    """Number of prompts."""
    digest: str
    """Hash of the prompts in their order."""
    seed: int

    def __str__(self) -> str:
        return f"{self.prompts:,} prompts ({self.digest}) in the order of seed {self.seed}"


class CursorState(msgspec.Struct, frozen=True):
    """The part of a checkpoint about a run's data."""

    used: Sequence[tuple[int, int]]
    """Numbers of used prompts, in ranges: the first, and the one after the last."""
    deals: Sequence[Deal]
    published: Sequence[int]
    """For each stream of rollouts, the number of the weights that were published to it last."""
    closed: int = 0
    """Number of deals, from the first on, that have ended: a fork with another seed makes new deals."""

    def __post_init__(self) -> None:
        """Raise ValueError if ranges are invalid, overlap or descend, or if more deals have ended than exist."""
        if not 0 <= self.closed <= len(self.deals):
            raise ValueError(f"{self.closed} of {len(self.deals)} deals are over")
        bounds = [bound for pair in self.used for bound in pair]
        if any(first >= after for first, after in self.used) or bounds != sorted(bounds) or (bounds and bounds[0] < 0):
            raise ValueError(f"the prompts that were used are not ascending ranges: {list(self.used)[:4]}")


class Stream(Protocol):
    """An object that has drawn prompts, some of them still unused."""

    @property
    def unfinished(self) -> Iterable[int]:
        """The numbers of prompts that were neither delivered nor dropped."""
        ...

    @property
    def published(self) -> int:
        """The number of the weights that were published to it last."""
        ...


class DataCursor:
    """The position of one run in its data, from its beginning or from a checkpoint."""

    def __init__(self, before: CursorState | None = None, *, is_kept: bool = True) -> None:
        """`is_kept`: True if checkpoints store it, which requires unique numbers of prompts."""
        self.begun = False
        """True once the loop has begun. Work before the loop is repeated with the same prompts."""
        self._pulling = False
        self._is_kept = is_kept
        self._before = before
        self._left_out = IntervalSet(before.used if before else ())
        self._used = IntervalSet(before.used if before else ())
        self._streamed = IntervalSet()
        self._closed = before.closed if before else 0
        self._deals = list(before.deals[: self._closed]) if before else []
        self._streams: list[Stream | int] = []
        """Streams in the order of opening. For a closed one, the number of the weights that were published to it
        last."""
        self._happened = [Happening("begin")]
        """Events since the last account."""
        self._next = [number * APART for number in range(self._closed)]
        """The next number of each deal."""

    def deal(self, deal: Deal) -> int:
        """Open a source of prompts, and return its first number. DataError if the checkpoint's was another."""
        number = len(self._deals)
        if self._before and number < len(self._before.deals) and deal != self._before.deals[number]:
            raise DataError(
                f"this run uses {deal}, but its checkpoint was written with {self._before.deals[number]}: it "
                "would train on prompts twice and leave others out. Resume with the same task and run.seed, or start "
                "a run with another name"
            )
        self._deals.append(deal)
        self._next.append(number * APART)
        return number * APART

    def left(self, numbers: Numbers) -> NDArray[np.bool_]:
        """Mark the prompts to deal, bool[prompts]: those that were not used before the checkpoint.

        All prompts that the script itself takes before its loop are dealt.
        """
        self._next[int(numbers[0]) // APART] = int(numbers[-1]) + 1
        asked_again = not self.begun and not self._pulling
        return np.ones(len(numbers), np.bool_) if asked_again else ~self._left_out.has(numbers)

    @contextmanager
    def pulling(self) -> Generator[None]:
        """Mark a stream's request for prompts: the stream will draw what is dealt inside the block."""
        self._pulling = True
        try:
            yield
        finally:
            self._pulling = False

    def use(self, numbers: Numbers) -> None:
        """Note dealt prompts, int64[prompts]. If the script itself took them in its loop, they are used."""
        if self._pulling:
            return
        if self.begun:
            self._used.add(numbers)
        self._note("train" if self.begun else "hold", numbers.tolist())

    def draw(self, numbers: Numbers) -> NDArray[np.bool_]:
        """Note the prompts that a stream has, int64[prompts]. The stream reports their use.

        Returns bool[prompts], True for those not used before the checkpoint. Raises DataError for a number that a
        stream of the run has had already.
        """
        again = self._streamed.has(numbers)
        if self._is_kept and again.any():
            raise DataError(
                f"prompt {numbers[again][0]} (`groups`) came to a stream of rollouts a second time: with "
                "run.checkpoint_every or run.resume each prompt of a run needs a different number, so that a "
                "checkpoint knows which were used"
            )
        self._streamed.add(numbers)
        self._used.add(numbers)
        left = ~self._left_out.has(numbers)
        self._note("draw", numbers[left].tolist())
        return left

    def open(self, stream: Stream, ahead: int) -> int:
        """Open a stream. Returns the number of its last published weights in the checkpoint, a lower bound for it."""
        number = len(self._streams)
        self._streams.append(stream)
        self._happened.append(Happening("open", stream=number, ahead=ahead))
        return self._before.published[number] if self._before and number < len(self._before.published) else 0

    def close(self, stream: Stream) -> None:
        """Close a stream. Its undelivered prompts are dropped."""
        self.drop(stream, list(stream.unfinished), "closed")
        self._streams = [stream.published if each is stream else each for each in self._streams]

    def deliver(self, stream: Stream, groups: Sequence[int], version: int, staleness: int) -> None:
        """Note the groups of a delivered batch, and the number of the weights that sampled its oldest token."""
        told = Happening("deliver", as_ranges(groups), self._number(stream), version=version, staleness=staleness)
        self._happened.append(told)

    def drop(self, stream: Stream, groups: Sequence[int], why: str) -> None:
        """Note groups that a stream will not deliver."""
        self._note("drop", groups, self._number(stream), why)

    def publish(self, stream: Stream, version: int, *, counts: bool) -> None:
        """Note weights of this number that were published to a stream. `counts`: True if this ages tokens."""
        self._happened.append(Happening("publish", stream=self._number(stream), version=version, counts=counts))

    def account(self, step: int | None) -> StepAccount:
        """Return the events since the last account, and the prompts in progress."""
        happened, self._happened = self._happened, []
        return StepAccount(step, happened, as_ranges(self._unfinished()), list(self._next))

    def reached(self) -> CursorState:
        """Return the present state, for a checkpoint."""
        published = [each if isinstance(each, int) else each.published for each in self._streams]
        if self._before:  # those of streams that are not open yet
            published += self._before.published[len(published) :]
        used = self._used.without(self._unfinished()).pairs
        return CursorState(used, self._deals, published, self._closed)

    def _unfinished(self) -> list[int]:
        """Return the prompts that open streams have taken, and neither delivered nor dropped."""
        live = [each for each in self._streams if not isinstance(each, int)]
        return [number for stream in live for number in stream.unfinished]

    def _number(self, stream: Stream) -> int | None:
        """Return the number of a stream. None if it is closed."""
        return next((number for number, each in enumerate(self._streams) if each is stream), None)

    def _note(
        self,
        what: Literal["hold", "train", "draw", "drop"],
        groups: Sequence[int],
        stream: int | None = None,
        why: str = "",
    ) -> None:
        if groups:
            self._happened.append(Happening(what, as_ranges(groups), stream, why=why))


class IntervalSet:
    """A set of integers, as ranges. Consecutive numbers need no memory."""

    def __init__(self, pairs: Iterable[tuple[int, int]] = ()) -> None:
        """`pairs`: the first number of each range and the one after its last, ascending."""
        self._bounds = np.array(list(pairs), np.int64).reshape(-1, 2)

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The ranges, ascending."""
        return [(int(first), int(end)) for first, end in self._bounds]

    def has(self, numbers: Numbers) -> NDArray[np.bool_]:
        """Mark the numbers that are in the set, bool[numbers]."""
        before = np.searchsorted(self._bounds[:, 0], numbers, side="right") - 1
        inside = np.zeros(len(numbers), np.bool_)
        known = before >= 0
        inside[known] = numbers[known] < self._bounds[before[known], 1]
        return inside

    def add(self, numbers: Numbers) -> None:
        """Add numbers to the set."""
        if not len(numbers):
            return
        bounds = np.concatenate([self._bounds, np.stack([numbers, numbers + 1], axis=1)])
        bounds = bounds[np.argsort(bounds[:, 0], kind="stable")]
        reach = np.maximum.accumulate(bounds[:, 1])
        begins = np.flatnonzero(np.append(True, bounds[1:, 0] > reach[:-1]))
        ends = np.append(begins[1:], len(bounds)) - 1
        self._bounds = np.stack([bounds[begins, 0], reach[ends]], axis=1)

    def without(self, numbers: Iterable[int]) -> "IntervalSet":
        """Return the set without these numbers."""
        gone = np.unique(np.fromiter(numbers, np.int64))
        gone = gone[self.has(gone)]
        firsts = np.sort(np.concatenate([self._bounds[:, 0], gone + 1]))
        ends = np.sort(np.concatenate([self._bounds[:, 1], gone]))
        return IntervalSet([pair for pair in zip(firsts.tolist(), ends.tolist(), strict=True) if pair[0] < pair[1]])


data_cursor: ContextVar[DataCursor | None] = ContextVar("data_cursor", default=None)
"""The data position of the current run, if it keeps one."""
