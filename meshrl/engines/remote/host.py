"""The host in a rank's process: keeps the order of calls, and runs the actors, their calls and their streams."""

import asyncio
import os
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from inspect import isawaitable
from pathlib import Path
from typing import cast

from meshrl.engines.ranks import isolated, reason_and_traceback, run_loop
from meshrl.engines.remote.messages import (
    NO_ARGUMENTS,
    Arguments,
    Call,
    Construction,
    Failure,
    Place,
    Service,
    Stopped,
    StreamEnd,
    pickled_error,
    reserved_port,
)
from meshrl.mesh import CollectiveActor, Put, Rank, boot_id, fetch, pool, put_large, rank_context, resolve
from meshrl.user_code import copied


class Outbox:
    """Values of one stream, which yields a value on request."""

    def __init__(self) -> None:
        self._requested = asyncio.Event()
        self._answer: asyncio.Future[object] | None = None

    async def take(self) -> object:
        """Return the next value, or `StreamEnd`."""
        self._answer = asyncio.get_running_loop().create_future()
        self._requested.set()
        return await self._answer

    async def give(self, value: object) -> None:
        """Wait for the request, and answer it."""
        await self._requested.wait()
        self._requested.clear()
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(value)
        # The answer leaves the loop in two steps. A generator that computes next would delay it.
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    def close(self) -> None:
        """End the stream of values."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(StreamEnd())


class CallerQueue:
    """The calls of one caller, which start in the order they were made."""

    def __init__(self) -> None:
        self.next: int = 0
        """The number that may start next."""
        self._ahead: set[int] = set()
        """Higher numbers that need no turn any more."""
        self._dropped: set[int] = set()
        """Numbers that were cancelled before they arrived."""
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._running: dict[int, asyncio.Task[object]] = {}
        self._outboxes: dict[int, Outbox] = {}

    def arrive(self, number: int, task: asyncio.Task[object]) -> bool:
        """Keep a call's task. Returns False if the call was cancelled before it arrived."""
        if number in self._dropped:
            self._dropped.discard(number)
            return False
        self._running[number] = task
        return True

    async def turn(self, number: int) -> None:
        """Wait for the turn of a call that is not `next`: until all earlier calls have started."""
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        await waiting

    def start(self, number: int) -> None:
        """Give the next call its turn, unless this call has given it."""
        if number < self.next:
            return
        self._waiting.pop(number, None)
        self._ahead.add(number)
        while self.next in self._ahead:
            self._ahead.discard(self.next)
            self.next += 1
        waiting = self._waiting.get(self.next)
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    def leave(self, number: int) -> None:
        """Forget a call or stream that has ended, perhaps without its turn."""
        self._running.pop(number, None)
        self.start(number)
        if (outbox := self._outboxes.pop(number, None)) is not None:
            outbox.close()

    def cancel(self, number: int) -> None:
        """Cancel a call that runs or waits. A call that has not arrived will not start."""
        task = self._running.get(number)
        if task is not None:
            task.cancel()
        elif number >= self.next and number not in self._ahead:
            self._dropped.add(number)
            self.leave(number)

    def outbox(self, number: int) -> Outbox | None:
        """Return the values of a stream, even before it arrives. None if it has ended."""
        has_started = number < self.next or number in self._ahead
        if has_started and number not in self._outboxes and number not in self._running:
            return None
        return self._outboxes.setdefault(number, Outbox())


class HostedActor:
    """An actor in this process."""

    def __init__(self, rank: Rank, attempt: int) -> None:
        self.rank = rank
        self.attempt = attempt
        self.instance: object = None
        self.tasks: set[asyncio.Task[object]] = set()


class Host:
    """One process for one rank of a mesh, with all actors that are spawned there."""

    def __init__(self, put: Put, inline_bytes: int, shares_memory: bool) -> None:
        """`put`: keeps the large parts of answers. `inline_bytes`, `shares_memory`: the properties of `Engine`."""
        self._light: Callable[[object], object] = partial(put_large, put=put, limit=inline_bytes, shares=shares_memory)
        """Returns a value without its large parts, which stay here."""
        self._actors: dict[str, HostedActor] = {}
        self._ended: dict[str, int] = {}
        """The last stopped attempt of each actor."""
        self._queues: defaultdict[str, CallerQueue] = defaultdict(CallerQueue)
        self._keeper: threading.Thread | None = None
        self._port: socket.socket | None = None
        self.leaving: Callable[[], object] = lambda: None
        """Called when the mesh ends."""

    def keep_loop(self) -> None:
        """Keep this thread's loop running if a task ends it by SystemExit."""
        if self._keeper is None:
            loop, thread = asyncio.get_running_loop(), threading.current_thread()
            self._keeper = threading.Thread(target=_keep, args=(loop, thread), name="meshrl-keeper", daemon=True)
            self._keeper.start()

    async def serve(self, service: Service, arguments: tuple[object, ...]) -> object:
        """Answer a request of a `Channel`."""
        method: Callable[..., object] = getattr(self, service)
        answer = method(*arguments)
        return await answer if isawaitable(answer) else answer

    def place(self) -> Place:
        """Return the place of this process, and a port for a server of it. It is another one each time."""
        if self._port is not None:
            self._port.close()
        self._port = reserved_port()
        port: int = self._port.getsockname()[1]
        if sys.platform != "linux":  # nobody could listen there
            self._port.close()
        return Place(os.getpid(), socket.gethostname(), "127.0.0.1", boot_id(), port, boot_id())

    def clock(self) -> float:
        """Return the seconds of this machine's clock."""
        return time.monotonic()

    async def construct(self, construction: Construction) -> Failure | Stopped | None:
        """Construct an actor."""
        key, attempt, rank, environment, recipe = construction
        if attempt <= self._ended.get(key, -1):
            return Stopped()
        os.environ.update(environment)
        actor = self._actors[key] = HostedActor(rank, attempt)
        task = cast("asyncio.Task[object]", asyncio.current_task())
        actor.tasks.add(task)
        rank_context.set(rank)
        try:
            parts = await resolve((await fetch([recipe]))[recipe])
            create, arguments, keywords = cast(
                "tuple[Callable[..., object], tuple[object, ...], dict[str, object]]", parts
            )
            actor.instance = create(*arguments, **keywords)
        except BaseException as error:  # noqa: BLE001 -- the caller gets it, whatever it is
            return Stopped() if attempt <= self._ended.get(key, -1) else _failure(error)
        finally:
            actor.tasks.discard(task)
        return None

    async def call(self, call: Call, given: Arguments = NO_ARGUMENTS, lost: BaseException | None = None) -> object:
        """Call an endpoint, or run a generator to its end while `next` returns its values.

        `lost`: why the arguments could not be read, to be raised at the call's turn.
        """
        began, queue, actor = time.monotonic(), self._queues[call.caller], self._actors.get(call.actor)
        task = cast("asyncio.Task[object]", asyncio.current_task())
        answer: object = Stopped()
        if queue.arrive(call.number, task):
            try:
                if actor is not None and actor.attempt > self._ended.get(call.actor, -1):
                    actor.tasks.add(task)
                    answer = await self._answer(call, actor, queue, given, lost)
            finally:
                queue.leave(call.number)
                if actor is not None:
                    actor.tasks.discard(task)
        return (answer, began, time.monotonic()) if call.timed else answer

    async def next(self, caller: str, number: int) -> object:
        """Return the next value of a stream."""
        outbox = self._queues[caller].outbox(number)
        return StreamEnd() if outbox is None else await outbox.take()

    def cancel(self, caller: str, number: int) -> None:
        """Cancel a call or close a stream, even before it arrives."""
        self._queues[caller].cancel(number)

    async def stop(self, key: str, attempt: int) -> None:
        """Cancel an actor's calls, wait for their end, and drop the actor."""
        self._ended[key] = max(attempt, self._ended.get(key, -1))
        actor = self._actors.get(key)
        if actor is not None and actor.attempt <= attempt:
            for task in actor.tasks:
                task.cancel()
            if actor.tasks:
                await asyncio.wait(actor.tasks)
            actor.instance = None
            if self._actors.get(key) is actor:
                del self._actors[key]

    def leave(self) -> None:
        """Give back memory that would outlive this process. The mesh ends, and this process is killed next."""
        pool.leave()
        self.leaving()

    async def _answer(
        self, call: Call, actor: HostedActor, queue: CallerQueue, given: Arguments, lost: BaseException | None
    ) -> object:
        rank_context.set(actor.rank)
        try:
            arguments, keywords = NO_ARGUMENTS
            if lost is None and given is not NO_ARGUMENTS:
                try:
                    arguments, keywords = await resolve(given)
                except Exception as error:  # noqa: BLE001 -- it is raised at the call's turn
                    lost = error
            if call.number != queue.next:
                await queue.turn(call.number)
            if given is not NO_ARGUMENTS and isinstance(actor.instance, CollectiveActor):
                actor.instance.agree(partial(_check, lost))  # what one rank has lost is raised on all
            else:
                _check(lost)
            method: Callable[..., object] = getattr(actor.instance, call.endpoint)
            queue.start(call.number)  # nothing else runs before the endpoint's first step
            work = method(*arguments, **keywords)
            if not call.stream:
                return self._light(await cast("Awaitable[object]", work))
            outbox = queue.outbox(call.number) if call.consumed else None
            await self._stream(cast("AsyncIterator[object]", work), outbox)
            return None
        except BaseException as error:  # noqa: BLE001 -- the caller gets it, whatever it is
            stopped = actor.attempt <= self._ended.get(call.actor, -1)
            return Stopped() if stopped and isinstance(error, asyncio.CancelledError) else _failure(error)

    async def _stream(self, values: AsyncIterator[object], outbox: Outbox | None) -> None:
        try:
            async for value in values:
                if outbox is not None:
                    # It may be pickled later, after other calls have changed its mutable parts.
                    await outbox.give(isolated(self._light(value)))
        finally:
            if isinstance(values, AsyncGenerator):
                await values.aclose()


def _check(lost: BaseException | None) -> None:
    """Raise what this rank has lost of a call's arguments, if anything."""
    if lost is not None:
        raise lost


def work_as(folder: str, paths: Sequence[str]) -> None:
    """Find relative files, and modules next to a script, as the controller does."""
    for place in (copied(Path(folder)), Path(folder)):
        with suppress(OSError):  # on a machine without such a folder
            os.chdir(place)
    sys.path += [path for path in paths if path not in sys.path]


def _keep(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """Continue the loop if its thread ends, as a task's SystemExit ends it. The code that awaits the task gets that."""
    thread.join()
    run_loop(loop)


def _failure(error: BaseException) -> Failure:
    """Describe an exception for the caller."""
    return Failure(*reason_and_traceback(error), pickled_error(error))
