"""The account of a run's prompts: a line of groups.jsonl for each step, which an audit reads.

The numbers are those of `groups`: one for each prompt drawn, whichever epoch it is drawn in.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Final, Literal, TypeAlias

import msgspec

Ranges: TypeAlias = Sequence[tuple[int, int]]
"""Numbers, ascending, as ranges: the first and the one after the last. One that comes twice is in two ranges."""


_MOST: Final = 1 << 24
"""More prompts than a step has."""


class Happening(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One thing that happened to prompts, or to a stream that draws them."""

    what: Literal["begin", "open", "hold", "train", "draw", "deliver", "drop", "publish"]
    """A process of the run began; a stream was opened; the script took prompts itself, before its loop (`hold`) or in
    it, where it trains on them (`train`); a stream took prompts, gave groups to the trainer, or dropped them; weights
    were published to a stream."""
    groups: Ranges = ()
    stream: int | None = None
    """Which stream of the process, in the order in which they were opened."""
    ahead: int = 0
    """Of an `open`: the bound, in published versions."""
    why: str = ""
    """Of a `drop`: `filtered`, `stale`, or `closed` where the stream had not finished them at its end."""
    version: int = 0
    """Of a `publish`: the number of the weights. Of a `deliver`: that of those that sampled its oldest token."""
    staleness: int = 0
    """Of a `deliver`: how many publications the oldest row is behind the trainer."""
    counts: bool = True
    """Of a `publish`: whether it ages tokens. What comes before the first draw does not."""

    def __post_init__(self) -> None:
        """ValueError where the ranges are none."""
        _check(self.groups)


class StepAccount(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What happened in a step, or between two of them."""

    step: int | None
    """None for what came between two steps, or after the last."""
    happened: Sequence[Happening]
    under_way: Ranges
    """Prompts that streams had taken by its end, and neither delivered nor dropped."""
    dealt: Sequence[int]
    """By deal of `Task.batches`: the number that it deals next."""

    def __post_init__(self) -> None:
        """ValueError where the ranges are none."""
        _check(self.under_way)


def as_ranges(numbers: Iterable[int]) -> Ranges:
    """Numbers in any order as ranges."""
    ordered = sorted(numbers)
    if not ordered:
        return ()
    breaks = [at for at, (one, other) in enumerate(pairwise(ordered), 1) if other != one + 1]
    return [(ordered[first], ordered[end - 1] + 1) for first, end in pairwise([0, *breaks, len(ordered)])]


def in_ranges(ranges: Ranges) -> Iterator[int]:
    """The numbers of ranges."""
    return (number for first, end in ranges for number in range(first, end))


def _check(ranges: Ranges) -> None:
    """So that a damaged file is an error, and not a loop without end."""
    for first, end in ranges:
        if not 0 <= first < end <= first + _MOST:
            raise ValueError(f"[{first}, {end}] is not a range of prompts of a step")
