"""Manifests of weights that a policy's ranks broadcast: the parts of tensors in each bucket.

Importable without torch, as engines' processes read manifests before they import it.
"""

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

FP8: Final = "float8_e4m3fn"
"""The name of the FP8 format in torch: 4 bits of exponent, 3 of mantissa, no infinity."""
SCALE: Final = "_scale"
"""Suffix of the name of an FP8 matrix's scales, float32[rows, 1]."""


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
    dtype: str
    """The name of the dtype in torch."""


class Layout(NamedTuple):
    """The content of a bucket."""

    parts: tuple[Part, ...]
    nbytes: int


class RankBuckets(NamedTuple):
    """The buckets that one rank of the policy sends. After them, it sends a fingerprint of each, int64."""

    rank: int
    layouts: tuple[Layout, ...]

    @property
    def fingerprint_bytes(self) -> int:
        """Size of the fingerprints in bytes."""
        return 8 * len(self.layouts)


class Manifest(NamedTuple):
    """The content of one broadcast, valid until the policy changes its parameters."""

    address: str
    """HOST:PORT of the store of the policy's ranks."""
    key: str
    dtype: str
    """The name of the policy's dtype in numpy and torch. Some tensors are float32, and matrices may be sent in FP8."""
    sources: tuple[RankBuckets, ...]

    @property
    def parts(self) -> Iterator[Part]:
        """All parts of all tensors."""
        return (part for source in self.sources for layout in source.layouts for part in layout.parts)

    @property
    def sent(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the whole tensors that are sent, including the scales of matrices in FP8."""
        return {part.name: part.size for part in self.parts}

    @property
    def in_fp8(self) -> frozenset[str]:
        """Names of matrices that are sent in FP8."""
        return frozenset(part.name for part in self.parts if part.dtype == FP8)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the policy's whole tensors."""
        scales = {name + SCALE for name in self.in_fp8}
        return {name: shape for name, shape in self.sent.items() if name not in scales}

    @property
    def dtypes(self) -> Mapping[str, str]:
        """Dtypes of the policy's whole tensors, those of matrices before they are sent in FP8."""
        return {part.name: self.dtype if part.dtype == FP8 else part.dtype for part in self.parts}

    def send_order(self) -> Iterator[tuple[RankBuckets, int]]:
        """Yield all buckets in the order in which they are sent, as their source and their number among its layouts.

        After those of a source come the fingerprints, with the next number.
        """
        sources = {source.rank: source for source in self.sources}
        for rank, number in send_order({rank: len(source.layouts) for rank, source in sources.items()}):
            yield sources[rank], number


def send_order(counts: Mapping[int, int]) -> Iterator[tuple[int, int]]:
    """Yield the buckets of senders, which take turns, as rank and number. `counts`: number of buckets by rank.

    After a sender's last bucket come its fingerprints, with the next number.
    """
    for number in range(max(counts.values(), default=0)):
        for rank in sorted(counts):
            if number < counts[rank]:
                yield rank, number
            if number + 1 == counts[rank]:
                yield rank, counts[rank]
