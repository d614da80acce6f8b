"""The log files of a mesh's ranks."""

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final
from weakref import finalize

if TYPE_CHECKING:
    from collections.abc import Callable

ROOM: Final = 16 * 2**20
"""Size in bytes at which a new log file begins. The previous one stays as MESH-RANK.log.1."""
_QUOTED_LINES: Final = 30
_LINE_LENGTH: Final = 400
"""Characters of a line when the last lines are quoted."""
_TAIL: Final = _QUOTED_LINES * _LINE_LENGTH
_MARK: Final = "--- process "


class LogFolder:
    """The log files of one mesh. The folder stays open, because a run may rename it and rotation must still find it."""

    def __init__(self, place: Path) -> None:
        """`place`: FOLDER/MESH. Creates a missing folder."""
        place.parent.mkdir(parents=True, exist_ok=True)
        self.descriptor: int = os.open(place.parent, os.O_RDONLY | os.O_DIRECTORY)
        self._mesh = place.name
        finalize(self, os.close, self.descriptor)

    def of(self, rank: int) -> "RankLog":
        """Return the log of a rank."""
        return RankLog(self.descriptor, f"{self._mesh}-{rank}.log", keeps=self)


class RankLog:
    """The log file of a rank, RUN/logs/MESH-RANK.log, which includes output of native libraries.

    Text that the disk does not take is lost: a log never ends a run.
    """

    def __init__(self, folder: int, name: str, keeps: object = None) -> None:
        """`folder`: its descriptor. `keeps`: an object that must stay open as long."""
        self.folder = folder
        self._keeps = keeps
        self.name = name
        self.catch_up: Callable[[], None] = lambda: None
        """Called before the last lines are read, to fetch output that is still on its way."""

    def begin(self, pid: int, host: str) -> None:
        """Mark that another process writes from here on."""
        self.append(f"{_MARK}{pid} on {host}, {time.strftime('%d %b %H:%M:%S')} ---\n".encode())

    def append(self, text: bytes) -> None:
        """Append text. A full file replaces the previous one."""
        with suppress(OSError):
            file = self._open(os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            try:
                if os.fstat(file).st_size + len(text) > ROOM:
                    os.rename(self.name, f"{self.name}.1", src_dir_fd=self.folder, dst_dir_fd=self.folder)
                    os.close(file)
                    file = self._open(os.O_WRONLY | os.O_APPEND | os.O_CREAT)
                while text:
                    text = text[os.write(file, text) :]
            finally:
                os.close(file)

    def last(self) -> str:
        """Return the last lines of the present process, with the file's name. Empty if it wrote nothing."""
        self.catch_up()
        lines = self._tail().decode(errors="replace").splitlines()
        began = max((at for at, line in enumerate(lines) if line.startswith(_MARK)), default=-1)
        quoted = [line[:_LINE_LENGTH] for line in lines[began + 1 :][-_QUOTED_LINES:]]
        return "\n".join([f"--- the end of logs/{self.name} ---", *quoted]) if quoted else ""

    def _tail(self) -> bytes:
        with suppress(OSError):
            file = self._open(os.O_RDONLY)
            try:
                return os.pread(file, _TAIL, max(0, os.fstat(file).st_size - _TAIL))
            finally:
                os.close(file)
        return b""

    def _open(self, flags: int) -> int:
        return os.open(self.name, flags, 0o644, dir_fd=self.folder)
