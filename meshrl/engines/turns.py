"""Calls on ranks that share one loop: they begin in order, and those that end without a pause share a task."""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from functools import partial
from types import coroutine
from typing import Protocol, cast
from weakref import WeakKeyDictionary


class Turn(Protocol):
    """One call."""

    def begin(self) -> tuple[Coroutine[object, object, None], Context] | None:
        """What is to be run, and where; None if it is not to begin any more."""
        ...

    def pause(self, task: asyncio.Task[None]) -> None:
        """It waits for the first time; from here on the task is its own."""
        ...


class Turns:
    """The calls that have arrived on a loop and have not begun.

    Each begins in a task that no other call runs in meanwhile, so that `asyncio.timeout` and cancellation are what they
    always are. One that ends without a pause leaves its task to the next: with thousands of ranks, tasks and what hangs
    on them would be most of what Python's garbage collector walks over.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[Turn] = deque()
        self._task: asyncio.Task[None] | None = None
        """The last one that was made to take turns, while it takes any."""

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> "Turns":
        """The turns of a loop."""
        return _turns.setdefault(loop, cls(loop))

    def add(self, turn: Turn) -> None:
        """Let a call begin after those that came before."""
        self._waiting.append(turn)
        if self._task is None or self._task.done():
            self._go_on(1)

    def _go_on(self, tasks: int) -> None:
        for _ in range(min(tasks, len(self._waiting))):
            self._task = self._loop.create_task(self._run(), context=Context())

    async def _run(self) -> None:
        task = cast("asyncio.Task[None]", asyncio.current_task())

        def pause() -> None:
            turn.pause(task)
            self._task = None
            self._go_on(2)  # others may pause as well: so thousands begin within a few turns of the loop

        while self._waiting:
            turn = self._waiting.popleft()
            begun = turn.begin()
            if begun is None:
                continue
            if await _run_in(*begun, pause):
                return
            if task.cancelling():  # the call did that to itself; it is not for the next
                self._go_on(1)
                return


_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, Turns] = WeakKeyDictionary()


@coroutine
def _run_in(
    work: Coroutine[object, object, None], context: Context, pause: Callable[[], None]
) -> Generator[object, object, bool]:
    """Run a coroutine in a context other than the task's. Whether it paused; `pause` is told when it first does."""
    try:
        waits = context.run(work.send, None)
    except StopIteration:
        return False
    pause()
    while True:
        try:
            sent = yield waits
        except GeneratorExit:
            context.run(work.close)
            raise
        except BaseException as error:  # noqa: BLE001 -- a cancellation, which is the coroutine's to see
            step = partial(work.throw, error)
        else:
            step = partial(work.send, sent)
        try:
            waits = context.run(step)
        except StopIteration:
            return True
