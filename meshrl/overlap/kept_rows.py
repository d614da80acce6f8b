"""Rows that a seed cannot reproduce, such as episodes of programs: a run records them for its replay."""

import os
import struct
from collections import deque
from pathlib import Path
from typing import BinaryIO, Final

_FILE: Final = "episodes.bin"
_HEAD: Final = struct.Struct("<qqq")
"""The group, the number in the group, and the number of bytes that follow."""


class KeptRows:
    """Recorded rows of an earlier run, up to the first damage of its file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._places: dict[tuple[int, int], deque[tuple[int, int]]] = {}
        """The offset and size of each row. If it was sampled several times, the first comes first."""
        size = os.fstat(file.fileno()).st_size
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            group, number, length = _HEAD.unpack(head)
            if not 0 <= length <= size - file.tell():
                break
            self._places.setdefault((group, number), deque()).append((file.tell(), length))
            file.seek(length, os.SEEK_CUR)

    def next(self, group: int, number: int) -> bytes | None:
        """Return the bytes of the row's next recording, or None."""
        places = self._places.get((group, number))
        if not places:
            return None
        place, length = places.popleft()
        self._file.seek(place)
        return self._file.read(length)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_kept_rows(folder: Path) -> KeptRows | None:
    """Read the recorded rows of the run in a folder. None if it has none."""
    try:
        return KeptRows((folder / _FILE).open("rb"))
    except FileNotFoundError:
        return None


class RowKeeper:
    """Records rows in a run's folder, even after that moves, and returns those of the replayed run."""

    def __init__(self, folder: Path, replayed: KeptRows | None = None) -> None:
        self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._file: int | None = None
        self._replayed = replayed

    @property
    def replays(self) -> bool:
        """True if there are recorded rows to return."""
        return self._replayed is not None

    def next(self, group: int, number: int) -> bytes | None:
        """See `KeptRows.next`."""
        return self._replayed.next(group, number) if self._replayed else None

    def keep(self, group: int, number: int, row: bytes) -> None:
        """Record a row by its number in its group."""
        if self._file is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            self._file = os.open(_FILE, flags, 0o666, dir_fd=self._folder)
        with os.fdopen(self._file, "wb", closefd=False) as file:
            file.write(_HEAD.pack(group, number, len(row)) + row)

    def close(self) -> None:
        """Close the files."""
        for each in (self._folder, self._file):
            if each is not None:
                os.close(each)
        if self._replayed is not None:
            self._replayed.close()
