"""A model's weights at one version, as they travel from a policy to a sampler."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar, Final, NamedTuple, Self, cast

import numpy as np
from numpy.typing import NDArray

from meshrl.errors import DataError
from meshrl.mesh import Array, HasRefs, Put, Rows, fetch
from meshrl.weights.bucket import Bucket

BUCKET: Final = 1 << 28
"""Bytes of a bucket; a larger tensor has one of its own."""


class Probe(NamedTuple):
    """Some tokens and what the model of the weights says of them: a sampler that took these must say the same."""

    tokens: NDArray[np.int32]
    """[rows, tokens]."""
    logprobs: NDArray[np.float32]
    """Of each token but a row's first, given those before it, [rows, tokens - 1]."""


class Weights(HasRefs):
    """Named tensors and the number of updates that made them. Immutable.

    Arrays of any shape, bfloat16 through `ml_dtypes`. They are copied, bucket by bucket, each with a fingerprint of its
    bytes; large ones into memory that all processes of a machine share.
    """

    def __init__(self, version: int, tensors: Mapping[str, Array]) -> None:
        self._set(version, _packed(tensors.items()), None)

    @classmethod
    def streamed(cls, version: int, tensors: Iterable[tuple[str, Array]], probe: Probe | None = None) -> Self:
        """The same of tensors that are made one after another: no more than those of one bucket are kept meanwhile."""
        return cls.of(version, _packed(tensors), probe)

    def _set(self, version: int, buckets: Sequence[Bucket], probe: Probe | None) -> None:
        self._version, self._buckets, self._probe = version, tuple(buckets), probe
        self._arrays: Mapping[str, Array] | None = None

    @classmethod
    def of(cls, version: int, buckets: Sequence[Bucket], probe: Probe | None = None) -> Self:
        """The tensors of buckets, not copied."""
        self = cls.__new__(cls)
        self._set(version, buckets, probe)
        return self

    @classmethod
    def join(cls, parts: Sequence[Self], plan: Sequence[Rows] | None = None) -> Self:  # noqa: ARG003 -- of no rows
        """The tensors of all ranks. DataError where versions differ, or ranks tell different things of a tensor."""
        first = parts[0]
        versions = [part.version for part in parts]
        if len(set(versions)) > 1:
            raise DataError(f"the ranks have weights of the versions {versions}: they have not made the same updates")
        told: dict[str, tuple[int, tuple[object, ...]]] = {}
        buckets: list[Bucket] = []
        for rank, part in enumerate(parts):
            for bucket in part.buckets:
                for name, entry in bucket.index.items():
                    what = (entry.dtype, entry.shape, entry.fingerprint)
                    other, same = told.setdefault(name, (rank, what))
                    if same != what:
                        raise DataError(f"the ranks {other} and {rank} have different tensors `{name}`")
                if any(told[name][0] == rank for name in bucket.index):
                    buckets.append(bucket)
        return cls.of(first.version, buckets, next((part.probe for part in parts if part.probe), None))

    @property
    def version(self) -> int:
        """How many updates made these weights."""
        return self._version

    @property
    def probe(self) -> Probe | None:
        """What the model says of some tokens, where it is known."""
        return self._probe

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The tensors as they travel."""
        return self._buckets

    @property
    def tensors(self) -> Mapping[str, Array]:
        """The arrays by parameter name, read-only. DataError where they stayed on the rank: `load` them first."""
        if any(bucket.held for bucket in self.buckets):
            raise DataError(
                f"the weights of version {self._version} ({self.nbytes} bytes) lie on the rank that made them: write "
                "`weights = await weights.load()` before reading them here"
            )
        if self._arrays is None:
            self._arrays = MappingProxyType(
                {name: array for bucket in self.buckets for name, array in bucket.arrays.items()}
            )
        return self._arrays

    @property
    def ways(self) -> frozenset[str]:
        """What carried them here: such as `shared memory`."""
        return frozenset(bucket.way for bucket in self._buckets)

    async def load(self) -> Self:
        """The same weights, readable here. What is handed on to a mesh need not be loaded."""
        held = [bucket.held for bucket in self._buckets if bucket.held]
        if not held:
            return self
        values = {each: cast("Bucket", value).fetched_by(each) for each, value in (await fetch(held)).items()}
        here = [values[bucket.held] if bucket.held else bucket for bucket in self._buckets]
        return self.of(self._version, here, self._probe)

    def hold(self, put: Put, limit: int, shares: bool = False) -> Self:
        """The same weights, each bucket of more than `limit` bytes kept where it is, or elsewhere by `put`."""
        return self.of(self._version, [each.hold(put, limit, shares) for each in self._buckets], self._probe)

    def shared(self) -> "Weights":
        """The same weights in this machine's shared memory, to which they are copied where they are elsewhere.

        DataError where there is no room.
        """
        return Weights.of(self._version, [bucket.shared() for bucket in self.buckets], self._probe)

    @property
    def lasts(self) -> bool:
        """Whether they are to be had as long as the ranks live that made them, also when the policy goes on."""
        return True

    def read_by(self, together: int) -> Self:
        """The same weights, which so many ranks read at the same time."""
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(bucket.nbytes for bucket in self._buckets)

    def fingerprint(self) -> str:
        """A hex digest of names, dtypes, shapes and bytes, whatever the version."""
        digest = hashlib.blake2b(digest_size=16)
        entries = sorted(
            (name, entry.dtype, entry.shape, entry.fingerprint)
            for bucket in self.buckets
            for name, entry in bucket.index.items()
        )
        for entry in entries:
            digest.update(repr(entry).encode())
        return digest.hexdigest()

    def with_version(self, version: int) -> Self:
        """The same tensors, not copied, under another version."""
        return self.of(version, self._buckets, self._probe)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Weights):
            return NotImplemented
        return self._version == other.version and self.fingerprint() == other.fingerprint()

    __hash__: ClassVar[None] = None  # type: ignore[assignment]

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> tuple[Callable[..., "Weights"], tuple[object, ...]]:
        return _received, (self._version, self._buckets, self._probe)

    def __repr__(self) -> str:
        size = f"{self.nbytes:,} bytes"
        if any(bucket.held for bucket in self._buckets):
            return f"Weights(version {self._version}, {size} elsewhere)"
        return f"Weights(version {self._version}, {sum(len(bucket.index) for bucket in self._buckets)} tensors, {size})"


def _received(version: int, buckets: Sequence[Bucket], probe: Probe | None) -> Weights:
    return Weights.of(version, buckets, probe)


def _packed(tensors: Iterable[tuple[str, Array]]) -> Sequence[Bucket]:
    return list(map(Bucket.pack, _lots(tensors)))


def _lots(pairs: Iterable[tuple[str, Array]]) -> Iterable[Mapping[str, Array]]:
    lot: dict[str, Array] = {}
    size = 0
    for name, array in pairs:
        if lot and size + array.nbytes > BUCKET:
            yield lot
            lot, size = {}, 0
        lot[name] = array
        size += array.nbytes
    if lot:
        yield lot
