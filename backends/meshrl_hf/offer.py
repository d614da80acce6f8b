"""Offers of weights that a policy's ranks broadcast. They name the parts of tensors in each bucket.

Engines' processes read offers too. They have neither meshrl nor torch yet.
"""

from collections.abc import Iterator, Mapping
from math import prod
from typing import NamedTuple


class Part(NamedTuple):
    """A rectangle of a tensor, in a bucket."""

    name: str
    size: tuple[int, ...]
    """Size of the whole tensor."""
    offsets: tuple[int, ...]
    """Start of the rectangle in the tensor."""
    shape: tuple[int, ...]
    start: int
    """Offset in bytes."""


class Layout(NamedTuple):
    """The content of a bucket: parts of one dtype."""

    parts: tuple[Part, ...]
    nbytes: int


class Source(NamedTuple):
    """The parts that one rank of the policy sends. After them, it sends a fingerprint of each, int64."""

    rank: int
    layouts: tuple[Layout, ...]

    @property
    def prints(self) -> int:
        """Size of the fingerprints in bytes."""
        return 8 * sum(len(layout.parts) for layout in self.layouts)


class Offer(NamedTuple):
    """An offer of weights, valid until the policy changes them."""

    place: str
    """HOST:PORT where the policy's ranks met."""
    key: str
    dtype: str
    """The name of the dtype in numpy and torch."""
    sources: tuple[Source, ...]

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of the whole tensors."""
        return {part.name: part.size for part in self._parts()}

    @property
    def numel(self) -> int:
        """Number of elements of all tensors."""
        return sum(prod(part.shape) for part in self._parts())

    def turns(self) -> Iterator[tuple[Source, int]]:
        """Yield all buckets in the order in which they are sent, as their source and their number among its layouts.

        After those of a source come the fingerprints, with the next number.
        """
        sources = {source.rank: source for source in self.sources}
        for rank, number in turns({rank: len(source.layouts) for rank, source in sources.items()}):
            yield sources[rank], number

    def _parts(self) -> Iterator[Part]:
        return (part for source in self.sources for layout in source.layouts for part in layout.parts)


def turns(counts: Mapping[int, int]) -> Iterator[tuple[int, int]]:
    """Yield the buckets of senders, which take turns, as rank and number. `counts`: how many each one has.

    After a sender's last bucket come its fingerprints, with the next number.
    """
    for number in range(max(counts.values(), default=0)):
        for rank in sorted(counts):
            if number < counts[rank]:
                yield rank, number
            if number + 1 == counts[rank]:
                yield rank, counts[rank]
