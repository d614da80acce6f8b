"""The three kinds of columns: what they hold, how they are checked and joined, and their wire format."""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, Literal, Self, TypeAlias, cast

import msgspec
import numpy as np
from typing_extensions import Buffer

from meshrl.data.images import IMAGES, Images
from meshrl.data.ragged import (
    Ragged,
    Source,
    check_offsets,
    dtype_name,
    equal,
    from_raw,
    frozen,
    gather,
    join_sources,
    sealed,
)
from meshrl.errors import DataError
from meshrl.mesh import Array, Rows

Objects: TypeAlias = tuple[object, ...]
Column: TypeAlias = Array | Ragged | Objects
"""A row column `[rows, ...]`, a token column, or Python values (text, dicts), one for each row."""
ColumnLike: TypeAlias = Array | Ragged | Sequence[object]
"""Anything that becomes a column. A list becomes Python values."""

TOKEN_COLUMNS = {"tokens": "int32", "loss_mask": "bool", "sampler_logprobs": "float32", "versions": "int32"}
ROW_COLUMNS = {"rewards": "float32", "groups": "int64"}
SCALARS = frozenset({str, int, float, bool, bytes, type(None)})


def taken(name: str, column: ColumnLike) -> Column:
    """Freeze a column, and convert a standard one to its own dtype. DataError for other values or the wrong kind."""
    result: Column
    if isinstance(column, Ragged):
        result = column
    elif isinstance(column, np.ndarray):
        if column.ndim == 0:
            raise DataError(f"column `{name}` is one number, {column}: give an array with one value for each row")
        result = frozen(column, f"column `{name}`")
    elif isinstance(column, (list, tuple)):
        if np.ndarray in set(map(type, column)):
            raise DataError(
                f"column `{name}` is a {type(column).__name__} of arrays: pack rows of any lengths with "
                "Ragged.of(rows, dtype), or stack equal ones with np.stack"
            )
        result = column if isinstance(column, Images) else tuple(column)
    else:
        raise DataError(
            f"column `{name}` is {type(column).__name__}: give a numpy array, a Ragged, or a list or tuple "
            "of Python values"
        )
    return _standard(name, result)


def _standard(name: str, column: Column) -> Column:
    """Convert a standard column to its kind and dtype."""
    if name == IMAGES and not isinstance(column, Images) and len(column):
        raise DataError(f"the standard column `{name}` is {describe(column)}: give Images.of(files of each row)")
    dtype = TOKEN_COLUMNS.get(name) or ROW_COLUMNS.get(name)
    if dtype is None:
        return column
    ragged = name in TOKEN_COLUMNS
    if isinstance(column, tuple) or isinstance(column, Ragged) is not ragged:
        example = f"Ragged.of(rows, np.{dtype})" if ragged else f"np.array(values, np.{dtype})"
        raise DataError(f"the standard column `{name}` is {describe(column)}: give {example}")
    if column.dtype == dtype:
        return column
    if not np.can_cast(column.dtype, dtype, "same_kind"):
        raise DataError(
            f"the standard column `{name}` is {column.dtype} and must be {dtype}: convert it, or use another name"
        )
    if isinstance(column, Ragged):
        return Ragged.make(column.values.astype(dtype), column.offsets, column.source)
    return sealed(column.astype(dtype))


def check_lengths(name: str, lengths: Rows, tokens: Rows) -> None:
    """Raise DataError if a token column's rows differ in length from `tokens`."""
    wrong = np.flatnonzero(lengths != tokens)
    if len(wrong):
        row = int(wrong[0])
        raise DataError(
            f"row {row} has {tokens[row]} tokens and {lengths[row]} in `{name}`: token columns must have one value for "
            "each token"
        )


@dataclass(frozen=True)
class ColumnType:
    """The type of a column: Python values, rows of one shape, or tokens."""

    kind: Literal["objects", "row", "ragged"]
    dtype: str = ""
    shape: tuple[int, ...] = ()
    """The shape without the first dim."""

    @classmethod
    def of(cls, column: Column) -> Self:
        """Return the type of a column."""
        if isinstance(column, tuple):
            return cls("objects")
        values = column.values if isinstance(column, Ragged) else column
        return cls("ragged" if isinstance(column, Ragged) else "row", dtype_name(values.dtype), values.shape[1:])

    def empty(self) -> Column:
        """Return a column of this type without rows."""
        if self.kind == "objects":
            return ()
        values: Array = sealed(np.empty((0, *self.shape), self.dtype))
        return values if self.kind == "row" else Ragged.make(values, np.zeros(1, np.int64))

    def __str__(self) -> str:
        if self.kind == "objects":
            return "Python values"
        return "ragged " * (self.kind == "ragged") + self.dtype + "".join(f"[{size}]" for size in self.shape)


def describe(column: Column) -> str:
    """Describe a column in a few words: kind, dtype and source."""
    if isinstance(column, tuple) and column:
        return "/".join(sorted({type(value).__name__ for value in column}))
    return str(ColumnType.of(column)) + by(column.source if isinstance(column, Ragged) else None)


def by(source: Source | None) -> str:
    """The source of a column, as `describe` adds it after the dtype."""
    return f" by {source}" if source else ""


def view(column: Column, run: slice) -> Column:
    """Return a view of a run of rows, or the column itself if these are all its rows."""
    if run.start == 0 and run.stop == len(column):
        return column
    if isinstance(column, Ragged):
        index, offsets = gather(column.offsets, run)
        return Ragged.make(column.values[index], offsets, column.source)
    return column.take(run) if isinstance(column, Images) else column[run]


def same(left: Column, right: Column) -> bool:
    """True if two columns agree in kind, dtype and values. NaN equals NaN."""
    if isinstance(left, tuple) and isinstance(right, tuple):
        return _alike(left, right)
    if isinstance(left, Ragged) or isinstance(right, Ragged):
        return isinstance(left, Ragged) and isinstance(right, Ragged) and left == right
    return isinstance(left, np.ndarray) and isinstance(right, np.ndarray) and equal(left, right)


def _alike(left: object, right: object) -> bool:
    """True if Python values are equal, or hold NaN in the same places."""
    if left == right:
        return True
    if isinstance(left, float) and isinstance(right, float):
        return math.isnan(left) and math.isnan(right)
    if isinstance(left, dict) and isinstance(right, dict):
        items = cast("dict[object, object]", left)
        others = cast("dict[object, object]", right)
        return items.keys() == others.keys() and all(_alike(item, others[key]) for key, item in items.items())
    if isinstance(left, list | tuple) and isinstance(right, list | tuple) and type(left) is type(right):
        pairs = zip(cast("Sequence[object]", left), cast("Sequence[object]", right), strict=False)
        return len(left) == len(right) and all(_alike(one, other) for one, other in pairs)
    return False


def concat(name: str, parts: Sequence[Column], offsets: Rows | None = None) -> Column:
    """Concatenate the rows of one or more columns with the same kind, dtype and trailing dims.

    `offsets`: those of the resulting token column, if another one of the same lengths is known.
    """
    if any(isinstance(part, Images) for part in parts) and all(isinstance(part, tuple) for part in parts):
        return Images.joined(cast("Sequence[Objects]", parts))
    if set(map(type, parts)) == {tuple}:
        return tuple(chain.from_iterable(cast("Sequence[Objects]", parts)))
    ragged = [part for part in parts if isinstance(part, Ragged)]
    values = [part.values for part in ragged] or [part for part in parts if isinstance(part, np.ndarray)]
    if len(values) != len(parts) or len({(value.dtype, value.shape[1:]) for value in values}) > 1:
        raise DataError(
            f"column `{name}` differs between parts: {', '.join(map(describe, parts))}; all parts must return the "
            "same kind, dtype and trailing dims"
        )
    if not ragged:
        return sealed(np.concatenate(values))
    if offsets is None:
        return Ragged.concat(ragged, name)
    return Ragged.make(np.concatenate(values), offsets, join_sources(name, [part.source for part in ragged]))


def private(column: Column) -> Column:
    """Copy the mutable Python values (dicts, lists) of a column. Arrays are frozen already."""
    if not isinstance(column, tuple) or isinstance(column, Images) or SCALARS.issuperset(map(type, column)):
        return column
    if set(map(type, column)) == {dict}:
        tables = cast("tuple[dict[object, object], ...]", column)
        if SCALARS.issuperset(map(type, chain.from_iterable(map(dict.values, tables)))):
            return tuple(map(dict.copy, tables))
    return tuple([_private(value) for value in column])


def _private(value: object) -> object:
    if type(value) is dict:
        return {key: _private(item) for key, item in value.items()}
    if type(value) is list:
        return [_private(item) for item in value]
    return value if type(value) in SCALARS else copy.deepcopy(value)


class _PackedColumn(msgspec.Struct, array_like=True):
    """One column in a header: the buffers that hold it, and how to read them."""

    name: str
    kind: Literal["row", "ragged", "objects", "images"]
    dtype: str
    shape: tuple[int, ...]
    values: int
    offsets: int
    source: Source | None = None


class _Header(msgspec.Struct, array_like=True):
    rows: int
    origins: int
    columns: list[_PackedColumn]


def pack(rows: int, columns: Mapping[str, Column], origins: Sequence[Rows]) -> tuple[bytes, list[Array | bytes]]:
    """Return a msgpack header and the parts: arrays, not copied, and encoded values. Origins first, then columns."""
    parts: list[Array | bytes] = [*origins]
    known: dict[int, int] = {}
    packed: list[_PackedColumn] = []
    for name, column in columns.items():
        if isinstance(column, Ragged):
            values, bounds = column.values, column.offsets
            if id(bounds) not in known:
                known[id(bounds)] = len(parts)
                parts.append(bounds)
            place = len(parts), known[id(bounds)]
            packed.append(_PackedColumn(name, "ragged", dtype_name(values.dtype), values.shape, *place, column.source))
            parts.append(values)
        elif isinstance(column, np.ndarray):
            packed.append(_PackedColumn(name, "row", dtype_name(column.dtype), column.shape, len(parts), -1))
            parts.append(column)
        elif isinstance(column, Images):
            sizes, files = column.parts()
            packed.append(_PackedColumn(name, "images", "", (), len(parts), len(parts) + 1))
            parts += [msgspec.msgpack.encode(([*column], sizes)), files]
        else:
            packed.append(_PackedColumn(name, "objects", "", (), len(parts), -1))
            parts.append(_encoded(name, column))
    return msgspec.msgpack.encode(_Header(rows, len(origins), packed)), parts


_UNREADABLE: Final = (
    msgspec.MsgspecError, DataError, IndexError, ValueError, TypeError, ArithmeticError, RecursionError,
)  # fmt: skip
"""What reading a header raises that anyone may have written."""


def unpack(header: Buffer, buffers: Sequence[Buffer]) -> tuple[int, dict[str, Column], tuple[Rows, ...]]:
    """Undo `pack`, and check the result. Arrays are read-only views of the buffers, not to be written any more."""
    try:
        rows, columns, origins = unpack_own(header, buffers)
        for name, column in columns.items():
            if isinstance(column, Ragged):
                check_offsets(column.offsets, len(column.values))
            if len(column) != rows:
                raise ValueError(f"`{name}` has {len(column)} rows, not {rows}")
    except _UNREADABLE as error:
        sizes = [memoryview(buffer).nbytes for buffer in buffers]
        raise DataError(
            f"not a batch, or a damaged one: {error} (header of {memoryview(header).nbytes} bytes, "
            f"buffers of {sizes}); give from_wire exactly what to_wire returned"
        ) from error
    return rows, columns, origins


def unpack_own(header: Buffer, buffers: Sequence[Buffer]) -> tuple[int, dict[str, Column], tuple[Rows, ...]]:
    """Undo `pack` without checks, for what a process of this run has packed."""
    head = msgspec.msgpack.decode(header, type=_Header)
    bounds: dict[int, Rows] = {}
    columns: dict[str, Column] = {}
    for wire in head.columns:
        buffer = buffers[wire.values]
        if wire.kind == "objects":
            columns[wire.name] = tuple(msgspec.msgpack.decode(buffer, type=list[object]))
        elif wire.kind == "images":
            names, sizes = msgspec.msgpack.decode(buffer, type=tuple[list[tuple[str, ...]], list[tuple[str, int]]])
            columns[wire.name] = Images.from_parts(names, sizes, buffers[wire.offsets])
        elif wire.kind == "row":
            columns[wire.name] = from_raw(buffer, wire.dtype, wire.shape)
        else:
            if wire.offsets not in bounds:
                bounds[wire.offsets] = _numbers(buffers[wire.offsets], head.rows + 1)
            values = from_raw(buffer, wire.dtype, wire.shape)
            columns[wire.name] = Ragged.make(values, bounds[wire.offsets], wire.source)
    return head.rows, columns, tuple([_numbers(buffers[level], head.rows) for level in range(head.origins)])


def _numbers(buffer: Buffer, count: int) -> Rows:
    return cast("Rows", from_raw(buffer, "int64", (count,)))


def _encoded(name: str, column: Objects) -> bytes:
    try:
        return msgspec.msgpack.encode(column)
    except (TypeError, OverflowError, ValueError) as error:
        raise DataError(
            f"column `{name}` cannot be sent: {error}; keep to None, bool, int, float, str, bytes, and lists "
            "and dicts of them"
        ) from error
