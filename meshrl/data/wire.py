"""The wire format of columns: a msgpack header, and the raw bytes of each array."""

from collections.abc import Mapping, Sequence
from typing import Literal, cast

import msgspec
import numpy as np
from typing_extensions import Buffer

from meshrl.data.columns import Column, Objects
from meshrl.data.provenance import Source
from meshrl.data.ragged import Ragged, check_offsets, dtype_name, from_raw, raw
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


def pack(rows: int, columns: Mapping[str, Column], origins: Sequence[Rows]) -> tuple[bytes, list[memoryview]]:
    """Return a msgpack header and the raw bytes of each array, not copied. Origins come first, then columns."""
    buffers = [raw(level) for level in origins]
    known: dict[int, int] = {}
    wires: list[_Wire] = []
    for name, column in columns.items():
        if isinstance(column, Ragged):
            if id(column.offsets) not in known:
                known[id(column.offsets)] = len(buffers)
                buffers.append(raw(column.offsets))
            offsets = known[id(column.offsets)]
            wires.append(_wire(name, "ragged", column.values, len(buffers), offsets, column.source))
            buffers.append(raw(column.values))
        elif isinstance(column, np.ndarray):
            wires.append(_wire(name, "row", column, len(buffers), -1))
            buffers.append(raw(column))
        else:
            wires.append(_Wire(name, "objects", "", (), len(buffers), -1))
            buffers.append(_encoded(name, column))
    return msgspec.msgpack.encode(_Header(rows, len(origins), wires)), buffers


def unpack(header: Buffer, buffers: Sequence[Buffer]) -> tuple[int, dict[str, Column], tuple[Rows, ...]]:
    """Undo `pack`. Arrays are read-only views of the buffers, which must not be written any more."""
    try:
        head = msgspec.msgpack.decode(header, type=_Header)
        origins = tuple(_numbers(buffers[i], head.rows) for i in range(head.origins))
        ragged = {wire.offsets for wire in head.columns if wire.kind == "ragged"}
        bounds = {i: _numbers(buffers[i], head.rows + 1) for i in ragged}
        columns: dict[str, Column] = {}
        for wire in head.columns:
            buffer = buffers[wire.values]
            if wire.kind == "objects":
                columns[wire.name] = tuple(msgspec.msgpack.decode(buffer, type=list[object]))
            elif wire.kind == "row":
                columns[wire.name] = from_raw(buffer, wire.dtype, wire.shape)
            else:
                values = from_raw(buffer, wire.dtype, wire.shape)
                check_offsets(bounds[wire.offsets], len(values))
                columns[wire.name] = Ragged.make(values, bounds[wire.offsets], wire.source)
            if len(columns[wire.name]) != head.rows:
                raise ValueError(f"`{wire.name}` has {len(columns[wire.name])} rows, not {head.rows}")
    except (msgspec.MsgspecError, DataError, IndexError, ValueError, TypeError) as error:
        sizes = [memoryview(buffer).nbytes for buffer in buffers]
        raise DataError(
            f"not a batch, or a damaged one: {error} (header of {memoryview(header).nbytes} bytes, "
            f"buffers of {sizes}); give from_wire exactly what to_wire returned"
        ) from error
    return head.rows, columns, origins


def _wire(
    name: str, kind: Literal["row", "ragged"], values: Array, index: int, offsets: int, source: Source | None = None
) -> _Wire:
    return _Wire(name, kind, dtype_name(values.dtype), values.shape, index, offsets, source)


def _numbers(buffer: Buffer, count: int) -> Rows:
    return cast("Rows", from_raw(buffer, "int64", (count,)))


def _encoded(name: str, column: Objects) -> memoryview:
    try:
        return memoryview(msgspec.msgpack.encode(column))
    except (TypeError, OverflowError, ValueError) as error:
        raise DataError(
            f"column `{name}` cannot be sent: {error}; keep to None, bool, int, float, str, bytes, and lists "
            "and dicts of them"
        ) from error
