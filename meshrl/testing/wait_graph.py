"""Where the tasks of a loop are: the lines of a wait-for graph."""

import asyncio
import gc
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import AsyncGeneratorType, CoroutineType, FrameType, GeneratorType

from meshrl.events import Pending

_STDLIB = sysconfig.get_path("stdlib")
_CORE = str(Path(__file__).parents[1])


@dataclass(frozen=True)
class Standing:
    """A task that has not ended, and where it waits."""

    name: str
    where: str

    def __str__(self) -> str:
        return f"{self.name} stands at {self.where}"


def describe(loop: asyncio.AbstractEventLoop) -> str:
    """Describe who waits for what on a loop, and where each task stands."""
    waits = [f"  {pending}" for pending in Pending.of(loop)]
    return "\n".join([*waits, *(f"  {task}" for task in standing_tasks(loop))]) or "  no task is left"


def standing_tasks(loop: asyncio.AbstractEventLoop) -> list[Standing]:
    """The tasks of a loop that have not ended, by name."""
    tasks = [Standing(task.get_name(), _where(task)) for task in asyncio.all_tasks(loop) if not task.done()]
    return sorted(tasks, key=lambda task: (len(task.name), task.name))


def _where(task: asyncio.Task[object]) -> str:
    """The innermost line outside Python and asyncio. If it is meshrl's, also the script's line that called it."""
    frames = [frame for frame in _frames(task.get_coro()) if not frame.f_code.co_filename.startswith(_STDLIB)]
    if not frames:
        return repr(task.get_coro())
    innermost = frames[-1]
    if not innermost.f_code.co_filename.startswith(_CORE):
        return _line(innermost)
    scripts = [frame for frame in frames if not frame.f_code.co_filename.startswith(_CORE)]
    return f"{_line(innermost)}, called from {_line(scripts[-1])}" if scripts else _line(innermost)


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"


def _frames(waiting: object) -> Iterator[FrameType]:
    """The frames of a chain of awaits, outermost first."""
    while waiting is not None:
        frame: FrameType | None = None
        inner: object = None
        if isinstance(waiting, CoroutineType):
            frame, inner = waiting.cr_frame, waiting.cr_await
        elif isinstance(waiting, AsyncGeneratorType):
            frame, inner = waiting.ag_frame, waiting.ag_await
        elif isinstance(waiting, GeneratorType):
            frame, inner = waiting.gi_frame, waiting.gi_yieldfrom
        elif not isinstance(waiting, asyncio.Future):  # `__anext__()` and similar objects do not expose what they await
            inside = gc.get_referents(waiting)
            inner = next((each for each in inside if isinstance(each, AsyncGeneratorType | CoroutineType)), None)
        if frame is not None:
            yield frame
        waiting = inner
