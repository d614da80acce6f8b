"""Event loops of ranks: one that other threads wake fast, and calls that share a task on a loop of many ranks."""

import asyncio
import contextlib
import selectors
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextvars import Context
from itertools import count
from typing import TYPE_CHECKING, Protocol, Self, TypeVarTuple, cast

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

Ts = TypeVarTuple("Ts")


class _Mailbox(selectors.DefaultSelector):
    """Waits on a lock if only the loop's own wake-up socket is registered, else on the files."""

    def __init__(self) -> None:
        super().__init__()
        self._bell = threading.Lock()
        self._bell.acquire()
        self._has_signals = False
        self.has_files = False
        """True if something other than a thread can wake the loop."""

    def hear_signals(self) -> None:
        """Wait on files from now on, because signals come through the loop's socket."""
        self._has_signals = self.has_files = True

    def register(self, fileobj: "FileDescriptorLike", events: int, data: object = None) -> selectors.SelectorKey:
        """Register a file, as in any selector. The first one is the loop's own."""
        key = super().register(fileobj, events, data)
        self.has_files = self._has_signals or len(self.get_map()) > 1
        return key

    def unregister(self, fileobj: "FileDescriptorLike") -> selectors.SelectorKey:
        """Remove a file, as in any selector."""
        key = super().unregister(fileobj)
        self.has_files = self._has_signals or len(self.get_map()) > 1
        return key

    def ring(self) -> None:
        """End this wait or the next one. Ringing twice has no further effect."""
        with contextlib.suppress(RuntimeError):
            self._bell.release()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait, and return the files that are ready. None are ready if only the bell rang."""
        if self.has_files:
            return super().select(timeout)
        if timeout is None:
            self._bell.acquire()
        elif timeout > 0:
            self._bell.acquire(timeout=min(timeout, threading.TIMEOUT_MAX))
        else:
            self._bell.acquire(blocking=False)
        return []


class RankLoop(asyncio.SelectorEventLoop):
    """The event loop of a rank. It suits the controller too: `asyncio.Runner(loop_factory=RankLoop)`."""

    def __init__(self) -> None:
        self._mailbox = _Mailbox()
        super().__init__(self._mailbox)

    def _write_to_self(self) -> None:
        # asyncio calls this when a callback came from another thread. The loop registers a file before it checks
        # callbacks again, so a caller that sees no file can rely on the bell.
        self._mailbox.ring()
        if self._mailbox.has_files:
            super()._write_to_self()  # type: ignore[misc]  # private, so not in the type stubs

    def add_signal_handler(self, sig: int, callback: Callable[[*Ts], object], *args: *Ts) -> None:
        """Add a handler, as in asyncio. Signals wake through the socket, so the loop waits on files from then on."""
        self._mailbox.hear_signals()
        super().add_signal_handler(sig, callback, *args)


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
