"""The host in a rank's process, which runs its actors, their calls and their streams."""

import asyncio
import os
import socket
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias, cast

from meshrl.engines.hosting.call_order import CallerQueue, Outbox
from meshrl.engines.hosting.messages import (
    NO_ARGUMENTS,
    Arguments,
    Ask,
    Construction,
    Failure,
    Over,
    Place,
    Stopped,
    boot,
    reserved_port,
)
from meshrl.engines.hosting.pickling import packed
from meshrl.engines.isolation import isolated
from meshrl.mesh import CollectiveActor, Put, Rank, fetch, pool, put_large, rank_context, resolve
from meshrl.user_code import copied

_ENGINES: Final = str(Path(__file__).parents[1])

Method: TypeAlias = Callable[..., object]
Run: TypeAlias = Callable[[Method, tuple[object, ...], Mapping[str, object]], Awaitable[object]]


class Hosted:
    """An actor in this process."""

    def __init__(self, rank: Rank, attempt: int) -> None:
        self.rank = rank
        self.attempt = attempt
        self.instance: object = None
        self._stopped = False
        self.tasks: set[asyncio.Task[object]] = set()

    def is_stopped(self) -> bool:
        """True if it takes no more calls."""
        return self._stopped

    async def end(self) -> None:
        """Cancel what runs, and wait for its end."""
        self._stopped = True
        for task in self.tasks:
            task.cancel()
        if self.tasks:
            await asyncio.wait(self.tasks)
        self.instance = None


class Host:
    """One process for one rank of a mesh, with all actors that are spawned there."""

    def __init__(self, put: Put, inline_bytes: int, shares_memory: bool) -> None:
        """`put`: keeps the large parts of answers. `inline_bytes`, `shares_memory`: the properties of `Engine`."""
        self._put = put
        self._inline_bytes = inline_bytes
        self._shares_memory = shares_memory
        self._actors: dict[str, Hosted] = {}
        self._ended: dict[str, int] = {}
        self._lines: defaultdict[str, CallerQueue] = defaultdict(CallerQueue)
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

    async def place(self) -> Place:
        """Return the place of this process, and a port for a server of it. It is another one each time."""
        if self._port is not None:
            self._port.close()
        self._port = reserved_port()
        port: int = self._port.getsockname()[1]
        if sys.platform != "linux":  # nobody could listen there
            self._port.close()
        return Place(os.getpid(), socket.gethostname(), "127.0.0.1", boot(), port, boot())

    async def clock(self) -> float:
        """Return the seconds of this machine's clock."""
        return time.monotonic()

    async def construct(self, wanted: Construction) -> Failure | Stopped | None:
        """Construct an actor."""
        if wanted.attempt <= self._ended.get(wanted.key, -1):
            return Stopped()
        os.environ.update(wanted.environment)
        hosted = self._actors[wanted.key] = Hosted(wanted.rank, wanted.attempt)
        task = _current_task()
        hosted.tasks.add(task)
        rank_context.set(wanted.rank)
        try:
            recipe = cast("tuple[Callable[..., object], tuple[object, ...], dict[str, object]]", await _read(wanted))
            create, arguments, keywords = recipe
            hosted.instance = create(*arguments, **keywords)
        except BaseException as error:  # noqa: BLE001 -- the caller gets it, whatever it is
            return Stopped() if hosted.is_stopped() else failure(error)
        finally:
            hosted.tasks.discard(task)
        return None

    async def call(self, ask: Ask, given: Arguments = NO_ARGUMENTS, lost: BaseException | None = None) -> object:
        """Call an endpoint. `lost`: why its arguments could not be read, to be raised at the call's turn."""
        return await self._serve(ask, given, self._called, lost)

    async def stream(self, ask: Ask, given: Arguments = NO_ARGUMENTS, lost: BaseException | None = None) -> object:
        """Run a generator to its end. `next` returns its values."""
        line = self._lines[ask.line]
        outbox = line.outbox(ask.number)
        try:
            return await self._serve(ask, given, partial(self._streamed, outbox if ask.consumed else None), lost)
        finally:
            line.close(ask.number)

    async def next(self, line: str, number: int) -> object:
        """Return the next value of a stream."""
        outbox = self._lines[line].outbox(number)
        return Over() if outbox is None else await outbox.take()

    def cancel(self, line: str, number: int) -> None:
        """Cancel a call or close a stream, even before it arrives."""
        self._lines[line].cancel(number)

    async def stop(self, key: str, attempt: int) -> None:
        """Cancel an actor's calls, wait for their end, and drop the actor."""
        self._ended[key] = max(attempt, self._ended.get(key, -1))
        hosted = self._actors.get(key)
        if hosted is not None and hosted.attempt <= attempt:
            await hosted.end()
            if self._actors.get(key) is hosted:
                del self._actors[key]

    def leave(self) -> None:
        """Give back memory that would outlive this process. The mesh ends, and this process is killed next."""
        pool.leave()
        self.leaving()

    def whole(self, line: str, number: int) -> int:
        """Return the whole number of a caller's call. See `CallerQueue.whole`."""
        return self._lines[line].whole(number)

    async def _called(self, method: Method, arguments: tuple[object, ...], keywords: Mapping[str, object]) -> object:
        return self._light(await cast("Awaitable[object]", method(*arguments, **keywords)))

    async def _streamed(
        self, outbox: Outbox | None, method: Method, arguments: tuple[object, ...], keywords: Mapping[str, object]
    ) -> None:
        values = cast("AsyncIterator[object]", method(*arguments, **keywords))
        try:
            async for value in values:
                if outbox is not None:
                    # It may be pickled later, after other calls have changed its mutable parts.
                    await outbox.give(isolated(self._light(value)))
        finally:
            if isinstance(values, AsyncGenerator):
                await values.aclose()

    async def _serve(self, ask: Ask, given: Arguments, run: Run, lost: BaseException | None) -> object:
        if not ask.timed:
            return await self._served(ask, given, run, lost)
        began = time.monotonic()
        return await self._served(ask, given, run, lost), began, time.monotonic()

    async def _served(self, ask: Ask, given: Arguments, run: Run, lost: BaseException | None) -> object:
        line, task = self._lines[ask.line], _current_task()
        if not line.arrive(ask.number, task):
            return Stopped()
        hosted = self._actors.get(ask.key)
        if hosted is None or hosted.is_stopped():
            line.leave(ask.number)
            return Stopped()
        hosted.tasks.add(task)
        rank_context.set(hosted.rank)
        try:
            (arguments, keywords), lost = (NO_ARGUMENTS, lost) if lost else await _taken(given)
            await line.turn(ask.number)
            _check_taken(hosted.instance, given, lost)
            method: Method = getattr(hosted.instance, ask.endpoint)
            line.start(ask.number)  # nothing else runs before the endpoint's first step
            return await run(method, arguments, keywords)
        except BaseException as error:  # noqa: BLE001 -- the caller gets it, whatever it is
            return Stopped() if hosted.is_stopped() and isinstance(error, asyncio.CancelledError) else failure(error)
        finally:
            hosted.tasks.discard(task)
            line.leave(ask.number)

    def _light(self, value: object) -> object:
        """Return the value without its large parts, which stay here."""
        return put_large(value, self._put, self._inline_bytes, shares=self._shares_memory)


async def _read(wanted: Construction) -> object:
    return await resolve((await fetch([wanted.recipe]))[wanted.recipe])


async def _taken(given: Arguments) -> tuple[Arguments, BaseException | None]:
    """Return a call's arguments with all references resolved, or the error that prevented it."""
    try:
        return (given if given is NO_ARGUMENTS else await resolve(given)), None
    except Exception as error:  # noqa: BLE001 -- it is raised at the call's turn
        return NO_ARGUMENTS, error


def _check_taken(actor: object, given: Arguments, lost: BaseException | None) -> None:
    """Raise what this rank has lost. If ranks wait for each other, a loss of one is raised on all."""

    def check() -> None:
        if lost is not None:
            raise lost

    if given is not NO_ARGUMENTS and isinstance(actor, CollectiveActor):
        actor.agree(check)
    else:
        check()


def work_as(folder: str, paths: Sequence[str]) -> None:
    """Find relative files, and modules next to a script, as the controller does."""
    for place in (copied(Path(folder)), Path(folder)):
        with suppress(OSError):  # on a machine without such a folder
            os.chdir(place)
    sys.path += [path for path in paths if path not in sys.path]


def _current_task() -> asyncio.Task[object]:
    return cast("asyncio.Task[object]", asyncio.current_task())


def _keep(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """Continue the loop if its thread ends, as a task's SystemExit ends it. The code that awaits the task gets that."""
    thread.join()
    while True:
        try:
            loop.run_forever()
            break
        except BaseException:  # noqa: BLE001, S112 -- once more
            continue


def failure(error: BaseException) -> Failure:
    """Describe an exception for the caller."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_ENGINES)] or frames
    text = traceback.format_exception_only(error)
    return Failure("".join(text).strip(), "".join([*traceback.format_list(own), *text]), packed(error))
