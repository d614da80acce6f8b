"""The position of a run in its data: which prompts it has used, and which it had only drawn.

Each prompt of a run has a number of its own, in `groups`. A checkpoint keeps the numbers of those that were used; a run
that goes on from it leaves them out, and draws the others, also those that were under way. What becomes of each is told
step by step, for an audit.
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
"""Between the first numbers of two deals of a run."""


class Deal(msgspec.Struct, frozen=True):
    """What `Task.batches` deals out: the same again gives each number the same prompt."""

    prompts: int
    """How many there are."""
    digest: str
    """Of them, in their order."""
    seed: int

    def __str__(self) -> str:
        return f"{self.prompts:,} prompts ({self.digest}) in the order of seed {self.seed}"


class CursorState(msgspec.Struct, frozen=True):
    """What a checkpoint keeps of a run's data."""

    used: Sequence[tuple[int, int]]
    """Numbers of prompts, in ranges: the first, and the one after the last."""
    deals: Sequence[Deal]
    published: Sequence[int]
    """By stream of rollouts: the number of the weights that were published to it last."""
    closed: int = 0
    """So many of the deals, the first ones, are over: a fork with another seed deals anew."""

    def __post_init__(self) -> None:
        """ValueError where the ranges are none, overlap or descend, or more deals are over than there are."""
        if not 0 <= self.closed <= len(self.deals):
            raise ValueError(f"{self.closed} of {len(self.deals)} deals are over")
        bounds = [bound for pair in self.used for bound in pair]
        if any(first >= after for first, after in self.used) or bounds != sorted(bounds) or (bounds and bounds[0] < 0):
            raise ValueError(f"the prompts that were used are no ascending ranges: {list(self.used)[:4]}")


class Stream(Protocol):
    """What has drawn prompts that may not be used yet."""

    @property
    def unfinished(self) -> Iterable[int]:
        """The numbers of prompts that were neither delivered nor dropped."""
        ...

    @property
    def published(self) -> int:
        """The number of the weights that were published to it last."""
        ...


class DataCursor:
    """The data of one run, from its beginning or from where a checkpoint had come."""

    def __init__(self, before: CursorState | None = None, *, is_kept: bool = True) -> None:
        """`is_kept`: whether checkpoints keep it, for which each prompt needs a number of its own."""
        self.begun = False
        """Whether the loop has begun. What a script does before it, is done again with the same prompts."""
        self._pulling = False
        self._is_kept = is_kept
        self._before = before
        self._left_out = IntervalSet(before.used if before else ())
        self._used = IntervalSet(before.used if before else ())
        self._streamed = IntervalSet()
        self._closed = before.closed if before else 0
        self._deals = list(before.deals[: self._closed]) if before else []
        self._streams: list[Stream | int] = []
        """In the order in which they were opened; of a closed one what was published to it last."""
        self._happened = [Happening("begin")]
        """Since the last account."""
        self._next = [number * APART for number in range(self._closed)]
        """By deal, the number that comes next."""

    def deal(self, deal: Deal) -> int:
        """A source of prompts is opened; its first number. DataError where the checkpoint's was another."""
        number = len(self._deals)
        if self._before and number < len(self._before.deals) and deal != self._before.deals[number]:
            raise DataError(
                f"the run goes on with {deal}, and its checkpoint was written with {self._before.deals[number]}: it "
                "would train on prompts twice and leave others out. Resume with the same task and run.seed, or start "
                "a run with another name"
            )
        self._deals.append(deal)
        self._next.append(number * APART)
        return number * APART

    def left(self, numbers: Numbers) -> NDArray[np.bool_]:
        """Which of these prompts are to be dealt, bool[prompts]: those that were not used before the checkpoint.

        All where the script itself asks for them before its loop begins.
        """
        self._next[int(numbers[0]) // APART] = int(numbers[-1]) + 1
        asked_again = not self.begun and not self._pulling
        return np.ones(len(numbers), np.bool_) if asked_again else ~self._left_out.has(numbers)

    @contextmanager
    def pulling(self) -> Generator[None]:
        """A stream takes a batch of prompts: what is dealt meanwhile will be drawn by it, now or later."""
        self._pulling = True
        try:
            yield
        finally:
            self._pulling = False

    def use(self, numbers: Numbers) -> None:
        """These prompts were dealt. Where the script itself asked for them in its loop, they are used."""
        if self._pulling:
            return
        if self.begun:
            self._used.add(numbers)
        self._note("train" if self.begun else "hold", numbers.tolist())

    def draw(self, numbers: Numbers) -> NDArray[np.bool_]:
        """A stream has these prompts, and knows when they are used; which were not before the checkpoint.

        DataError for a number that a stream of the run had already.
        """
        again = self._streamed.has(numbers)
        if self._is_kept and again.any():
            raise DataError(
                f"prompt {numbers[again][0]} (`groups`) came to a stream of rollouts a second time: with "
                "run.checkpoint_every or run.resume each prompt of a run needs a number of its own, so that a "
                "checkpoint can tell what was used"
            )
        self._streamed.add(numbers)
        self._used.add(numbers)
        left = ~self._left_out.has(numbers)
        self._note("draw", numbers[left].tolist())
        return left

    def open(self, stream: Stream, ahead: int) -> int:
        """A stream is opened; what had been published to it by the checkpoint, which nothing may be older than."""
        number = len(self._streams)
        self._streams.append(stream)
        self._happened.append(Happening("open", stream=number, ahead=ahead))
        return self._before.published[number] if self._before and number < len(self._before.published) else 0

    def close(self, stream: Stream) -> None:
        """A stream is closed: what it has not delivered will not come."""
        self.drop(stream, list(stream.unfinished), "closed")
        self._streams = [stream.published if each is stream else each for each in self._streams]

    def deliver(self, stream: Stream, groups: Sequence[int], version: int, staleness: int) -> None:
        """A stream gave a batch of these groups; weights of this number sampled its oldest token."""
        told = Happening("deliver", as_ranges(groups), self._number(stream), version=version, staleness=staleness)
        self._happened.append(told)

    def drop(self, stream: Stream, groups: Sequence[int], why: str) -> None:
        """A stream will not deliver these groups."""
        self._note("drop", groups, self._number(stream), why)

    def publish(self, stream: Stream, version: int, *, counts: bool) -> None:
        """Weights of this number were published to a stream. `counts`: whether that ages tokens."""
        self._happened.append(Happening("publish", stream=self._number(stream), version=version, counts=counts))

    def account(self, step: int | None) -> StepAccount:
        """What happened since the last account, and what is under way."""
        happened, self._happened = self._happened, []
        return StepAccount(step, happened, as_ranges(self._unfinished()), list(self._next))

    def reached(self) -> CursorState:
        """What is used now."""
        published = [each if isinstance(each, int) else each.published for each in self._streams]
        if self._before:  # of those that are not open yet
            published += self._before.published[len(published) :]
        used = self._used.without(self._unfinished()).pairs
        return CursorState(used, self._deals, published, self._closed)

    def _unfinished(self) -> list[int]:
        """What live streams have taken, and neither delivered nor dropped."""
        live = [each for each in self._streams if not isinstance(each, int)]
        return [number for stream in live for number in stream.unfinished]

    def _number(self, stream: Stream) -> int | None:
        """None of a closed one."""
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
    """A set of whole numbers, as ranges: what is used in order takes no room."""

    def __init__(self, pairs: Iterable[tuple[int, int]] = ()) -> None:
        """`pairs`: the first number of each range and the one after its last, ascending."""
        self._bounds = np.array(list(pairs), np.int64).reshape(-1, 2)

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The ranges, ascending."""
        return [(int(first), int(end)) for first, end in self._bounds]

    def has(self, numbers: Numbers) -> NDArray[np.bool_]:
        """Which of the numbers are in the set, bool[numbers]."""
        before = np.searchsorted(self._bounds[:, 0], numbers, side="right") - 1
        inside = np.zeros(len(numbers), np.bool_)
        known = before >= 0
        inside[known] = numbers[known] < self._bounds[before[known], 1]
        return inside

    def add(self, numbers: Numbers) -> None:
        """Put numbers into the set."""
        if not len(numbers):
            return
        bounds = np.concatenate([self._bounds, np.stack([numbers, numbers + 1], axis=1)])
        bounds = bounds[np.argsort(bounds[:, 0], kind="stable")]
        reach = np.maximum.accumulate(bounds[:, 1])
        begins = np.flatnonzero(np.append(True, bounds[1:, 0] > reach[:-1]))
        ends = np.append(begins[1:], len(bounds)) - 1
        self._bounds = np.stack([bounds[begins, 0], reach[ends]], axis=1)

    def without(self, numbers: Iterable[int]) -> "IntervalSet":
        """The set but for these numbers."""
        gone = np.unique(np.fromiter(numbers, np.int64))
        gone = gone[self.has(gone)]
        firsts = np.sort(np.concatenate([self._bounds[:, 0], gone + 1]))
        ends = np.sort(np.concatenate([self._bounds[:, 1], gone]))
        return IntervalSet([pair for pair in zip(firsts.tolist(), ends.tolist(), strict=True) if pair[0] < pair[1]])


data_cursor: ContextVar[DataCursor | None] = ContextVar("data_cursor", default=None)
"""Where the current run stands in its data, where it keeps that."""
