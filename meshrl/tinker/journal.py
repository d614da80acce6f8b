"""A model's journal: each request before it is acknowledged, and each result before it is sent.

A file holds records, one after the other: the length of its bytes, their fingerprint, and the bytes. A record that a
kill cut off is the last one, and is removed when the file is opened again. Files begin at a state of the model, and are
named after the number of its last request.
"""

import os
import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import msgspec
from xxhash import xxh3_64_intdigest

from meshrl.errors import Damaged, DataError
from meshrl.tinker.requests import Request
from meshrl.tinker.results import Result

_HEAD: Final = struct.Struct("<IQ")
"""The bytes before a record: its length, and its fingerprint."""
_NAME: Final = "journal-{:010}"


class Asked(msgspec.Struct, frozen=True, tag="asked"):
    """A request."""

    number: int
    request: Request


class Answered(msgspec.Struct, frozen=True, tag="answered"):
    """The result of the request with this number."""

    number: int
    result: Result


Record: TypeAlias = Asked | Answered

_encoder: Final = msgspec.msgpack.Encoder(order="deterministic")
_decoder: Final = msgspec.msgpack.Decoder(Record)


class Place(NamedTuple):
    """Where a record is."""

    file: Path
    start: int
    size: int


class Journal:
    """The files of a model's journal. The newest is written.

    A record reaches the operating system before `add` returns, so it outlives this process. With `sync`, it also
    outlives the machine.
    """

    def __init__(self, folder: Path, *, keeps: bool = False) -> None:
        """`keeps`: whether files stay that no state needs any more."""
        self._folder, self._keeps = folder, keeps
        self._file = self._open(max(_starts(folder), default=0))
        self.nbytes: int = self._file.tell()
        """Bytes of the newest file."""

    def _open(self, start: int) -> "_Appended":
        return _Appended(self._folder / _NAME.format(start))

    def records(self, state: int = -1) -> Iterator[tuple[Record, Place]]:
        """Return all records in the order of their writing, without files that end before the request `state`.

        Damaged if one in the middle is not as it was written.
        """
        return records_in(self._folder, state)

    def add(self, record: bytes) -> Place:
        """Write a record, as `packed` returns it. OSError, and nothing of it is kept, if the disk is full."""
        place = _added(self._file, record)
        self.nbytes = self._file.tell()
        return place

    def begin(self, start: int, kept: int, first: Iterable[bytes]) -> None:
        """Begin a file for what follows the request `start`, and remove files that end before the request `kept`.

        `first`: its first records. If they cannot be written, OSError, and the journal stays in the file that it had.
        """
        path = self._folder / _NAME.format(start)
        if path == self._file.path:
            return
        path.unlink(missing_ok=True)  # what such an error left
        begun = self._open(start)
        try:
            for record in first:
                _added(begun, record)
        except (DataError, OSError):
            begun.close()
            path.unlink()
            raise
        self._file.close()
        self._file = begun
        self.nbytes = self._file.tell()
        for before, after in pairwise(_starts(self._folder)):
            if after <= kept and not self._keeps:
                (self._folder / _NAME.format(before)).unlink()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def records_in(folder: Path, state: int = -1) -> Iterator[tuple[Record, Place]]:
    """Yield the records of a model's folder in the order of their writing, as `Journal.records`."""
    starts = _starts(folder)
    for start in starts[max(0, bisect_right(starts, state) - 1) :]:
        path = folder / _NAME.format(start)
        for place, raw in _read(path):
            try:
                yield _decoder.decode(raw), Place(path, place, len(raw))
            except msgspec.DecodeError as error:
                raise DataError(f"{path} is of another version of meshrl: {error}") from error


def _starts(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("journal-")) for path in folder.glob("journal-*"))


def packed(record: Record) -> bytes:
    """Return a record's bytes, the same for equal ones. DataError if it could not be read again."""
    try:
        raw = _encoder.encode(record)
        _decoder.decode(raw)
    except (msgspec.DecodeError, RecursionError, TypeError) as error:
        raise DataError(f"request {record.number} cannot be kept: {error}") from error
    return raw


def _added(file: "_Appended", raw: bytes) -> Place:
    start = file.append(_HEAD.pack(len(raw), xxh3_64_intdigest(raw)) + raw) + _HEAD.size
    return Place(file.path, start, len(raw))


def record_at(place: Place) -> Record | None:
    """Read one record again. None if its file has been removed."""
    try:
        with place.file.open("rb") as file:
            file.seek(place.start)
            record: Record = _decoder.decode(file.read(place.size))
            return record
    except FileNotFoundError:
        return None


class _Appended:
    """A file that whole records are appended to."""

    def __init__(self, path: Path) -> None:
        self.path: Final = path
        end = 0
        if path.exists():
            end = max((start + len(raw) for start, raw in _read(path)), default=0)
            os.truncate(path, end)  # what a kill cut off
        self._file = path.open("ab", buffering=0)

    def append(self, raw: bytes) -> int:
        """Write bytes, and return where they begin."""
        start = self._file.tell()
        view = memoryview(raw)
        try:
            while view:
                view = view[self._file.write(view) or 0 :]
        except OSError:
            os.truncate(self.path, start)
            raise
        return start

    def tell(self) -> int:
        """Return the size of the file."""
        return self._file.tell()

    def close(self) -> None:
        """Close it."""
        self._file.close()


def _read(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield each whole record with its place. Damaged if one that is not the last differs from what was written."""
    whole = path.read_bytes()
    place = 0
    while place + _HEAD.size <= len(whole):
        size, fingerprint = _HEAD.unpack_from(whole, place)
        start, end = place + _HEAD.size, place + _HEAD.size + size
        raw = whole[start:end]
        if len(raw) < size:
            return
        if xxh3_64_intdigest(raw) != fingerprint:
            if end == len(whole):
                return
            raise Damaged(
                f"{path} differs from what was written, at byte {place} of {len(whole)}: the requests after it are "
                "lost. Remove the folder to drop the model, or restore the file"
            )
        yield start, raw
        place = end
