"""A model's weights at one version, as a policy sends them to a sampler."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar, Final, NamedTuple, Self, cast

import numpy as np
from numpy.typing import NDArray

from meshrl import log
from meshrl.data.bucket import Bucket, Entry
from meshrl.data.ragged import Ragged
from meshrl.errors import DataError
from meshrl.mesh import Array, HasRefs, Put, Rows, fetch

BUCKET: Final = 1 << 28
"""Size of a bucket in bytes. A larger tensor gets its own bucket."""


class Probe(NamedTuple):
    """Some tokens and their log-probs under the weights, which a sampler must reproduce after it has loaded them."""

    tokens: Ragged
    """int32 tokens of each row."""
    logprobs: NDArray[np.float32]
    """Log-probs of each token given those before it, except each row's first, float32[tokens - rows]."""


class AdapterOf(NamedTuple):
    """Says that weights are those of one adapter alone, which change a layer by `alpha / rank * B A`."""

    name: str
    """The adapter that rows name in their column `adapter`."""
    rank: int
    alpha: int


class Weights(HasRefs):
    """Named tensors, with a version: the number of updates that made them. Immutable.

    If they are of one adapter, `adapter` says so. Its tensors have the names that peft gives those of an adapter called
    "default", whatever its name.

    Arrays have any shape, and bfloat16 is that of `ml_dtypes`. They are copied into buckets, each with a fingerprint of
    its bytes. Large buckets are in memory that all processes of a machine share.
    """

    def __init__(self, version: int, tensors: Mapping[str, Array], adapter: AdapterOf | None = None) -> None:
        self._set(version, _buckets_of(tensors.items()), None, adapter)

    @classmethod
    def streamed(
        cls,
        version: int,
        tensors: Iterable[tuple[str, Array]],
        probe: Probe | None = None,
        adapter: AdapterOf | None = None,
    ) -> Self:
        """Make weights from an iterator of names and tensors of any shape.

        At most the tensors of one bucket are in memory in addition.
        """
        return cls.of(version, _buckets_of(tensors), probe, adapter)

    def _set(
        self, version: int, buckets: Sequence[Bucket], probe: Probe | None, adapter: AdapterOf | None = None
    ) -> None:
        self._version, self._buckets, self._probe, self._adapter = version, tuple(buckets), probe, adapter
        self._arrays: Mapping[str, Array] | None = None

    @classmethod
    def of(
        cls, version: int, buckets: Sequence[Bucket], probe: Probe | None = None, adapter: AdapterOf | None = None
    ) -> Self:
        """Make weights from buckets, without a copy."""
        self = cls.__new__(cls)
        self._set(version, buckets, probe, adapter)
        return self

    @classmethod
    def join(cls, parts: Sequence[Self], plan: Sequence[Rows] | None = None) -> Self:  # noqa: ARG003 -- of no rows
        """Join the tensors of all ranks. DataError if versions differ, or if ranks disagree about a tensor."""
        versions = [part.version for part in parts]
        if len(set(versions)) > 1:
            raise DataError(f"the ranks have weights of the versions {versions}: they have not made the same updates")
        owners: dict[str, tuple[int, Entry]] = {}
        buckets: list[Bucket] = []
        for rank, part in enumerate(parts):
            for bucket in part.buckets:
                for name, entry in bucket.index.items():
                    owner, known = owners.setdefault(name, (rank, entry))
                    if known._replace(start=entry.start) != entry:
                        raise DataError(f"the ranks {owner} and {rank} have different tensors `{name}`")
                if any(owners[name][0] == rank for name in bucket.index):
                    buckets.append(bucket)
        return cls.of(versions[0], buckets, next((part.probe for part in parts if part.probe), None), parts[0].adapter)

    @property
    def version(self) -> int:
        """Number of updates that made these weights."""
        return self._version

    @property
    def probe(self) -> Probe | None:
        """Log-probs of some tokens under these weights, or None."""
        return self._probe

    @property
    def adapter(self) -> AdapterOf | None:
        """The adapter that these are the weights of. None if they are a whole model's."""
        return self._adapter

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The buckets that hold the tensors."""
        return self._buckets

    @property
    def tensors(self) -> Mapping[str, Array]:
        """The arrays of any shape by parameter name, read-only. DataError if they are remote: `load` them first."""
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
    def transports(self) -> frozenset[str]:
        """How the weights arrived here, such as `shared memory`."""
        return frozenset(bucket.transport for bucket in self._buckets)

    async def load(self) -> Self:
        """Fetch the weights, so that they can be read here. Weights that are passed on to a mesh need not be loaded."""
        refs = [bucket.held for bucket in self._buckets if bucket.held]
        if not refs:
            return self
        fetched = {ref: cast("Bucket", value).fetched_by(ref) for ref, value in (await fetch(refs)).items()}
        buckets = [fetched[bucket.held] if bucket.held else bucket for bucket in self._buckets]
        return self.of(self._version, buckets, self._probe, self._adapter)

    def hold(self, put: Put, limit: int, shares: bool = False) -> Self:
        """Move each bucket with more than `limit` bytes elsewhere by `put`, unless it is there already."""
        buckets = [each.hold(put, limit, shares) for each in self._buckets]
        return self.of(self._version, buckets, self._probe, self._adapter)

    def shared(self) -> "Weights":
        """Return the weights in this machine's shared memory, and copy them there if needed.

        Raises DataError if there is not enough room.
        """
        return Weights.of(self._version, [bucket.shared() for bucket in self.buckets], self._probe, self._adapter)

    @property
    def lasts(self) -> bool:
        """True if the weights can be read as long as their ranks live, even after the policy has changed."""
        return True

    def read_by(self, together: int) -> Self:
        """Return the weights for `together` ranks that read them at the same time."""
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(bucket.nbytes for bucket in self._buckets)

    def fingerprint(self) -> str:
        """Return a hex digest of names, dtypes, shapes and bytes, regardless of the version."""
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
        """Return the same tensors, not copied, with another version."""
        return self.of(version, self._buckets, self._probe, self._adapter)

    def named(self, adapter: str) -> Self:
        """Return the same weights of an adapter under another name, such as that of one version.

        DataError if they are a whole model's.
        """
        if self._adapter is None:
            raise DataError(f"the weights of version {self._version} are a whole model's, not those of an adapter")
        return self.of(self._version, self._buckets, self._probe, self._adapter._replace(name=adapter))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Weights):
            return NotImplemented
        return self._version == other.version and self.fingerprint() == other.fingerprint()

    __hash__: ClassVar[None] = None  # type: ignore[assignment]

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> tuple[Callable[..., "Weights"], tuple[object, ...]]:
        return _unpickled, (self._version, self._buckets, self._probe, self._adapter)

    def __repr__(self) -> str:
        size = f"{self.nbytes:,} bytes"
        of = f"adapter {self._adapter.name!r}, " if self._adapter else ""
        if any(bucket.held for bucket in self._buckets):
            return f"Weights({of}version {self._version}, {size} elsewhere)"
        count = sum(len(bucket.index) for bucket in self._buckets)
        return f"Weights({of}version {self._version}, {count} tensors, {size})"


def _unpickled(version: int, buckets: Sequence[Bucket], probe: Probe | None, adapter: AdapterOf | None) -> Weights:
    return Weights.of(version, buckets, probe, adapter)


def _buckets_of(tensors: Iterable[tuple[str, Array]]) -> Sequence[Bucket]:
    buckets: list[Bucket] = []
    arrays: dict[str, Array] = {}
    size = 0
    for name, array in tensors:
        if arrays and size + array.nbytes > BUCKET:
            buckets.append(Bucket.pack(arrays))
            arrays, size = {}, 0
        arrays[name] = array
        size += array.nbytes
    return [*buckets, Bucket.pack(arrays)] if arrays else buckets


_REASONS: Final = {
    "memory": "the policy is in this process, or the weights are small",
    "shared memory": "the policy is on this machine",
    "collectives": "the policy is on another machine",
    "the object store": "the policy is on another machine, and collectives do not carry these weights",
    "changes through": 'policy.weight_sync = "delta"',
    "broadcast": 'policy.weight_sync = "broadcast"',
}
"""Why weights take a transport, by how its name begins."""


class ArrivalLog:
    """Logs by which transport a sampler's weights arrive: for the first weights, and when it changes."""

    def __init__(self) -> None:
        self.transports: frozenset[str] = frozenset()
        """Of the last weights."""

    def note(self, weights: Weights) -> None:
        """Log how weights have arrived, if that is new."""
        if weights.transports == self.transports:
            return
        self.transports = weights.transports
        transports = sorted(self.transports)
        reasons = [reason for name in transports for prefix, reason in _REASONS.items() if name.startswith(prefix)]
        log.info("weights arrive", by=", ".join(transports), because="; ".join(reasons), version=weights.version)
