"""Ranks' processes, actors on them, and calls and streams to these, by the controller or a rank that holds a handle."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pickle import PicklingError
from secrets import token_hex
from typing import TYPE_CHECKING, Final, TypeVar, cast
from weakref import WeakSet, WeakValueDictionary

from meshrl.engines.ranks import actor_stopped, unsendable
from meshrl.engines.remote.messages import (
    Call,
    Channel,
    Construction,
    Failure,
    MessageLost,
    Place,
    ProcessExited,
    Reply,
    Stopped,
    StreamEnd,
    unpickled_error,
)
from meshrl.engines.remote.pool_ref import PoolRef
from meshrl.errors import ContractError, MeshStopped, RankDied, RankFailed
from meshrl.events import clock
from meshrl.mesh import Member, OnSpan, Rank, Ref, Request, boot_id
from meshrl.user_code import pickle_scripts_by_value

if TYPE_CHECKING:
    from meshrl.engines.remote.logs import RankLog

T = TypeVar("T")

_NEWS: Final = 0.1
"""Most seconds from the failure of a rank to the news of the death of another rank that caused it."""
_FAR_NEWS: Final = 5.0
"""The same if ranks that wait for each other are on other machines. Last output of the dead one is fetched first."""


@dataclass(frozen=True)
class Death:
    """How a process ended."""

    pid: int
    host: str
    reason: str
    output: str = ""
    """The last lines of its output."""

    def __str__(self) -> str:
        return f"{self.reason}\n{self.output}" if self.output else self.reason


class Process:
    """A rank's process. Each process that calls it has one such object for it."""

    def __init__(self, key: str, channel: Channel, place: Place | None = None) -> None:
        self.key = key
        self.channel = channel
        self.known = place
        self.ahead: float = 0.0
        """Seconds that its clock is ahead of this process's."""
        self.death: Death | None = None
        self.log: RankLog | None = None
        """Its output, if the run of this process keeps that."""
        self.spawns: WeakSet[Spawn] = WeakSet()
        self.caller: str = token_hex(8)
        """Identifies the calls that are sent through this object, which are numbered."""
        self.sent = 0
        _processes[key] = self

    @property
    def is_running(self) -> bool:
        """False for a process that has not started yet, or has exited."""
        return self.death is None and self.known is not None

    def __reduce__(self) -> tuple[Callable[..., "Process"], tuple[object, ...]]:
        return _unpickled, (self.key, self.channel, self.known)

    def died(self, reason: str) -> Death:
        """Record that the process is gone, for all actors in it."""
        if self.death is None:
            place = self.known
            pid, host = (place.pid, place.host) if place else (0, "an unknown host")
            self.death = Death(pid, host, reason, self.log.last() if self.log else "")
            for spawn in self.spawns:
                spawn.dead = spawn.dead or self
            _met.pop(self.key, None)
        return self.death


_processes: WeakValueDictionary[str, Process] = WeakValueDictionary()
_met: dict[str, Process] = {}
"""Processes that came with a handle. Later handles find the connection of the first one."""


def _unpickled(key: str, channel: Channel, place: Place | None) -> Process:
    _met[key] = process = _processes.get(key) or Process(key, channel, place)
    return process


class Spawn:
    """An actor on all ranks of a mesh."""

    def __init__(
        self, key: str, name: str, ranks: Sequence[Rank], processes: Sequence[Process], *, together: bool
    ) -> None:
        """`together`: its ranks wait for each other, so no call is cancelled on only one of them."""
        self.key = key
        self.name = name
        self.ranks = ranks
        self.together = together
        self.processes: list[Process] = list(processes)
        self.dead: Process | None = None
        """A process that is gone. If the ranks wait for each other, none takes calls any more."""
        for process in self.processes:
            process.spawns.add(self)

    def __reduce__(self) -> tuple[Callable[..., "Spawn"], tuple[object, ...]]:
        return partial(Spawn, together=self.together), (self.key, self.name, self.ranks, self.processes)

    def move(self, index: int, process: Process) -> None:
        """Move one rank of the actor to another process."""
        self.processes[index] = process
        process.spawns.add(self)
        self.dead = next((each for each in self.processes if each.death), None)


class RankMember:
    """One actor instance in its process."""

    def __init__(self, spawn: Spawn, index: int, attempt: int = 0) -> None:
        self.spawn = spawn
        self.index = index
        self.attempt: int = attempt
        self.rank: Rank = spawn.ranks[index]
        """Its place on the mesh."""
        self.process: Process = spawn.processes[index]
        """The process that it runs in."""
        self.stopped: bool = False
        self.has_started: bool = False

    def __reduce__(self) -> tuple[type["RankMember"], tuple[object, ...]]:
        return RankMember, (self.spawn, self.index, self.attempt)

    @property
    def place(self) -> str:
        """Its process and host, as far as they are known."""
        known = self.process.known
        return f"process {known.pid} on {known.host}" if known else "a process that is being made"

    def stopped_error(self, endpoint: str) -> MeshStopped:
        """Return the error of a stopped actor."""
        return actor_stopped(self.spawn.name, self.rank.index, endpoint)

    def death_error(self, endpoint: str, process: Process) -> MeshStopped | RankDied:
        """Return the error for a process that is gone: the mesh was stopped, or the rank died."""
        if self.stopped or process.death is None:
            return self.stopped_error(endpoint)
        index = self.spawn.processes.index(process) if process in self.spawn.processes else self.index
        rank, death = self.spawn.ranks[index], process.death
        where = self.spawn.name, rank.index, rank.axes, endpoint
        return RankDied(*where, death.pid, death.host, death.reason, death.output)

    def result(self, endpoint: str, process: Process, answer: object) -> object:
        """Return an answer of this process. Raises `RankFailed`, `RankDied` or `MeshStopped` if it is no result."""
        if isinstance(answer, Stopped):
            raise self.stopped_error(endpoint)
        if isinstance(answer, ProcessExited):
            process.died(str(answer))
            raise self.death_error(endpoint, process)
        if isinstance(answer, Failure | MessageLost):  # lost: perhaps the answer could not be unpickled
            where = self.spawn.name, self.rank.index, self.rank.axes, endpoint
            cause = unpickled_error(answer.cause) if isinstance(answer, Failure) else None
            raise RankFailed(*where, answer.reason, answer.traceback) from cause
        return answer

    def move(self, process: Process) -> None:
        """Prepare to construct the actor again, in this process."""
        self.attempt += 1
        self.stopped = False
        self.process = process
        self.spawn.move(self.index, process)

    async def construct(self, environment: Mapping[str, str], recipe: Ref) -> None:
        """Construct the actor in its process."""
        construction = Construction(self.spawn.key, self.attempt, self.rank, environment, recipe)
        process = self.process
        reply = process.channel.request("construct", construction)
        await reply.wait()
        self.result("__init__", process, reply.error or reply.value)
        self.has_started = True

    async def stop(self) -> None:
        """Cancel the actor's calls, wait for their end, and drop the actor."""
        self.stopped = True
        process = self.process
        if process.is_running:
            try:
                await process.channel.request("stop", self.spawn.key, self.attempt)
            except ProcessExited as exited:
                process.died(str(exited))


class Caller:
    """The part of an engine that works in every process."""

    def __init__(self, references: type[PoolRef], inline_bytes: int, shares_memory: bool = False) -> None:
        """`references`: to values of `put`. `inline_bytes`: as the attribute, in bytes."""
        self._references = references
        self.inline_bytes: int = inline_bytes
        """Size in bytes of the largest column that travels with a call. A divided one counts by the ranks' average."""
        self._shares_memory = shares_memory

    @property
    def shares_memory(self) -> bool:
        """True if all ranks are processes of this machine, and no other machine is ever added."""
        return self._shares_memory

    def __reduce__(self) -> tuple[type["Caller"], tuple[type[PoolRef], int, bool]]:
        return Caller, (self._references, self.inline_bytes, self.shares_memory)

    def put(self, value: object) -> Ref:
        """Keep a value once, for all that fetch it."""
        return self._references.put(value)

    async def call(self, endpoint: str, requests: Sequence[Request], seen: OnSpan | None = None) -> list[object]:
        """Call each member and wait for all results.

        Raises ContractError if ranks of a `CollectiveActor` are left out.
        """
        spawn = check_members(endpoint, requests)
        calls: Iterable[SentCall] = (
            SentCall(endpoint, request, seen and partial(seen, index)) for index, request in enumerate(requests)
        )
        if spawn.together and len(spawn.ranks) > 1:
            if len(requests) < len(spawn.ranks):
                raise ContractError(
                    f"{spawn.name}.{endpoint} was called on {len(requests)} of {len(spawn.ranks)} ranks, which would "
                    "wait for the others: call a `CollectiveActor` on all of its ranks, not through `at`"
                )
            calls = list(calls)  # pickled before the first is sent: all ranks are called, or none
        sent: list[SentCall] = []
        results: dict[SentCall, object] = {}
        over: asyncio.Future[SentCall | None] = asyncio.get_running_loop().create_future()
        left = len(requests)

        def arrived(call: SentCall) -> None:
            nonlocal left
            left -= 1
            failed = None
            try:
                results[call] = call.result()
            except BaseException:  # noqa: BLE001 -- it is raised again where the call is awaited
                failed = call
            if not over.done() and (failed or not left):
                over.set_result(failed)

        try:
            for call in calls:
                call.send()
                sent.append(call)
                call.reply.add_callback(partial(arrived, call))
            if failed := await over:
                failed.result()
            return [results[call] for call in sent]
        except RankFailed as error:
            raise await cause_among(error, sent)  # noqa: B904 -- it has its cause
        except BaseException:
            cancel(sent)
            raise

    async def stream(
        self, endpoint: str, requests: Sequence[Request], consumed: Sequence[int], seen: OnSpan | None = None
    ) -> AsyncGenerator[object]:
        """Yield the consumed members' values as they come. A rank is at most one value ahead of the reader."""
        check_members(endpoint, requests)
        sent: list[SentCall] = []
        arrivals: asyncio.Queue[tuple[SentCall, Reply]] = asyncio.Queue()
        try:
            for index, request in enumerate(requests):
                on_span = seen and partial(seen, index)
                call = SentCall(endpoint, request, on_span, stream=True, consumed=index in consumed)
                call.send()
                sent.append(call)
            for call in sent:
                call.reply.add_callback(partial(arrivals.put_nowait, (call, call.reply)))
                if call.consumed:
                    call.request_next(arrivals)
            running = set(sent)
            while running:
                call, reply = await arrivals.get()
                if reply is not call.reply:
                    value = call.member.result(endpoint, call.process, reply.error or reply.value)
                    call.consumed = not isinstance(value, StreamEnd)
                    if call.consumed:
                        call.request_next(arrivals)
                        yield value
                elif call.consumed and reply.error is not None:
                    call.cancel()  # the rank may not know it, and then answers the request for its next value
                if call in running and call.reply.done and not call.consumed:
                    call.result()
                    running.discard(call)
        except RankFailed as error:
            raise await cause_among(error, sent)  # noqa: B904 -- it has its cause
        finally:
            cancel(sent)

    async def restart(self, members: Sequence[Member]) -> None:
        """Raise ContractError: a rank has no processes to restart an actor in."""
        name = cast("RankMember", members[0]).spawn.name
        raise ContractError(f"respawn({name}) was called on a rank: call it where {name} was spawned")

    async def stop(self, members: Sequence[Member]) -> None:
        """Cancel the actors' calls, wait for their end, and drop the actors. Continues if the caller is cancelled."""
        await asyncio.gather(*(member.stop() for member in cast("Sequence[RankMember]", members)))


def check_members(endpoint: str, requests: Sequence[Request]) -> Spawn:
    """Return the actor that is called. Raises `MeshStopped` or `RankDied` if a rank takes no calls."""
    for request in requests:
        member = cast("RankMember", request.member)
        if member.stopped:
            raise member.stopped_error(endpoint)
        dead = member.spawn.dead if member.spawn.together else member.process if member.process.death else None
        if dead is not None:
            raise member.death_error(endpoint, dead)
    return cast("RankMember", requests[0].member).spawn


class SentCall:
    """A call of an endpoint, or a stream, on one member."""

    def __init__(
        self,
        endpoint: str,
        request: Request,
        seen: Callable[[float, float], None] | None,
        *,
        stream: bool = False,
        consumed: bool = False,
    ) -> None:
        """Pickle the arguments. `seen`: called with start and end on the rank, on the clock of this process.

        ContractError for arguments that cannot be pickled, such as a lock.
        """
        self.member: RankMember = cast("RankMember", request.member)
        self.process: Process = self.member.process
        self.endpoint = endpoint
        self.consumed = consumed
        """True while the caller reads its values."""
        self._stream = stream
        self._ended = False
        self._seen = seen
        self._timed = seen is not None
        self._began = clock() if seen else 0.0
        given = request.arguments or request.keywords
        pickle_scripts_by_value()
        try:
            prepare = self.process.channel.prepare
            self._send = prepare((request.arguments, dict(request.keywords)) if given else None)
        except (TypeError, PicklingError) as error:
            raise unsendable(f"{self.member.spawn.name}.{endpoint}", error) from error

    def send(self) -> None:
        """Send it to the rank."""
        process, actor = self.process, self.member.spawn.key
        self.number: int = process.sent
        call = Call(self.endpoint, actor, process.caller, self.number, self._stream, self.consumed, self._timed)
        self.reply: Reply = self._send(call)
        process.sent += 1  # later calls wait only for sent ones
        del self._send  # and the arguments with it

    def result(self) -> object:
        """Return the result, or None at a stream's end, once it has arrived. Raises as `RankMember.result`."""
        answer: object = self.reply.error or self.reply.value
        if self.reply.error is None:
            self._ended = True
            if self._timed:
                answer, began, ended = cast("tuple[object, float, float]", answer)
                if self._seen is not None:
                    self._seen(began - self.process.ahead, ended - self.process.ahead)
                    self._seen = None
        return self.member.result(self.endpoint, self.process, answer)

    def request_next(self, arrivals: "asyncio.Queue[tuple[SentCall, Reply]]") -> None:
        """Request a stream's next value, or `StreamEnd`, which is put into the queue when it arrives."""
        reply = self.process.channel.request("next", self.process.caller, self.number)
        reply.add_callback(partial(arrivals.put_nowait, (self, reply)))

    def cancel(self) -> None:
        """Cancel it on the rank once, unless it has ended. A second time would interrupt its clean-up.

        On an actor whose ranks wait for each other it continues there.
        """
        if not self._ended and self.process.death is None:
            self._ended = True
            if not self.member.spawn.together:
                self.process.channel.notify("cancel", self.process.caller, self.number)
            if self._seen is not None:
                # As seen from here, because nobody waits for the rank. Later, so that a timeout still names it.
                asyncio.get_running_loop().call_soon(self._seen, self._began, clock())
                self._seen = None


def cancel(sent: Iterable[SentCall]) -> None:
    """Cancel the calls that have not ended."""
    for each in sent:
        each.cancel()


async def all_or_first(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Wait for all, or until the first failure, which is raised."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    for task in done:
        task.result()


def abandon(tasks: list[asyncio.Task[T]]) -> None:
    """Cancel tasks and forget them.

    A failure refers by its traceback to the caller's variables, and these must not refer back to it. Such a cycle would
    keep the call's arguments, and their values in the store, until Python collects cycles.
    """
    for task in tasks:
        task.cancel()
    tasks.clear()


async def cause_among(error: RankFailed, sent: Sequence[SentCall]) -> Exception:
    """Cancel the calls, and return the failure of one, or the death of another rank that caused it."""
    cancel(sent)
    ends = [asyncio.create_task(_ended(each)) for each in sent]
    try:
        return await first_cause(error, [each.member for each in sent], ends)
    finally:
        abandon(ends)


async def first_cause(
    error: RankFailed, members: Sequence[RankMember], others: Iterable[asyncio.Task[None]]
) -> Exception:
    """Return the failure, or the death of another of these ranks if it is reported while the `others` end.

    A rank whose peer dies in a collective often fails before the death is known.
    """
    waiting, now = {other for other in others if not other.done()}, asyncio.get_running_loop().time
    until = now() + (_FAR_NEWS if any(map(_is_far, members)) else _NEWS)
    while not (dead := next((each for each in members if each.process.death), None)):
        if not waiting or now() >= until:
            return error
        _, waiting = await asyncio.wait(waiting, timeout=until - now(), return_when=asyncio.FIRST_COMPLETED)
    died = dead.death_error(error.endpoint, dead.process)
    if not isinstance(died, RankDied):
        return error
    died.__cause__ = error
    return died


def _is_far(member: RankMember) -> bool:
    """True if other ranks wait for this one, on another machine than this."""
    known = member.process.known
    return member.spawn.together and known is not None and known.boot != boot_id()


async def _ended(call: SentCall) -> None:
    """Wait until a call has ended, and record a death of its process."""
    with suppress(RankFailed, RankDied, MeshStopped):
        await call.reply.wait()
        call.result()


async def clock_ahead(ask: Callable[[], Awaitable[float]], times: int = 5) -> float:
    """Measure how many seconds another machine's clock is ahead of this one's, by the quickest of several answers.

    The error is at most half of that answer's time (Cristian 1989).
    """
    answers: list[tuple[float, float]] = []
    for _ in range(times):
        sent = clock()
        theirs = await ask()
        arrived = clock()
        answers.append((arrived - sent, theirs - (sent + arrived) / 2))
    return min(answers)[1]
