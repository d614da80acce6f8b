"""Every moment at which a controller can be killed, and the content of its disk at that moment."""

import asyncio
import builtins
import hashlib
import io
import os
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final, TypeVar
from unittest.mock import patch

from meshrl.testing.clock import simulate

T = TypeVar("T")

_CHANGES: Final = ("rename", "replace", "unlink", "remove", "mkdir", "rmdir", "truncate", "ftruncate", "fsync", "link")
"""Functions of `os` that change a folder, in addition to opening and writing files."""
_LIVE: Final = ("now.json", ".now.json.part")
"""Files that a thread of a run writes each second of real time, and that no run resumes from."""
_THREAD: Final = 0.01
"""Virtual seconds that a call in a thread takes."""


@dataclass(frozen=True)
class Remains:
    folder: Path
    after: str


class KillPoints:
    """A program in virtual time, and the state of a folder at each moment at which a kill could end it.

    A killed process runs no handler and writes no buffer, so it leaves exactly what the disk has. The moments are:
    before each step of each task, so at each await; before each line of the scripts, so also at an await that does not
    wait; before each change of the disk; and in the middle of each write. Moments with the same state of the disk are
    the same kill for a resumed run, and share one copy.
    """

    def __init__(self, folder: Path, copies: Path, scripts: Sequence[Path] = ()) -> None:
        self._folder = folder
        self._copies = copies
        self._scripts = {str(path.resolve()) for path in scripts}
        self._seen: set[bytes] = set()
        self._last = "nothing"
        self._noting = False
        self._thread = 0
        self.lines: Counter[tuple[str, int]] = Counter()
        """Lines of the scripts, `(FILE, LINE)`, with the number of moments."""
        self.remains: list[Remains] = []

    def watch(self, main: Callable[[], Coroutine[object, object, T]], *, seed: int | None = None) -> T:
        """Run the program to its end, as `simulate` does, and record each moment.

        A call in a thread takes a moment of virtual time, during which other tasks continue. Changes by a thread that
        lasts are no moments: it runs in real time, so they would differ between runs.
        """
        self._thread = threading.get_ident()
        tracing = sys.gettrace()
        with self._watched_disk(), patch.object(asyncio, "to_thread", _as_a_step):
            try:
                sys.settrace(self._trace)
                result = simulate(main, seed=seed, before_each=self._note)
            finally:
                sys.settrace(tracing)
        self._note()
        return result

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        return self._line if frame.f_code.co_filename in self._scripts else None

    def _line(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "line":
            self.lines[frame.f_code.co_filename, frame.f_lineno] += 1
            self._note()
        return self._line

    def _note(self, coming: str | None = None) -> None:
        """Record a moment. `coming`: the change that follows it."""
        if self._noting or threading.get_ident() != self._thread:
            return
        self._noting = True
        digest = _digest(self._folder)
        if digest not in self._seen:
            self._seen.add(digest)
            copy = self._copies / f"{len(self.remains):04}"
            shutil.copytree(self._folder, copy, ignore=shutil.ignore_patterns(*_LIVE))
            self.remains.append(Remains(copy, self._last))
        if coming is not None:
            self._last = coming
        self._noting = False

    @contextmanager
    def _watched_disk(self) -> Generator[None]:
        really_open = io.open

        def opened(file: Any, mode: str = "r", buffering: int = -1, *rest: Any, **named: Any) -> Any:
            if self._noting or isinstance(file, int) or not set(mode) & set("wax+") or not self._holds(file):
                return really_open(file, mode, buffering, *rest, **named)
            if Path(file).name in _LIVE:
                return really_open(file, mode, buffering, *rest, **named)
            self._note(f"open({Path(file).name}, {mode})")
            raw = _WatchedFile(file, mode.replace("b", "").replace("t", ""), self._note)
            if "b" in mode and buffering == 0:
                return raw
            buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
            return buffered if "b" in mode else io.TextIOWrapper(buffered, *rest[:3], **named)

        def watched(name: str, really: Callable[..., Any]) -> Callable[..., Any]:
            def change(*arguments: Any, **named: Any) -> Any:
                told = ", ".join(Path(each).name if isinstance(each, str | Path) else str(each) for each in arguments)
                self._note(f"{name}({told})")
                return really(*arguments, **named)

            return change

        with ExitStack() as patches:
            patches.enter_context(patch.object(builtins, "open", opened))
            patches.enter_context(patch.object(io, "open", opened))
            for name in _CHANGES:
                patches.enter_context(patch.object(os, name, watched(name, getattr(os, name))))
            yield

    def _holds(self, file: object) -> bool:
        return Path(str(file)).absolute().is_relative_to(self._folder.absolute())


class _WatchedFile(io.FileIO):
    """A file that makes two writes of each, with a moment before each half."""

    def __init__(self, file: Any, mode: str, note: Callable[[str], None]) -> None:
        super().__init__(file, mode)
        self._note = note

    def write(self, data: Any, /) -> int:
        whole = memoryview(data).cast("B")
        name, half = Path(str(self.name)).name, len(whole) // 2
        self._note(f"half of write({name})")
        begun = super().write(whole[:half]) or 0 if half else 0
        self._note(f"write({name})")
        return begun + (super().write(whole[half:]) or 0)


async def _as_a_step(function: Callable[..., T], /, *arguments: Any, **named: Any) -> T:
    result = function(*arguments, **named)
    await asyncio.sleep(_THREAD)
    return result


def _digest(folder: Path) -> bytes:
    total = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.rglob("*")):
        if path.name in _LIVE:
            continue
        total.update(f"{path}\0".encode())
        if path.is_file():
            with io.FileIO(path) as file:
                total.update(hashlib.blake2b(file.readall()).digest())
    return total.digest()
