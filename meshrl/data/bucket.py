"""Buckets: weights travel as tensors in one buffer, which a machine's processes share."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from types import MappingProxyType
from typing import Final, NamedTuple, SupportsIndex, TypeVar, cast

import numpy as np
from typing_extensions import Buffer
from xxhash import xxh3_64

from meshrl.data.ragged import check_dtype, from_raw, pickled, raw
from meshrl.errors import DataError
from meshrl.mesh import Array, Bytes, ForAll, Put, Ref, Segment, free_cores, note_transit, pool

_ALIGNED: Final = 64
"""Bytes. Each tensor starts at a multiple."""
_BLOCK: Final = 1 << 18
"""Size in bytes of a block, which is copied and read again while it is in the cache."""
_SHARED_FROM: Final = 1 << 20
"""Size in bytes of the smallest bucket in shared memory."""
_THREADS: Final = min(8, free_cores())
"""Threads that copy and read tensors. One does not use the memory's whole bandwidth."""

T = TypeVar("T")


class Entry(NamedTuple):
    """A tensor in a bucket."""

    dtype: str
    """The name of the dtype in numpy."""
    shape: tuple[int, ...]
    start: int
    """Offset in bytes."""
    fingerprint: int
    """XXH3's 64 bits of its bytes."""


class Bucket(ForAll):
    """Tensors in a read-only buffer of `nbytes` bytes, uint8[bytes], or the reference to fetch them."""

    def __init__(
        self, index: Mapping[str, Entry], nbytes: int, source: Bytes | Segment | Ref, origin: Ref | None = None
    ) -> None:
        self.index: Final = index
        """The tensors by name."""
        self.nbytes: Final = nbytes
        """Size of all tensors in bytes."""
        self._source = source
        self._origin = origin

    @classmethod
    def pack(cls, arrays: Mapping[str, Array]) -> "Bucket":
        """Copy arrays of any shape, into shared memory if available. DataError for arrays without numbers."""
        arrays = {name: _native(array, name) for name, array in arrays.items()}
        starts: dict[str, int] = {}
        end = 0
        for name, array in arrays.items():
            starts[name] = end
            end += -(-array.nbytes // _ALIGNED) * _ALIGNED
        writing = pool.write(end) if end >= _SHARED_FROM else None
        memory = writing.memory if writing else np.empty(end, np.uint8)
        places = [memory[starts[name] : starts[name] + array.nbytes] for name, array in arrays.items()]
        pairs = list(zip(arrays.values(), places, strict=True))
        fingerprints = _in_threads(lambda pair: _copy(*pair), pairs, end)
        index = {
            name: Entry(array.dtype.name, array.shape, starts[name], each)
            for (name, array), each in zip(arrays.items(), fingerprints, strict=True)
        }
        memory.flags.writeable = False
        return cls(index, sum(array.nbytes for array in arrays.values()), writing.done() if writing else memory)

    @property
    def held(self) -> Ref | None:
        """The reference to fetch it. None if it is here."""
        return self._source if isinstance(self._source, Ref) else None

    @property
    def segment(self) -> Segment | None:
        """The shared memory segment that holds it, or None."""
        return self._source if isinstance(self._source, Segment) else None

    @property
    def transport(self) -> str:
        """The transport that brought it here."""
        if self._origin:
            return self._origin.transport
        return SegmentRef.transport if self.segment else "memory"

    @property
    def memory(self) -> Bytes:
        """The buffer, uint8[bytes], padded to a multiple of 64. DataError if it is not here."""
        if isinstance(self._source, Ref):
            raise DataError(f"{self.nbytes} bytes of weights lie elsewhere: load them first")
        return self._source.memory if isinstance(self._source, Segment) else self._source

    @property
    def arrays(self) -> Mapping[str, Array]:
        """The tensors of any shape by name, read-only. DataError if they are not here."""
        memory = self.memory
        return MappingProxyType({name: _view(memory, entry) for name, entry in self.index.items()})

    def hold(self, put: Put, limit: int, shares: bool) -> "Bucket":
        """Return the same tensors. If they exceed `limit` bytes, they are kept in place, or by `put`."""
        if self.nbytes <= limit or self.held:
            return self
        ref = SegmentRef.of(self, self.segment) if shares and self.segment else self._origin or put(self)
        return Bucket(self.index, self.nbytes, ref)

    def fetched_by(self, ref: Ref) -> "Bucket":
        """Return the same tensors, which later receivers fetch by this reference too."""
        return Bucket(self.index, self.nbytes, self._source, ref)

    def shared(self) -> "Bucket":
        """Return the same tensors in shared memory, copied if needed. DataError if there is no room."""
        if self.segment or not self.nbytes:
            return self
        memory = self.memory
        found = pool.find(memory.data)
        if found and not found[1]:  # as received from another machine
            return Bucket(self.index, self.nbytes, Segment(found[0].path, len(memory)))
        writing = pool.write(len(memory))
        if writing is None:
            raise DataError(
                f"{len(memory)} bytes of weights do not fit into this machine's shared memory: {pool.state()}"
            )
        np.copyto(writing.memory, memory)
        return Bucket(self.index, self.nbytes, writing.done())

    def damaged(self) -> list[str]:
        """Return the names of tensors whose bytes differ from the packed ones."""
        now = _in_threads(fingerprint, list(self.arrays.values()), self.nbytes)
        return [name for (name, entry), each in zip(self.index.items(), now, strict=True) if each != entry.fingerprint]

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Callable[..., "Bucket"], tuple[object, ...]]:
        if isinstance(self._source, Ref):
            return Bucket, (dict(self.index), self.nbytes, self._source)
        return _unpickled, (dict(self.index), self.nbytes, *pickled(self.memory, protocol.__index__()))


class SegmentRef(Ref):
    """A bucket that stays in this machine's shared memory, for all its processes."""

    transport = "shared memory"

    def __init__(self, path: str, size: int, index: Mapping[str, Entry], nbytes: int, bucket: Bucket | None) -> None:
        """`size`: bytes of the segment. `bucket`: None if it is gone."""
        self._arguments = path, size, index, nbytes
        self._bucket = bucket

    @classmethod
    def of(cls, bucket: Bucket, segment: Segment) -> "SegmentRef":
        """Hold a bucket in a segment."""
        return cls(segment.path, segment.nbytes, dict(bucket.index), bucket.nbytes, bucket)

    @classmethod
    async def fetch(cls, held: Sequence[Ref]) -> list[object]:
        """Return the buckets. DataError if one is gone."""
        return [each.bucket() for each in cast("Sequence[SegmentRef]", held)]

    def bucket(self) -> Bucket:
        """Return the bucket. DataError if it is gone."""
        path, size, index, nbytes = self._arguments
        return self._bucket or Bucket(index, nbytes, Segment(path, size))

    def __reduce__(self) -> tuple[Callable[..., "SegmentRef"], tuple[object, ...]]:
        if self._bucket and self._bucket.segment:
            note_transit(self._bucket.segment)
        return _segment_ref, self._arguments


def fingerprint(array: Array) -> int:
    """Return XXH3's 64 bits of an array's bytes, in the order of its elements."""
    return int(xxh3_64(raw(np.ascontiguousarray(array))).intdigest())


def _in_threads(function: Callable[[T], int], values: Sequence[T], nbytes: int) -> list[int]:
    """Apply a function to each value. A thread takes neighbours, which is faster than taking turns."""
    if nbytes < _SHARED_FROM:
        return list(map(function, values))
    each = -(-len(values) // _THREADS)
    runs = [values[start : start + each] for start in range(0, len(values), each)]
    with ThreadPoolExecutor(_THREADS, "meshrl-bucket") as threads:
        return [result for run in threads.map(lambda run: list(map(function, run)), runs) for result in run]


def _native(array: Array, name: str) -> Array:
    """Return the same numbers in this machine's byte order."""
    check_dtype(array, f"weight `{name}`")
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _view(memory: Bytes, entry: Entry) -> Array:
    dtype = np.dtype(entry.dtype)
    return memory[entry.start : entry.start + prod(entry.shape) * dtype.itemsize].view(dtype).reshape(entry.shape)


def _copy(array: Array, place: Bytes) -> int:
    """Copy an array's bytes to their place, and return their fingerprint."""
    source = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    digest = xxh3_64()
    for start in range(0, len(source), _BLOCK):
        block = place[start : start + _BLOCK]
        np.copyto(block, source[start : start + _BLOCK])
        digest.update(block.data)
    return int(digest.intdigest())


def _unpickled(index: Mapping[str, Entry], nbytes: int, buffer: Buffer, dtype: str, shape: tuple[int, ...]) -> Bucket:
    return Bucket(index, nbytes, cast("Bytes", from_raw(buffer, dtype, shape)))


def _segment_ref(path: str, size: int, index: Mapping[str, Entry], nbytes: int) -> SegmentRef:
    try:
        bucket = Bucket(index, nbytes, Segment(path, size))
    except DataError:  # reported by `fetch`: an error raised here would be lost
        bucket = None
    return SegmentRef(path, size, index, nbytes, bucket)
