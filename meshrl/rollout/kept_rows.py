"""Rows that a seed cannot reproduce, such as episodes of programs: a run records them for its replay."""

import os
import struct
from collections import deque
from pathlib import Path
from typing import BinaryIO, Final

_FILE: Final = "episodes.bin"
_HEAD: Final = struct.Struct("<qqq")
"""The group, the number in the group, and how many bytes follow."""


class KeptRows:
    """Those of an earlier run, as far as its file is whole."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._places: dict[tuple[int, int], deque[tuple[int, int]]] = {}
        """Where a row is, and its bytes; of one that was drawn several times the first first."""
        size = os.fstat(file.fileno()).st_size
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            group, number, length = _HEAD.unpack(head)
            if not 0 <= length <= size - file.tell():
                break
            self._places.setdefault((group, number), deque()).append((file.tell(), length))
            file.seek(length, os.SEEK_CUR)

    def next(self, group: int, number: int) -> bytes | None:
        """The row as it was written, the next time that it was; None where it was not."""
        places = self._places.get((group, number))
        if not places:
            return None
        place, length = places.popleft()
        self._file.seek(place)
        return self._file.read(length)

    def close(self) -> None:
        """Read no more."""
        self._file.close()


def read_kept_rows(folder: Path) -> KeptRows | None:
    """Those of the run in a folder; None where it kept none."""
    try:
        return KeptRows((folder / _FILE).open("rb"))
    except FileNotFoundError:
        return None


class RowKeeper:
    """Keeps rows in a run's folder, wherever that is moved, and gives back those of the run that is followed."""

    def __init__(self, folder: Path, replayed: KeptRows | None = None) -> None:
        self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._file: int | None = None
        self._replayed = replayed

    @property
    def replays(self) -> bool:
        """Whether there are rows to give back."""
        return self._replayed is not None

    def next(self, group: int, number: int) -> bytes | None:
        """As `KeptRows.next`."""
        return self._replayed.next(group, number) if self._replayed else None

    def keep(self, group: int, number: int, row: bytes) -> None:
        """Write a row down: the one of this number in its group."""
        if self._file is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            self._file = os.open(_FILE, flags, 0o666, dir_fd=self._folder)
        with os.fdopen(self._file, "wb", closefd=False) as file:
            file.write(_HEAD.pack(group, number, len(row)) + row)

    def close(self) -> None:
        """Keep and give no more."""
        for each in (self._folder, self._file):
            if each is not None:
                os.close(each)
        if self._replayed is not None:
            self._replayed.close()
