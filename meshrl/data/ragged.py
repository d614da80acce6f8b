"""Frozen arrays, columns with one array for each row, and what computed their values."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pickle import PickleBuffer
from typing import ClassVar, Literal, Self, SupportsIndex, TypeAlias, TypeVar

import ml_dtypes  # registers bfloat16 and the 8-bit floats with numpy, by name
import msgspec
import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray
from typing_extensions import Buffer

from meshrl.errors import DataError
from meshrl.mesh import Array, Rows, is_in_place

Origin: TypeAlias = Literal["sampler", "trainer", "reference"]
"""The roles that compute columns of log-probs."""


class Source(msgspec.Struct, frozen=True, array_like=True):
    """The source of a token column: `Source("sampler")`, `Source("reference")` or `Source.trainer(version)`.

    `oldest` and `newest` are the known policy versions of the trainer among the rows. The other sources have none. The
    version that sampled a token is in the column `versions`.
    """

    role: Origin
    oldest: int | None = None
    newest: int | None = None

    @classmethod
    def trainer(cls, version: int) -> Self:
        """The trainer at this version of its policy."""
        return cls("trainer", version, version)

    def __str__(self) -> str:
        if self.oldest is None:
            return self.role
        return f"{self.role}@{self.oldest}" + (f"-{self.newest}" if self.newest != self.oldest else "")


def join_sources(name: str, sources: Iterable[Source | None]) -> Source | None:
    """Join the sources of several parts of the column `name`. Trainers give the range of their versions.

    A source that is known for some rows holds for all. So a loss still refuses rows after they were joined with rows of
    an unknown source. Returns None if no source is known. Raises DataError if the roles differ.
    """
    distinct = set(sources)
    if len(distinct) <= 1:  # nearly always, and cheap
        return distinct.pop() if distinct else None
    known = [source for source in distinct if source is not None]
    roles = sorted({source.role for source in known})
    if len(roles) > 1:
        raise DataError(
            f"column `{name}` was computed by the {' in one part and by the '.join(roles)} in another: log-probs of "
            "different models are different quantities: keep them in columns with different names"
        )
    oldest = [source.oldest for source in known if source.oldest is not None]
    newest = [source.newest for source in known if source.newest is not None]
    return Source(known[0].role, min(oldest, default=None), max(newest, default=None))


Dtype: TypeAlias = np.dtype[np.generic]
A = TypeVar("A", bound=Array)

_NARROW = frozenset(np.dtype(scalar) for scalar in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2))
_COPIED = 4096
"""Size in bytes of the largest array that is pickled as a copy, which takes less time than to wrap it."""


def check_dtype(array: Array, what: str) -> None:
    """Raise `DataError` unless an array of any shape holds numbers or booleans."""
    if array.dtype.kind not in "biufc" and array.dtype not in _NARROW:
        raise DataError(
            f"{what} has dtype {array.dtype}, which meshrl does not support: give numbers or booleans as an "
            "array, and text or other Python values as a tuple or list"
        )


def frozen(array: Array, what: str = "an array") -> Array:
    """Return the values as a read-only, C-contiguous, native-endian array.

    An array that owns its memory, or comes from `mesh.empty`, is frozen in place: writing to it raises from then on.
    Views that were made before stay writable, and must not be used any more. A view of memory that may still be written
    is copied. The array may have any shape, with dtype bool, integer, float, complex, bfloat16 or float8. Raises a
    DataError that names `what` for other dtypes.
    """
    check_dtype(array, what)
    if type(array) is not np.ndarray or not array.flags.c_contiguous or not array.dtype.isnative:
        array = np.array(array, dtype=array.dtype.newbyteorder("="), order="C", subok=False)
    if array.flags.writeable and not (array.flags.owndata or is_in_place(array)):
        array = array.copy()
    elif isinstance(array.base, np.ndarray) and array.base.flags.writeable:
        array = array.copy()  # a read-only view of an array that its owner can still write to
    array.flags.writeable = False
    return array


def sealed(array: A) -> A:
    """Make a fresh array of our own read-only, in place."""
    array.setflags(write=False)
    return array


def raw(array: Array) -> memoryview:
    """Return the bytes of a C-contiguous array of any shape, not copied.

    This works for dtypes without a buffer too, such as bfloat16.
    """
    return array.reshape(-1).view(np.uint8).data


def from_raw(buffer: Buffer, dtype: str, shape: tuple[int, ...]) -> Array:
    """Make the array, of any shape, from the result of `raw`.

    It is a read-only view of the buffer, which must not be written any more.
    """
    values: Array = np.frombuffer(memoryview(buffer), dtype).reshape(shape)
    return sealed(values)


def portable(array: Array, protocol: SupportsIndex) -> Buffer:
    """Return the bytes of an array of any shape for pickle.

    Many bytes are out of band if the protocol supports it.
    """
    return PickleBuffer(raw(array)) if array.nbytes > _COPIED and protocol.__index__() >= 5 else array.tobytes()


def pickled(array: Array, protocol: SupportsIndex) -> tuple[Buffer, str, tuple[int, ...]]:
    """Return the arguments of `from_raw` for an array of any shape, as `__reduce_ex__` needs them."""
    return portable(array, protocol), dtype_name(array.dtype), array.shape


@cache
def dtype_name(dtype: Dtype) -> str:
    """Return the name of a dtype. Cached, because numpy computes it on each call."""
    return dtype.name


def check_offsets(offsets: NDArray[np.integer], tokens: int) -> None:
    """Raise DataError if offsets do not fit a column of `tokens` tokens."""
    if offsets[0] != 0 or offsets[-1] != tokens or bool((offsets[1:] < offsets[:-1]).any()):
        raise DataError(
            f"ragged offsets run from {offsets[0]} to {offsets[-1]} over {tokens} tokens: they must start at 0, never "
            "fall, and end at the number of tokens"
        )


def equal(left: Array, right: Array) -> bool:
    """True if dtype, shape and all values agree. NaN equals NaN."""
    return left is right or (left.dtype == right.dtype and np.array_equal(left, right, equal_nan=True))


class Ragged:
    """A token column: one array of any length for each row, packed without padding. Immutable.

    `values` is `[tokens, ...]` and `offsets` is `int64[rows + 1]`. Row i is `values[offsets[i]:offsets[i + 1]]`.
    `source` says what computed the values, if it is known. Selecting, splitting, joining and sending rows keep it. New
    values that are computed from a column have no source. It does not count for equality.
    """

    __slots__ = ("_offsets", "_source", "_values")

    def __init__(self, values: Array, offsets: ArrayLike, *, source: Source | None = None) -> None:
        """Make a column from packed values and the start of each row. Raises DataError if the offsets do not fit."""
        bounds = np.asarray(offsets)
        if bounds.dtype.kind not in "iu" or bounds.ndim != 1 or len(bounds) == 0:
            raise DataError(
                f"ragged offsets are {bounds.dtype}{list(bounds.shape)}: give int64[rows + 1], starting at 0 "
                "and ending at the number of tokens (or let Ragged.of make them)"
            )
        if values.ndim == 0:
            raise DataError("ragged values are one number: give an array whose first dim is the tokens")
        check_offsets(bounds, len(values))
        self._values = frozen(values, "the values of a ragged column")
        self._offsets: Rows = np.asarray(frozen(bounds), np.int64)
        self._offsets.flags.writeable = False
        self._source = source

    @classmethod
    def make(cls, values: Array, offsets: Rows, source: Source | None = None) -> "Ragged":
        """Make a column without checks from arrays that are known to fit, [tokens, ...] and int64[rows + 1]."""
        self = cls.__new__(cls)
        self._values = sealed(values)
        self._offsets = sealed(offsets)
        self._source = source
        return self

    @classmethod
    def of(cls, rows: Iterable[ArrayLike], dtype: DTypeLike, *, source: Source | None = None) -> "Ragged":
        """Pack rows. Each is an array or a list of numbers, `[tokens, ...]`.

        Raises DataError for a row that is a single number, and for rows that differ past their first dim.
        """
        arrays: list[Array] = [np.asarray(row, dtype) for row in rows]
        for index, array in enumerate(arrays):
            if array.ndim == 0:
                raise DataError(f"row {index} of a ragged column is the number {array}: give a list of tokens")
        lengths = np.fromiter(map(len, arrays), np.int64, len(arrays))
        filled = [array for array in arrays if len(array)] or arrays[:1] or [np.empty(0, dtype)]
        shapes = {array.shape[1:] for array in filled}
        if len(shapes) > 1:
            raise DataError(
                f"the rows of a ragged column differ past their first dim: {sorted(shapes)}; only the number "
                "of tokens may differ"
            )
        return cls(np.concatenate(filled), bounds_of(lengths), source=source)

    @classmethod
    def concat(cls, parts: Sequence["Ragged"], name: str = "values") -> "Ragged":
        """Concatenate the rows of one or more parts with the same dtype. DataError names `name` if sources differ."""
        source = join_sources(name, [part.source for part in parts])
        lengths = np.concatenate([part.lengths for part in parts])
        return cls.make(np.concatenate([part.values for part in parts]), bounds_of(lengths), source)

    @property
    def values(self) -> Array:
        """All tokens, `[tokens, ...]`, read-only."""
        return self._values

    @property
    def offsets(self) -> Rows:
        """The start of each row, and the end: `int64[rows + 1]`, read-only."""
        return self._offsets

    @property
    def source(self) -> Source | None:
        """What computed the values. None if unknown."""
        return self._source

    @property
    def lengths(self) -> Rows:
        """Number of tokens of each row, `int64[rows]`."""
        return self._offsets[1:] - self._offsets[:-1]

    @property
    def dtype(self) -> Dtype:
        """The dtype of the values."""
        return self._values.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of values and offsets."""
        return self._values.nbytes + self._offsets.nbytes

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, row: int) -> Array:
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of a ragged column of {len(self)} rows")
        row %= len(self)
        return self._values[self._offsets[row] : self._offsets[row + 1]]

    def __iter__(self) -> Iterator[Array]:
        bounds = self._offsets.tolist()
        return (self._values[start:end] for start, end in itertools.pairwise(bounds))

    def select(self, rows: Rows) -> "Ragged":
        """Select rows, in the given order. A row may occur more than once. `rows` are int64, none negative."""
        index, offsets = gather(self._offsets, rows)
        return Ragged.make(self._values[index], offsets, self._source)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Ragged):
            return NotImplemented
        return equal(self._offsets, other.offsets) and equal(self._values, other.values)

    __hash__: ClassVar[None] = None  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Callable[..., "Ragged"], tuple[object, ...]]:
        return _unpickled, (pickled(self._values, protocol), pickled(self._offsets, protocol), self._source)

    def __deepcopy__(self, memo: object) -> "Ragged":
        return self

    def __repr__(self) -> str:
        shape = "".join(f", {size}" for size in self._values.shape[1:])
        by = f" by {self._source}" if self._source else ""
        return f"Ragged({len(self)} rows, {self.dtype}[{len(self._values)}{shape}]{by})"


def _unpickled(
    values: tuple[Buffer, str, tuple[int, ...]], offsets: tuple[Buffer, str, tuple[int, ...]], source: Source | None
) -> Ragged:
    return Ragged.make(from_raw(*values), np.asarray(from_raw(*offsets), np.int64), source)


def bounds_of(lengths: Rows) -> Rows:
    """Return the offsets `int64[rows + 1]` of rows of these lengths."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    lengths.cumsum(out=offsets[1:])
    return offsets


def gather(offsets: Rows, rows: Rows | slice) -> tuple[NDArray[np.int64] | slice, Rows]:
    """Return the tokens of the selected rows, and the offsets of the selection. Adjacent rows give a slice."""
    if isinstance(rows, slice):
        bounds = offsets[rows.start : rows.stop + 1]
        return slice(bounds[0], bounds[-1]), bounds - bounds[0]
    starts = offsets[rows]
    lengths = offsets[rows + 1] - starts
    bounds = bounds_of(lengths)
    index = (starts - bounds[:-1]).repeat(lengths)
    index += np.arange(len(index))
    return index, bounds
