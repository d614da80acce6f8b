"""Offers of weights that a policy's ranks broadcast. They name the parts of tensors in each bucket.

Engines' processes read offers too. They have neither meshrl nor torch yet.
"""

from collections.abc import Iterator, Mapping
from itertools import zip_longest
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

    def buckets(self) -> list[tuple[int, Layout]]:
        """All buckets with the number of their sender, in the order for every reader, in which senders take turns."""
        rounds = zip_longest(*([(source.rank, layout) for layout in source.layouts] for source in self.sources))
        return [each for turn in rounds for each in turn if each is not None]

    def _parts(self) -> Iterator[Part]:
        return (part for source in self.sources for layout in source.layouts for part in layout.parts)
