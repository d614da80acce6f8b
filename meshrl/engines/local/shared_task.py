"""Calls on ranks that share a loop: they begin in order, and those that end without a pause share a task."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextvars import Context
from itertools import count
from typing import Protocol, Self, cast


class Turn(Protocol):
    """One call."""

    def begin(self) -> tuple[Coroutine[object, object, None], Context] | None:
        """What is to be run, and where; None if it is not to begin any more."""
        ...

    def pause(self, task: asyncio.Task[None]) -> None:
        """It waits for the first time; from here on the task is its own."""
        ...


class Turns:
    """The calls that have arrived on the ranks of a mesh, all in one loop, and have not begun.

    Each begins in a task that no other call runs in meanwhile, so that `asyncio.timeout` and cancellation are what they
    always are. One that ends without a pause leaves its task to the next: with thousands of ranks, tasks and what hangs
    on them would be most of what Python's garbage collector walks over. So a call must not have its task cancelled
    after its end: with `call_soon(task.cancel)` and no pause it would cancel another one.
    """

    def __init__(self) -> None:
        self._waiting: deque[Turn] = deque()
        self._task: asyncio.Task[None] | None = None
        """The last one that was made to take turns, while it takes any."""
        self._made = count(1)

    def add(self, turn: Turn) -> None:
        """Let a call begin after those that came before."""
        self._waiting.append(turn)
        if self._task is None or self._task.done():
            self._go_on(1)

    def _go_on(self, tasks: int) -> None:
        for _ in range(min(tasks, len(self._waiting))):
            # Not by the loop's task factory: an eager one would run calls before the task is known here.
            self._task = asyncio.Task(
                self._run(), loop=asyncio.get_running_loop(), name=f"turns {next(self._made)}", context=Context()
            )

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
            steps = _Steps(*begun, pause)
            await cast("Awaitable[None]", steps)
            if steps.paused:
                return
            # The call did that to itself; it is not for the next. `uncancel` leaves a mark that only asyncio reads.
            if task.cancelling() or task._must_cancel:  # type: ignore[attr-defined]  # noqa: SLF001
                self._go_on(1)
                return


class _Steps:
    """Runs a coroutine, awaited, in a context other than the task's; `pause` is told when it first waits."""

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
        """A cancellation, which is the coroutine's to see."""
        return self._context.run(self._work.throw, error)

    def close(self) -> None:
        """The loop ends before the coroutine."""
        self._context.run(self._work.close)
