"""A rank's process, and an actor's ranks in such processes, from the caller's side."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pickle import PicklingError
from secrets import token_hex
from typing import TYPE_CHECKING, TypeVar, cast
from weakref import WeakSet, WeakValueDictionary

from meshrl.engines.hosting.channel import Broken, Channel, Gone, Reply
from meshrl.engines.hosting.death import Death
from meshrl.engines.hosting.messages import Ask, Construction, Failure, Place, Stopped
from meshrl.engines.hosting.pickling import carry_modules, unpacked
from meshrl.errors import ContractError, MeshStopped, RankDied, RankFailed
from meshrl.events import clock
from meshrl.mesh import Rank, Ref, Request

if TYPE_CHECKING:
    from meshrl.engines.hosting.rank_log import RankLog

T = TypeVar("T")


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
        self.line: str = token_hex(8)
        """Identifies the calls that are sent through this object, which are numbered."""
        self.sent = 0
        _processes[key] = self

    @property
    def is_there(self) -> bool:
        """True if it has started and lives."""
        return self.death is None and self.known is not None

    def __reduce__(self) -> tuple[Callable[..., "Process"], tuple[object, ...]]:
        return _process, (self.key, self.channel, self.known)

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


def _process(key: str, channel: Channel, place: Place | None) -> Process:
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
        self.stopped: bool = False
        self.is_made: bool = False

    def __reduce__(self) -> tuple[type["RankMember"], tuple[object, ...]]:
        return RankMember, (self.spawn, self.index, self.attempt)

    @property
    def rank(self) -> Rank:
        """Its place on the mesh."""
        return self.spawn.ranks[self.index]

    @property
    def place(self) -> str:
        """Its process and host, as far as they are known."""
        known = self.process.known
        return f"process {known.pid} on {known.host}" if known else "a process that is being made"

    @property
    def process(self) -> Process:
        """The process that it runs in."""
        return self.spawn.processes[self.index]

    def check(self, endpoint: str) -> None:
        """Raise `MeshStopped` or `RankDied` if it takes no calls."""
        if self.stopped:
            raise self.refusal(endpoint)
        dead = self.spawn.dead if self.spawn.together else self.process if self.process.death else None
        if dead is not None:
            raise self.obituary(endpoint, dead)

    def refusal(self, endpoint: str) -> MeshStopped:
        """Return the error of a stopped actor."""
        return MeshStopped(
            f"{self.spawn.name}.{endpoint} was called on rank {self.rank.index}, but the actor is stopped"
        )

    def obituary(self, endpoint: str, process: Process) -> MeshStopped | RankDied:
        """Return the error for a process that is gone: the mesh was stopped, or the rank died."""
        if self.stopped or process.death is None:
            return self.refusal(endpoint)
        found = self.spawn.processes.index(process) if process in self.spawn.processes else self.index
        rank, death = self.spawn.ranks[found], process.death
        where = self.spawn.name, rank.index, rank.axes, endpoint
        return RankDied(*where, death.pid, death.host, death.reason, death.written)

    def failed(self, endpoint: str, failure: Failure) -> RankFailed:
        """Return the error for an exception on the rank."""
        rank = self.rank
        error = RankFailed(self.spawn.name, rank.index, rank.axes, endpoint, failure.reason, failure.traceback)
        error.__cause__ = unpacked(failure.cause)
        return error

    def delivered(self, process: Process, endpoint: str, reply: Reply) -> object:
        """Return the reply's value. `RankDied` or `MeshStopped` if the process is gone, `RankFailed` if it got lost."""
        if isinstance(reply.error, Gone):
            process.died(str(reply.error))
            raise self.obituary(endpoint, process)
        if isinstance(reply.error, Broken):  # not raised by the actor: perhaps an argument could not be unpickled
            raise self.failed(endpoint, Failure(reply.error.reason, reply.error.traceback))
        return reply.value

    def opened(self, endpoint: str, value: object) -> object:
        """Return the result. Raises `RankFailed` or `MeshStopped` if the answer says so."""
        if isinstance(value, Failure):
            raise self.failed(endpoint, value)
        if isinstance(value, Stopped):
            raise self.refusal(endpoint)
        return value

    def again(self, process: Process) -> None:
        """Prepare to construct the actor again, in this process."""
        self.attempt += 1
        self.stopped = False
        self.spawn.move(self.index, process)

    async def construct(self, environment: Mapping[str, str], recipe: Ref) -> None:
        """Construct the actor in its process."""
        wanted = Construction(self.spawn.key, self.attempt, self.rank, environment, recipe)
        process = self.process
        reply = process.channel.request("construct", wanted)
        await reply.here()
        self.opened("__init__", self.delivered(process, "__init__", reply))
        self.is_made = True

    async def stop(self) -> None:
        """Cancel the actor's calls, wait for their end, and drop the actor."""
        self.stopped = True
        process = self.process
        if process.is_there:
            try:
                await process.channel.request("stop", self.spawn.key, self.attempt)
            except Gone as gone:
                process.died(str(gone))


class Sent:
    """A sent call, or stream, on one member."""

    def __init__(
        self,
        request: Request,
        endpoint: str,
        *,
        stream: bool = False,
        consumed: bool = False,
        seen: Callable[[float, float], None] | None = None,
    ) -> None:
        """`seen`: called with its start and end on the rank, on the clock of this process."""
        self._seen = seen
        self._timed = seen is not None
        self._began = clock() if seen else 0.0
        self.member: RankMember = cast("RankMember", request.member)
        self.endpoint = endpoint
        self.consumed = consumed
        self.process: Process = self.member.process
        self.number: int = self.process.sent
        self.ended: bool = False
        ask = Ask(endpoint, self.member.spawn.key, self.process.line, self.number, consumed, self._timed)
        channel = self._channel = self.process.channel
        given = (request.arguments, dict(request.keywords)) if request.arguments or request.keywords else None
        send = partial(channel.call, ask, given, stream=stream)
        self.reply: Reply = sendable(f"{self.member.spawn.name}.{endpoint}", send) if given else send()
        self.process.sent += 1  # later calls wait only for sent ones

    @property
    def has_failed(self) -> bool:
        """True if the answer is not a result."""
        if self.reply.error is not None:
            return True
        value = self.reply.value
        return isinstance(cast("tuple[object, ...]", value)[0] if self._timed else value, Failure | Stopped)

    async def answer(self) -> object:
        """Return the result, or None at a stream's end. Raises `RankFailed`, `RankDied` or `MeshStopped`."""
        await self.reply.here()
        return self.result()

    def result(self) -> object:
        """Return the result, like `answer`, once it is here."""
        value = self.member.delivered(self.process, self.endpoint, self.reply)
        self.ended = True
        if self._timed:
            value, began, ended = cast("tuple[object, float, float]", value)
            self._note(began - self.process.ahead, ended - self.process.ahead)
        return self.member.opened(self.endpoint, value)

    async def next(self) -> object:
        """Return a stream's next value, or `Over`."""
        reply = self._channel.request("next", self.process.line, self.number)
        await reply.here()
        return self.member.delivered(self.process, self.endpoint, reply)

    def cancel(self) -> None:
        """Cancel it on the rank once, unless it has ended. A second time would interrupt its clean-up.

        On an actor whose ranks wait for each other it continues there.
        """
        if not self.ended and self.process.death is None:
            self.ended = True
            if not self.member.spawn.together:
                self._channel.tell("cancel", self.process.line, self.number)
            self._note(self._began, clock())  # as seen from here: nobody waits for the rank's answer

    def _note(self, began: float, ended: float) -> None:
        if self._seen is not None:
            self._seen(began, ended)
            self._seen = None


async def clock_ahead(ask: Callable[[], Awaitable[float]], times: int = 5) -> float:
    """Measure how many seconds another machine's clock is ahead of this one's, by the quickest of several answers.

    The error is at most half of that answer's time (Cristian 1989).
    """
    found: list[tuple[float, float]] = []
    for _ in range(times):
        sent = clock()
        theirs = await ask()
        came = clock()
        found.append((came - sent, theirs - (sent + came) / 2))
    return min(found)[1]


def sendable(where: str, send: Callable[[], T]) -> T:
    """Run `send`, which pickles a call's arguments. ContractError for values that cannot be pickled, such as a lock."""
    carry_modules()
    try:
        return send()
    except (TypeError, PicklingError) as error:
        raise ContractError(
            f"{where}: an argument cannot be sent to a rank: {error.__cause__ or error}; make it on the rank, in the "
            "actor's constructor"
        ) from error
