"""Calls on ranks that share a loop. They start in order, and calls that end without a pause share a task."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextvars import Context
from itertools import count
from typing import Protocol, Self, cast


class Turn(Protocol):
    """One call."""

    def begin(self) -> tuple[Coroutine[object, object, None], Context] | None:
        """Return the coroutine and the context to run. None if the call must not start any more."""
        ...

    def pause(self, task: asyncio.Task[None]) -> None:
        """Take over the task, because the call waits for the first time."""
        ...


class Turns:
    """The calls that have arrived on the ranks of a mesh, all in one loop, and have not started.

    Each call runs alone in its task until its end, so `asyncio.timeout` and cancellation work as usual. A call that
    ends without a pause leaves its task to the next. With thousands of ranks, tasks and their objects would otherwise
    be most of what Python's garbage collector visits. So nobody may cancel a call's task after the call:
    `call_soon(task.cancel)` without a pause would cancel another call.
    """

    def __init__(self) -> None:
        self._waiting: deque[Turn] = deque()
        self._task: asyncio.Task[None] | None = None
        """The task that was made last, while it takes calls."""
        self._made = count(1)

    def add(self, turn: Turn) -> None:
        """Let a call start after the earlier ones."""
        self._waiting.append(turn)
        if self._task is None or self._task.done():
            self._go_on(1)

    def _go_on(self, tasks: int) -> None:
        for _ in range(min(tasks, len(self._waiting))):
            # Bypass the loop's task factory: an eager one would run calls before the task is stored here.
            self._task = asyncio.Task(
                self._run(), loop=asyncio.get_running_loop(), name=f"turns {next(self._made)}", context=Context()
            )

    async def _run(self) -> None:
        task = cast("asyncio.Task[None]", asyncio.current_task())

        def pause() -> None:
            turn.pause(task)
            self._task = None
            self._go_on(2)  # others may pause too, so thousands start within a few turns of the loop

        while self._waiting:
            turn = self._waiting.popleft()
            begun = turn.begin()
            if begun is None:
                continue
            steps = _Steps(*begun, pause)
            await cast("Awaitable[None]", steps)
            if steps.paused:
                return
            # The call cancelled itself, which must not hit the next. `uncancel` leaves a mark that only asyncio reads.
            if task.cancelling() or task._must_cancel:  # type: ignore[attr-defined]  # noqa: SLF001
                self._go_on(1)
                return


class _Steps:
    """Awaits a coroutine in a context other than the task's. Calls `pause` when it first waits."""

    def __init__(self, work: Coroutine[object, object, None], context: Context, pause: Callable[[], None]) -> None:
        self._work = work
        self._context = context
        self._pause = pause
        self.paused = False

    def __await__(self) -> Iterator[object]:
        return self

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> object:
        waits = self._context.run(self._work.send, None)
        if not self.paused:
            self.paused = True
            self._pause()
        return waits

    def throw(self, error: BaseException) -> object:
        """Pass a cancellation to the coroutine."""
        return self._context.run(self._work.throw, error)

    def close(self) -> None:
        """Close the coroutine, because the loop ends first."""
        self._context.run(self._work.close)
