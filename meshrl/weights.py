"""A model's weights at one version, as they travel from a policy to a sampler."""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from math import prod
from types import MappingProxyType
from typing import NamedTuple, SupportsIndex, cast

import numpy as np
from typing_extensions import Buffer

from meshrl.errors import DataError
from meshrl.held import Held, Holder, Put, fetched
from meshrl.ragged import check_dtype, from_raw, pickled, raw
from meshrl.sharding import Array


class Weights(Holder):
    """Named tensors and the number of updates that made them. Immutable.

    Arrays of any shape, bfloat16 through `ml_dtypes`. They are copied, those of one dtype one after another into one
    buffer, which travels as a whole.
    """

    def __init__(self, version: int, tensors: Mapping[str, Array]) -> None:
        self._version = version
        self._nbytes = sum(array.nbytes for array in tensors.values())
        self._tensors: _Tensors | None = _Tensors.pack(tensors)
        self._held: Held | None = None
        self._digest: str | None = None

    @classmethod
    def _make(cls, version: int, nbytes: int, tensors: "_Tensors | None", held: Held | None) -> "Weights":
        self = cls.__new__(cls)
        self._version, self._nbytes, self._tensors, self._held = version, nbytes, tensors, held
        self._digest = None
        return self

    @property
    def version(self) -> int:
        """How many updates made these weights."""
        return self._version

    @property
    def tensors(self) -> Mapping[str, Array]:
        """The arrays by parameter name, read-only. DataError where they stayed on the rank: `load` them first."""
        if self._tensors is None:
            raise DataError(
                f"the weights of version {self._version} ({self._nbytes} bytes) lie on the rank that made them: write "
                "`weights = await weights.load()` before reading them here"
            )
        return self._tensors.arrays

    async def load(self) -> "Weights":
        """The same weights, readable here. What is handed on to a mesh need not be loaded."""
        if self._tensors is not None or self._held is None:
            return self
        tensors = (await fetched([self._held]))[self._held]
        return self._make(self._version, self._nbytes, cast("_Tensors", tensors), self._held)

    def hold(self, put: Put, limit: int) -> "Weights":
        """The same weights, all tensors together kept elsewhere by `put` if they have more than `limit` bytes."""
        if self._held is None and self._nbytes <= limit:
            return self
        return self._make(self._version, self._nbytes, None, self._held or put(self._tensors))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self._nbytes

    def fingerprint(self) -> str:
        """A hex digest of names, dtypes, shapes and bytes, whatever the version; computed once."""
        if self._digest is not None:
            return self._digest
        digest = hashlib.blake2b(digest_size=16)
        for name, array in sorted(self.tensors.items()):
            digest.update(repr((name, array.dtype.name, array.shape)).encode())
            digest.update(raw(array))
        self._digest = digest.hexdigest()
        return self._digest

    def with_version(self, version: int) -> "Weights":
        """The same tensors, not copied, under another version."""
        return self._make(version, self._nbytes, self._tensors, self._held)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Weights):
            return NotImplemented
        return self._version == other.version and self.fingerprint() == other.fingerprint()

    __hash__ = None  # type: ignore[assignment]

    def __deepcopy__(self, memo: object) -> "Weights":
        return self

    def __reduce__(self) -> tuple[Callable[..., "Weights"], tuple[object, ...]]:
        """What is held travels as a reference alone."""
        tensors = self._tensors if self._held is None else None
        return _received, (self._version, self._nbytes, tensors, self._held)

    def __repr__(self) -> str:
        size = f"{self._nbytes:,} bytes"
        if self._tensors is None:
            return f"Weights(version {self._version}, {size} elsewhere)"
        return f"Weights(version {self._version}, {len(self._tensors.arrays)} tensors, {size})"


def _received(version: int, nbytes: int, tensors: "_Tensors | None", held: Held | None) -> Weights:
    return Weights._make(version, nbytes, tensors, held)


class _Entry(NamedTuple):
    """Where a tensor lies."""

    dtype: str
    start: int
    """In elements, from the beginning of its dtype's buffer."""
    shape: tuple[int, ...]


class _Tensors:
    """Tensors as they travel: a buffer for each dtype, out of band, and an index."""

    def __init__(self, buffers: Mapping[str, Array], index: Mapping[str, _Entry]) -> None:
        self._buffers = buffers
        self._index = index
        self.arrays = MappingProxyType({name: self._view(entry) for name, entry in index.items()})

    def _view(self, entry: _Entry) -> Array:
        return self._buffers[entry.dtype][entry.start : entry.start + prod(entry.shape)].reshape(entry.shape)

    @classmethod
    def pack(cls, arrays: Mapping[str, Array]) -> "_Tensors":
        """Copy the arrays. DataError for what is not numbers."""
        sizes: Counter[str] = Counter()
        index: dict[str, _Entry] = {}
        for name, array in arrays.items():
            check_dtype(array, f"weight `{name}`")
            index[name] = _Entry(array.dtype.name, sizes[array.dtype.name], array.shape)
            sizes[array.dtype.name] += array.size
        packed = cls({dtype: np.empty(size, dtype) for dtype, size in sizes.items()}, index)
        for name, array in arrays.items():
            packed.arrays[name][...] = array
        for buffer in (*packed._buffers.values(), *packed.arrays.values()):
            buffer.flags.writeable = False
        return packed

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Callable[..., "_Tensors"], tuple[object, ...]]:
        version = protocol.__index__()
        buffers = {dtype: pickled(buffer, version) for dtype, buffer in self._buffers.items()}
        return _unpickled, (buffers, self._index)


def _unpickled(buffers: Mapping[str, tuple[Buffer, str, tuple[int, ...]]], index: Mapping[str, _Entry]) -> _Tensors:
    return _Tensors({dtype: from_raw(*buffer) for dtype, buffer in buffers.items()}, index)
