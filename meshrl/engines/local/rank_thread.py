"""A rank as a thread: its event loop, its actors, one call of an endpoint, and calls that share a task."""

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import suppress
from contextvars import Context
from functools import partial
from itertools import count
from typing import Final, Protocol, Self, cast

from meshrl import log
from meshrl.engines.local.loops import RankLoop
from meshrl.engines.ranks import actor_stopped, isolated, reason_and_traceback, run_loop, unsendable
from meshrl.errors import MeshStopped, RankFailed
from meshrl.mesh import OnSpan, Rank, Request, own_place, rank_context, resolve

PATIENCE: Final = 10.0
"""Seconds that a rank's thread has to end its cancelled calls."""


class Turns:
    """The calls that have arrived on the ranks of a mesh, all in one loop, and have not started.

    Each call runs alone in its task until its end, so `asyncio.timeout` and cancellation work as usual. A call that
    ends without a pause leaves its task to the next. With thousands of ranks, tasks and their objects would otherwise
    be most of what Python's garbage collector visits. So nobody may cancel a call's task after the call:
    `call_soon(task.cancel)` without a pause would cancel another call.
    """

    def __init__(self) -> None:
        self._waiting: deque[LocalCall] = deque()
        self._task: asyncio.Task[None] | None = None
        """The task that was made last, while it takes calls."""
        self._made = count(1)

    def add(self, turn: "LocalCall") -> None:
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


class LocalSlot:
    """A place for one rank. Its thread runs while actors live on it. Without a core, it uses the caller's loop."""

    def __init__(self, cores: int, turns: Turns) -> None:
        """`turns`: starts calls if the loop is the caller's."""
        self.cores = cores
        self.turns: Turns | None = None if cores else turns
        self.threads: int = max(1, cores)
        self._loop: RankLoop | None = None
        self._thread: threading.Thread | None = None
        self._actors = 0

    def enter(self) -> asyncio.AbstractEventLoop:
        """Return the loop for one more actor. The first actor starts the thread."""
        if not self.cores:
            return asyncio.get_running_loop()
        self._actors += 1
        if self._loop is None:
            self._loop = RankLoop()
            self._thread = threading.Thread(target=_run, args=(self._loop,), name="meshrl-rank", daemon=True)
            self._thread.start()
        return self._loop

    def leave(self, *, blocked: bool = False) -> None:
        """Remove one actor. The last one ends the thread. A `blocked` thread ends when it can."""
        if not self.cores:
            return
        self._actors -= 1
        if (self._actors == 0 or blocked) and self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            if not blocked:
                self._thread.join()
            self._loop = self._thread = None


def _run(loop: RankLoop) -> None:
    run_loop(loop)
    # Answer the calls that arrived together with the stop.
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


class LocalMember:
    """One actor instance on its slot."""

    def __init__(self, slot: LocalSlot, name: str, rank: Rank) -> None:
        self.slot = slot
        self.name = name
        self.rank = rank
        self.place: str = own_place()
        self.stopped: bool = False
        self.has_started = True
        self.attempt: int = 0
        """How many times it was stopped."""
        self.loop: asyncio.AbstractEventLoop = slot.enter()
        self.context: Context = Context()
        """The context of its calls, in which `current_rank()` is this rank."""
        self.context.run(rank_context.set, rank)
        self.instance: object = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping: asyncio.Task[None] | None = None
        self._restarting = asyncio.Lock()
        self._remake: Callable[[], Awaitable[None]] | None = None

    async def construct(self, create: type, arguments: tuple[object, ...], keywords: Mapping[str, object]) -> None:
        """Construct the actor, on its own thread."""
        self._remake = partial(self.construct, create, arguments, keywords)
        arguments, keywords = sendable(f"{self.name}.__init__", arguments, keywords)

        async def make() -> None:
            given, named = await resolve((arguments, keywords))
            try:
                self.instance = create(*given, **named)
            except BaseException as error:
                raise self.failure("__init__", error) from error

        await self._on_rank(make())

    async def restart(self) -> None:
        """Stop the actor and construct it again. Restarts run one after another."""
        async with self._restarting:
            await self.stop()
            self.stopped, self._stopping = False, None
            self.loop = self.slot.enter()
            if self._remake is not None:
                await self._remake()

    async def stop(self) -> None:
        """Cancel the actor's calls, wait for their end, and drop it. It continues if the caller is cancelled."""
        if self._stopping is None:
            self.stopped = True
            self.attempt += 1
            self._stopping = asyncio.create_task(self._end())
        await asyncio.shield(self._stopping)

    async def _end(self) -> None:
        async def cancel() -> None:
            await asyncio.sleep(0)  # a task that has not begun could not report the stop
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self.instance = None

        blocked = False
        try:
            await asyncio.wait_for(self._on_rank(cancel()), PATIENCE if self.slot.cores else None)
        except TimeoutError:  # a call blocks the thread, so it cannot be cancelled
            blocked = True
            log.warning(f"{self.name} on rank {self.rank.index} does not end: a call blocks its thread, which is left")
        finally:
            self.slot.leave(blocked=blocked)

    async def _on_rank(self, work: Coroutine[None, None, None]) -> None:
        task = self.context.run(asyncio.run_coroutine_threadsafe, work, self.loop)
        await asyncio.wrap_future(task)

    def begin(self, task: asyncio.Task[None]) -> None:
        """Keep a running call, so that `stop` finds it."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def failure(self, endpoint: str, error: BaseException) -> RankFailed:
        """Return the error that the caller gets for an exception."""
        return RankFailed(self.name, self.rank.index, self.rank.axes, endpoint, *reason_and_traceback(error))


class Receiver(Protocol):
    """The caller's side of one or more calls."""

    seen: OnSpan | None

    async def run(self, call: "LocalCall") -> None:
        """Run the endpoint on the rank, and pass on its values."""
        ...

    def fail(self, error: BaseException) -> None:
        """Called on the rank when a call ends without a result."""
        ...


class LocalCall:
    """An endpoint call on one member: sent from the caller's thread, run on the rank's."""

    __slots__ = (
        "_attempt",
        "_began",
        "_dropped",
        "_task",
        "arguments",
        "endpoint",
        "index",
        "keywords",
        "member",
        "receiver",
    )

    def __init__(self, endpoint: str, request: Request, receiver: Receiver, index: int, *, isolate: bool) -> None:
        """`index`: the number of this call for the receiver. `isolate`: give the rank copies of the arguments."""
        self.member: LocalMember = cast("LocalMember", request.member)
        if self.member.stopped:
            raise _stopped(self.member, endpoint)
        self.endpoint: str = endpoint
        self.receiver: Receiver = receiver
        self.index: int = index
        self.arguments: tuple[object, ...] = request.arguments
        self.keywords: Mapping[str, object] = request.keywords
        if isolate:
            self.arguments, self.keywords = sendable(f"{self.member.name}.{endpoint}", self.arguments, self.keywords)
        self._task: asyncio.Task[None] | None = None
        self._attempt = self.member.attempt
        self._dropped = False
        self._began = 0.0

    def send(self) -> None:
        """Start on the rank's thread. The receiver fails if the actor stops before its end."""
        try:
            post(self.member.loop, self._start)
        except RuntimeError as error:  # the loop was just closed
            raise _stopped(self.member, self.endpoint) from error

    async def invoke(self) -> object:
        """Call the endpoint: an awaitable, or an async generator."""
        if self.arguments or self.keywords:
            self.arguments, self.keywords = await resolve((self.arguments, self.keywords))
        method: Callable[..., object] = getattr(self.member.instance, self.endpoint)
        return method(*self.arguments, **self.keywords)

    def cancel(self) -> None:
        """Cancel the rank's coroutine, from any thread. No effect after its end."""
        with suppress(RuntimeError):
            post(self.member.loop, self._cancel)

    def begin(self) -> tuple[Coroutine[object, object, None], Context] | None:
        """Return the coroutine and the context to run at its turn. None if it was cancelled or the actor is stopped."""
        if self._attempt != self.member.attempt:
            self.receiver.fail(_stopped(self.member, self.endpoint))
            return None
        return None if self._dropped else (self._run(), self.member.context.copy())

    def pause(self, task: asyncio.Task[None]) -> None:
        """Keep the task that it runs in, to cancel it."""
        self._task = task
        self.member.begin(task)

    def _start(self) -> None:
        if turns := self.member.slot.turns:
            turns.add(self)
        elif begun := self.begin():
            work, context = begun
            self.pause(self.member.loop.create_task(work, context=context))

    def report(self) -> None:
        """Report its times, before its answer."""
        if self.receiver.seen is not None:
            self.receiver.seen(self.index, self._began, self.member.loop.time())

    async def _run(self) -> None:
        if self.receiver.seen is not None:
            self._began = self.member.loop.time()
        try:
            await self.receiver.run(self)
        except asyncio.CancelledError as error:
            self.report()
            stopped = self.member.stopped
            self.receiver.fail(_stopped(self.member, self.endpoint) if stopped else self._failure(error))
        except BaseException as error:  # noqa: BLE001 -- the caller gets it, whatever it is
            self.report()
            self.receiver.fail(self._failure(error))

    def _cancel(self) -> None:
        self._dropped = True
        if self._task is not None:
            self._task.cancel()

    def _failure(self, error: BaseException) -> RankFailed:
        failed = self.member.failure(self.endpoint, error)
        failed.__cause__ = error
        return failed


def _stopped(member: LocalMember, endpoint: str) -> MeshStopped:
    return actor_stopped(member.name, member.rank.index, endpoint)


def sendable(
    where: str, arguments: tuple[object, ...], keywords: Mapping[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Isolate a call's arguments. ContractError for values that cannot be copied, such as a lock or a file."""
    try:
        return isolated(arguments) if arguments else (), isolated(dict(keywords)) if keywords else {}
    except TypeError as error:
        raise unsendable(where, error) from error


def post(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *arguments: object) -> None:
    """Run a callback on a loop: at once if it is this thread's. RuntimeError if the loop is closed."""
    if asyncio._get_running_loop() is loop:  # noqa: SLF001 -- None if none runs, without an exception
        callback(*arguments)
    else:
        loop.call_soon_threadsafe(callback, *arguments)


def answer(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *arguments: object) -> None:
    """Run a callback on the caller's loop. If that is closed, nobody needs the answer."""
    with suppress(RuntimeError):
        post(loop, callback, *arguments)
