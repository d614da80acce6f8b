"""The position of a run in its data: which prompts it has used, which it had only drawn, and what became of each.

Each prompt of a run has a unique number, in `groups`: a prompt that is drawn again in a later epoch has another one. A
checkpoint stores the numbers of used prompts. A resumed run skips them and draws the others, even those in progress.
For audits, the events of each step are a line in groups.jsonl.
"""

from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise
from typing import Final, Literal, Protocol, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshrl.errors import DataError

Ranges: TypeAlias = Sequence[tuple[int, int]]
"""Ascending numbers as ranges: the first, and the one after the last. A repeated number is in two ranges."""
Numbers: TypeAlias = NDArray[np.int64]

APART: Final = 1 << 40
"""Distance between the first numbers of two deals of a run."""
_MOST: Final = 1 << 24
"""An upper bound of the prompts in a step."""


class PromptEvent(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """An event of prompts, or of a stream that draws them."""

    what: Literal["begin", "open", "hold", "train", "draw", "deliver", "drop", "publish"]
    """`begin`: a process of the run began. `open`: a stream was opened. `hold`: the script took prompts itself before
    its loop. `train`: it took them in the loop, to train on. `draw`: a stream took prompts. `deliver`: it gave groups
    to the trainer. `drop`: it dropped them. `publish`: weights were published to a stream."""
    groups: Ranges = ()
    stream: int | None = None
    """The number of the stream in its process, in the order of opening."""
    ahead: int = 0
    """For `open`: the bound, in published versions."""
    why: str = ""
    """For `drop`: `filtered`, `stale`, or `closed` if the stream ended before they were finished."""
    version: int = 0
    """For `publish`: the number of the weights. For `deliver`: the number of those that sampled the oldest token."""
    staleness: int = 0
    """For `deliver`: how many publications the oldest row is behind the trainer."""
    counts: bool = True
    """For `publish`: True if it ages tokens. Publications before the first draw do not."""

    def __post_init__(self) -> None:
        """Raise ValueError for invalid ranges."""
        _check(self.groups)


class StepAccount(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The events of a step, or between two steps."""

    step: int | None
    """None for events between two steps, or after the last one."""
    happened: Sequence[PromptEvent]
    under_way: Ranges
    """Prompts that streams had taken by its end, and neither delivered nor dropped."""
    dealt: Sequence[int]
    """The next number of each deal of `Task.batches`."""

    def __post_init__(self) -> None:
        """Raise ValueError for invalid ranges."""
        _check(self.under_way)


def as_ranges(numbers: Iterable[int]) -> Ranges:
    """Convert numbers in any order to ranges."""
    ordered = sorted(numbers)
    if not ordered:
        return ()
    breaks = [at for at, (one, other) in enumerate(pairwise(ordered), 1) if other != one + 1]
    return [(ordered[first], ordered[end - 1] + 1) for first, end in pairwise([0, *breaks, len(ordered)])]


def in_ranges(ranges: Ranges) -> Iterator[int]:
    """Yield the numbers of ranges."""
    return (number for first, end in ranges for number in range(first, end))


def _check(ranges: Ranges) -> None:
    """Check ranges, so that a damaged file raises instead of causing an endless loop."""
    for first, end in ranges:
        if not 0 <= first < end <= first + _MOST:
            raise ValueError(f"[{first}, {end}] is not a range of prompts of a step")


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

    used: Ranges
    """Numbers of used prompts."""
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

    def check_whole(self, before: str) -> None:
        """Raise DataError if it has delivered only a part of a batch. `before`: what needs the other parts first."""
        ...

    async def loaded(self) -> None:
        """Wait until the sampler has the weights that were published last."""
        ...


class DataCursor:
    """The position of one run in its data, from its beginning or from a checkpoint."""

    def __init__(self, before: CursorState | None = None, *, is_kept: bool = True) -> None:
        """`is_kept`: True if checkpoints store it, which requires unique numbers of prompts."""
        self.begun = False
        """True once the loop has begun. Work before the loop is repeated with the same prompts."""
        self._rows_left_out: dict[str, Mapping[str, int]] = {}
        """Of each task, by its digest."""
        self._pulling = False
        self._is_kept = is_kept
        self._before = before or CursorState((), (), ())
        self._left_out = IntervalSet(self._before.used)
        self._used = IntervalSet(self._before.used)
        self._streamed = IntervalSet()
        self._closed = self._before.closed
        self._deals = list(self._before.deals[: self._closed])
        self._streams: list[Stream | int] = []
        """Streams in the order of opening. For a closed one, the number of the weights that were published to it
        last."""
        self._events = [PromptEvent("begin")]
        """Events since the last account."""
        self._next = [number * APART for number in range(self._closed)]
        """The next number of each deal."""

    def deal(self, deal: Deal, left_out: Mapping[str, int]) -> int:
        """Open a source of prompts, and return its first number. DataError if the checkpoint's was another."""
        self._rows_left_out[deal.digest] = left_out
        number = len(self._deals)
        if number < len(self._before.deals) and deal != self._before.deals[number]:
            raise DataError(
                f"this run uses {deal}, but its checkpoint was written with {self._before.deals[number]}: it "
                "would train on prompts twice and leave others out. Resume with the same task and run.seed, or start "
                "a run with another name"
            )
        self._deals.append(deal)
        self._next.append(number * APART)
        return number * APART

    @property
    def left_out(self) -> dict[str, int]:
        """Number of rows that the run's tasks leave out, by the reason."""
        return dict(sum((Counter(each) for each in self._rows_left_out.values()), Counter[str]()))

    def left(self, numbers: Numbers) -> NDArray[np.bool_]:
        """Mark the prompts to deal, bool[prompts]: those that were not used before the checkpoint.

        All prompts that the script itself takes before its loop are dealt.
        """
        self._next[int(numbers[0]) // APART] = int(numbers[-1]) + 1
        is_repeated = not self.begun and not self._pulling
        return np.ones(len(numbers), np.bool_) if is_repeated else ~self._left_out.has(numbers)

    @contextmanager
    def pulling(self) -> Generator[None]:
        """Mark a stream's request for prompts: the stream will draw what is dealt inside the block."""
        self._pulling = True
        try:
            yield
        finally:
            self._pulling = False

    def use(self, numbers: Numbers) -> None:
        """Record dealt prompts, int64[prompts]. If the script itself took them in its loop, they are used."""
        if self._pulling:
            return
        if self.begun:
            self._used.add(numbers)
        self._record("train" if self.begun else "hold", numbers.tolist())

    def draw(self, numbers: Numbers) -> NDArray[np.bool_]:
        """Record the prompts that a stream has, int64[prompts]. The stream reports their use.

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
        self._record("draw", numbers[left].tolist())
        return left

    def open(self, stream: Stream, ahead: int) -> int:
        """Open a stream. Returns the number of its last published weights in the checkpoint, a lower bound for it."""
        number = len(self._streams)
        self._streams.append(stream)
        self._events.append(PromptEvent("open", stream=number, ahead=ahead))
        return self._before.published[number] if number < len(self._before.published) else 0

    def close(self, stream: Stream) -> None:
        """Close a stream. Its undelivered prompts are dropped."""
        self.drop(stream, list(stream.unfinished), "closed")
        self._streams = [stream.published if each is stream else each for each in self._streams]

    def deliver(self, stream: Stream, groups: Sequence[int], version: int, staleness: int) -> None:
        """Record the groups of a delivered batch, and the number of the weights that sampled its oldest token."""
        self._events.append(
            PromptEvent("deliver", as_ranges(groups), self._number(stream), version=version, staleness=staleness)
        )

    def drop(self, stream: Stream, groups: Sequence[int], why: str) -> None:
        """Record groups that a stream will not deliver."""
        if groups:
            self._events.append(PromptEvent("drop", as_ranges(groups), self._number(stream), why=why))

    def publish(self, stream: Stream, version: int, *, counts: bool) -> None:
        """Record weights of this number that were published to a stream. `counts`: True if this ages tokens."""
        self._events.append(PromptEvent("publish", stream=self._number(stream), version=version, counts=counts))

    def account(self, step: int | None) -> StepAccount:
        """Return the events since the last account, and the prompts in progress."""
        events, self._events = self._events, []
        return StepAccount(step, events, as_ranges(self._unfinished()), list(self._next))

    async def loaded(self) -> None:
        """Wait until the samplers of open streams have the weights that were published to them."""
        for stream in self._streams:
            if not isinstance(stream, int):
                await stream.loaded()

    def reached(self) -> CursorState:
        """Return the present state, for a checkpoint. DataError if a stream has delivered only a part of a batch."""
        for stream in self._streams:
            if not isinstance(stream, int):
                stream.check_whole("a checkpoint, from which a resumed run begins with a whole batch")
        published = [each if isinstance(each, int) else each.published for each in self._streams]
        published += self._before.published[len(published) :]  # those of streams that are not open yet
        used = self._used.without(self._unfinished()).pairs
        return CursorState(used, self._deals, published, self._closed)

    def _unfinished(self) -> list[int]:
        """Return the prompts that open streams have taken, and neither delivered nor dropped."""
        return [number for each in self._streams if not isinstance(each, int) for number in each.unfinished]

    def _number(self, stream: Stream) -> int | None:
        return next((number for number, each in enumerate(self._streams) if each is stream), None)

    def _record(self, what: Literal["hold", "train", "draw"], groups: Sequence[int]) -> None:
        if groups:
            self._events.append(PromptEvent(what, as_ranges(groups)))


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
        removed = np.unique(np.fromiter(numbers, np.int64))
        removed = removed[self.has(removed)]
        firsts = np.sort(np.concatenate([self._bounds[:, 0], removed + 1]))
        ends = np.sort(np.concatenate([self._bounds[:, 1], removed]))
        return IntervalSet([pair for pair in zip(firsts.tolist(), ends.tolist(), strict=True) if pair[0] < pair[1]])


data_cursor: ContextVar[DataCursor | None] = ContextVar("data_cursor", default=None)
"""The data position of the current run, if it keeps one."""
