"""The wire format of columns: a msgpack header, and the raw bytes of each array."""

from collections.abc import Mapping, Sequence
from typing import Literal, cast

import msgspec
import numpy as np
from typing_extensions import Buffer

from meshrl.data.columns import Column, Objects
from meshrl.data.provenance import Source
from meshrl.data.ragged import Ragged, check_offsets, dtype_name, from_raw
from meshrl.errors import DataError
from meshrl.mesh import Array, Rows


class _Wire(msgspec.Struct, array_like=True):
    """One column in a header: the buffers that hold it, and how to read them."""

    name: str
    kind: Literal["row", "ragged", "objects"]
    dtype: str
    shape: tuple[int, ...]
    values: int
    offsets: int
    source: Source | None = None


class _Header(msgspec.Struct, array_like=True):
    rows: int
    origins: int
    columns: list[_Wire]


def pack(rows: int, columns: Mapping[str, Column], origins: Sequence[Rows]) -> tuple[bytes, list[Array | bytes]]:
    """Return a msgpack header and the parts: arrays, not copied, and encoded values. Origins first, then columns."""
    parts: list[Array | bytes] = [*origins]
    known: dict[int, int] = {}
    wires: list[_Wire] = []
    for name, column in columns.items():
        if isinstance(column, Ragged):
            values, bounds = column.values, column.offsets
            if id(bounds) not in known:
                known[id(bounds)] = len(parts)
                parts.append(bounds)
            place = len(parts), known[id(bounds)]
            wires.append(_Wire(name, "ragged", dtype_name(values.dtype), values.shape, *place, column.source))
            parts.append(values)
        elif isinstance(column, np.ndarray):
            wires.append(_Wire(name, "row", dtype_name(column.dtype), column.shape, len(parts), -1))
            parts.append(column)
        else:
            wires.append(_Wire(name, "objects", "", (), len(parts), -1))
            parts.append(_encoded(name, column))
    return msgspec.msgpack.encode(_Header(rows, len(origins), wires)), parts


def unpack(header: Buffer, buffers: Sequence[Buffer]) -> tuple[int, dict[str, Column], tuple[Rows, ...]]:
    """Undo `pack`, and check the result. Arrays are read-only views of the buffers, not to be written any more."""
    try:
        rows, columns, origins = unpack_own(header, buffers)
        for name, column in columns.items():
            if isinstance(column, Ragged):
                check_offsets(column.offsets, len(column.values))
            if len(column) != rows:
                raise ValueError(f"`{name}` has {len(column)} rows, not {rows}")
    except (msgspec.MsgspecError, DataError, IndexError, ValueError, TypeError) as error:
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
