"""The account of a run's prompts: a line in groups.jsonl for each step, for audits.

The numbers are those of `groups`: one for each drawn prompt, different in each epoch.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Final, Literal, TypeAlias

import msgspec

Ranges: TypeAlias = Sequence[tuple[int, int]]
"""Ascending numbers as ranges: the first, and the one after the last. A repeated number is in two ranges."""


_MOST: Final = 1 << 24
"""An upper bound of the prompts in a step."""


class Happening(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
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
    happened: Sequence[Happening]
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
