"""Follow a file that another process appends to: each look reads a bounded part of what is new."""

import os
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

_CHUNK: Final = 1 << 22
"""Bytes per look at most. A longer line is left out."""
_SEEN: Final = 64
"""Bytes before the reached position that identify the file."""


class Grown(NamedTuple):
    """The result of a look."""

    lines: list[bytes]
    anew: bool = False
    """True if these are the first lines of a file that is new, or was cut or replaced since the last look."""
    more: bool = False
    """True if another look finds more at once."""


class Tail:
    """The complete lines of a file, each read once."""

    def __init__(self, path: Path) -> None:
        """`path` need not exist yet."""
        self._path = path
        self._known: tuple[int, int, int] | None = None
        """Inode, size and time at the last look. If they are the same, nothing is new."""
        self._inode = -1
        self._reached = 0
        self._before = b""
        """The bytes before the reached position."""

    def read(self) -> Grown:
        """Read the lines since the last look. Raises OSError if the file must not be read."""
        try:
            found = self._path.stat()
        except FileNotFoundError:
            was_there, self._known = self._known is not None, None
            self._inode = -1
            return Grown([], anew=was_there)
        known = found.st_ino, found.st_size, found.st_mtime_ns
        if known == self._known:
            return Grown([])
        with self._path.open("rb") as file:
            anew = not self._goes_on(file)
            if anew:
                self._inode, self._reached, self._before = os.fstat(file.fileno()).st_ino, 0, b""
            file.seek(self._reached)
            chunk = file.read(_CHUNK)
        end = chunk.rfind(b"\n") + 1
        if not end and len(chunk) == _CHUNK:
            end = _CHUNK  # the line is too long, and its end will not be taken as a line
        whole = chunk[:end]
        self._reached += len(whole)
        self._before = (self._before + whole)[-_SEEN:]
        more = len(chunk) == _CHUNK
        self._known = None if more else known
        return Grown(whole.splitlines(), anew, more)

    def _goes_on(self, file: BinaryIO) -> bool:
        """True if this is the file of the last look, with the same content up to there."""
        if os.fstat(file.fileno()).st_ino != self._inode:
            return False
        file.seek(self._reached - len(self._before))
        return file.read(len(self._before)) == self._before
