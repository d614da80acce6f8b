"""The log file of a rank's process, RUN/logs/MESH-RANK.log, which includes output of native libraries."""

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final
from weakref import finalize

if TYPE_CHECKING:
    from collections.abc import Callable

ROOM: Final = 16 * 2**20
"""Bytes after which a file is begun anew; the one before stays, as MESH-RANK.log.1."""
_LINES: Final = 30
_LETTERS: Final = 400
"""Of a line, where the last ones are told."""
_NEAR: Final = _LINES * _LETTERS
_MARK: Final = "--- process "


class LogFolder:
    """The files of one mesh. The folder stays open: a run may rename it, and rotating must not miss it then."""

    def __init__(self, place: Path) -> None:
        """`place`: FOLDER/MESH. The folder is made where it is missing."""
        place.parent.mkdir(parents=True, exist_ok=True)
        self.descriptor: int = os.open(place.parent, os.O_RDONLY | os.O_DIRECTORY)
        self._mesh = place.name
        finalize(self, os.close, self.descriptor)

    def of(self, rank: int) -> "RankLog":
        """That of a rank."""
        return RankLog(self.descriptor, f"{self._mesh}-{rank}.log", keeps=self)


class RankLog:
    """One file. What the disk does not take is lost: a log ends no run."""

    def __init__(self, folder: int, name: str, keeps: object = None) -> None:
        """`folder`: its descriptor; `keeps`: what must not be closed before."""
        self.folder = folder
        self._keeps = keeps
        self.name = name
        self.catch_up: Callable[[], None] = lambda: None
        """Called before the last lines are read, where something may still be on its way here."""

    def begin(self, pid: int, host: str) -> None:
        """Another process writes from here on."""
        self.append(f"{_MARK}{pid} on {host}, {time.strftime('%d %b %H:%M:%S')} ---\n".encode())

    def append(self, text: bytes) -> None:
        """Write on; where the file has no room, the one before it goes."""
        with suppress(OSError):
            file = self._opened(os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            try:
                if os.fstat(file).st_size + len(text) > ROOM:
                    os.rename(self.name, f"{self.name}.1", src_dir_fd=self.folder, dst_dir_fd=self.folder)
                    os.close(file)
                    file = self._opened(os.O_WRONLY | os.O_APPEND | os.O_CREAT)
                while text:
                    text = text[os.write(file, text) :]
            finally:
                os.close(file)

    def last(self) -> str:
        """The last lines of the process that writes now, under the name of the file; empty where it wrote nothing."""
        self.catch_up()
        lines = self._near_the_end().decode(errors="replace").splitlines()
        began = max((at for at, line in enumerate(lines) if line.startswith(_MARK)), default=-1)
        said = [line[:_LETTERS] for line in lines[began + 1 :][-_LINES:]]
        return "\n".join([f"--- the end of logs/{self.name} ---", *said]) if said else ""

    def _near_the_end(self) -> bytes:
        with suppress(OSError):
            file = self._opened(os.O_RDONLY)
            try:
                return os.pread(file, _NEAR, max(0, os.fstat(file).st_size - _NEAR))
            finally:
                os.close(file)
        return b""

    def _opened(self, flags: int) -> int:
        return os.open(self.name, flags, 0o644, dir_fd=self.folder)
