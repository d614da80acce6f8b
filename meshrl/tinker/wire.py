"""The wire format of protocol buffers, read and written field by field.

A message is a list of fields, each with a number and a value. Only the three kinds of values that the API uses are
here. https://protobuf.dev/programming-guides/encoding
"""

import struct
from collections.abc import Iterator
from typing import Final, TypeAlias

from meshrl.errors import DataError

Value: TypeAlias = int | float | memoryview
"""A number, or the bytes of a text, of an array, or of a message."""

_VARINT, _DOUBLE, _BYTES, _FLOAT = 0, 1, 2, 5
_CUT: Final = "the message ends in the middle of a field: send all of its bytes"


def fields(message: memoryview) -> Iterator[tuple[int, Value]]:
    """Yield the number and the value of each field. DataError, after those before it, if the rest cannot be read."""
    place, end = 0, len(message)
    while place < end:
        tag, place = _varint(message, place)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            value, place = _varint(message, place)
            yield number, value
            continue
        if kind == _BYTES:
            size, place = _varint(message, place)
        elif kind in (_DOUBLE, _FLOAT):
            size = 8 if kind == _DOUBLE else 4
        else:
            raise DataError(f"field {number} has the kind {kind}, which protocol buffers no longer use")
        if place + size > end:
            raise DataError(_CUT)
        piece = message[place : place + size]
        yield number, piece if kind == _BYTES else struct.unpack("<d" if kind == _DOUBLE else "<f", piece)[0]
        place += size


def _varint(message: memoryview, place: int) -> tuple[int, int]:
    value = shift = 0
    if place < len(message) and (first := message[place]) < 0x80:  # most of them are
        return first, place + 1
    while place < len(message) and shift < 64:
        byte = message[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
        shift += 7
    raise DataError(_CUT)


def integers(value: Value) -> list[int]:
    """Return the integers of one value of a repeated field."""
    if isinstance(value, float):
        raise DataError(f"{value} is where an integer belongs: the message is of another type")
    if not isinstance(value, memoryview):
        return [value]
    found: list[int] = []
    place = 0
    while place < len(value):
        one, place = _varint(value, place)
        found.append(one)
    return found


def text(value: Value) -> str:
    """Return the text of a field. DataError if it is none."""
    try:
        return bytes(contents(value)).decode()
    except UnicodeDecodeError as error:
        raise DataError(f"a text is not UTF-8: {error}") from error


def number(value: Value) -> float:
    """Return the number of a field. DataError if it is bytes."""
    if isinstance(value, memoryview):
        raise DataError(f"{len(value)} bytes are where a number belongs: the message is of another type")
    return float(value)


def contents(value: Value) -> memoryview:
    """Return the bytes of a field. DataError if it is a number."""
    if not isinstance(value, memoryview):
        raise DataError("a number is where bytes belong: the message is of another type")
    return value


def packed(number: int, value: int | float | bytes | str) -> bytes:
    """Return a field with this value."""
    if isinstance(value, float):
        return _tag(number, _DOUBLE) + struct.pack("<d", value)
    if isinstance(value, int):
        return _tag(number, _VARINT) + _packed_varint(value)
    raw = value.encode() if isinstance(value, str) else value
    return _tag(number, _BYTES) + _packed_varint(len(raw)) + raw


def _tag(number: int, kind: int) -> bytes:
    return _packed_varint(number << 3 | kind)


def _packed_varint(value: int) -> bytes:
    pieces = bytearray()
    value &= (1 << 64) - 1
    while value >= 0x80:
        pieces.append(value & 0x7F | 0x80)
        value >>= 7
    pieces.append(value)
    return bytes(pieces)
