"""A failing disk: any write or sync below a folder can be made to fail."""

import builtins
import errno
import io
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias
from unittest.mock import patch

Fault: TypeAlias = Literal["EIO", "ENOSPC", "EROFS", "short"]
"""The operation raises this OSError, or writes only one byte and reports that."""


class FaultyFiles:
    """Counts this process's writes and syncs below a folder. One of them fails, and all later ones work.

    Threads of a run write too, some of them once a second, so the same program may count one more or fewer.
    """

    def __init__(self, folder: Path, at: int | None = None, fault: Fault = "EIO") -> None:
        """`at`: how many operations work before the one that fails. None: none fails."""
        self._folder = folder.resolve()
        self._at = at
        self._fault: Fault = fault
        self.operations: int = 0
        self.has_failed: bool = False

    def fail_after(self, count: int) -> None:
        """Let `count` operations work from now on, and the next one fail."""
        self._at = self.operations + count

    @contextmanager
    def installed(self) -> Generator["FaultyFiles"]:
        really_open, really_sync = io.open, os.fsync

        def opened(file: Any, mode: str = "r", buffering: int = -1, *rest: Any, **named: Any) -> Any:
            if isinstance(file, int) or not set(mode) & set("wax+") or not self._holds(Path(file)):
                return really_open(file, mode, buffering, *rest, **named)
            raw = _FaultyFile(file, mode.replace("b", "").replace("t", ""), self._next)
            buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
            return buffered if "b" in mode else io.TextIOWrapper(buffered, *rest[:3], **named)

        def sync(descriptor: int) -> None:
            if self._holds(Path(f"/proc/self/fd/{descriptor}")) and self._next() not in (None, "short"):
                raise _error(self._fault)
            really_sync(descriptor)

        with patch.object(builtins, "open", opened), patch.object(io, "open", opened), patch.object(os, "fsync", sync):
            yield self

    def _holds(self, path: Path) -> bool:
        return path.resolve().is_relative_to(self._folder)

    def _next(self) -> Fault | None:
        self.operations += 1
        if self.has_failed or self._at is None or self.operations <= self._at:
            return None
        self.has_failed = True
        return self._fault


def _error(fault: Fault, file: Any = None) -> OSError:
    number = getattr(errno, fault)
    return OSError(number, os.strerror(number), file)


class _FaultyFile(io.FileIO):
    def __init__(self, file: Any, mode: str, following: Callable[[], Fault | None]) -> None:
        super().__init__(file, mode)
        self._following = following

    def write(self, data: Any, /) -> int:
        fault = self._following()
        if fault in (None, "short"):
            return super().write(memoryview(data)[:1] if fault else data) or 0
        raise _error(fault, self.name)
