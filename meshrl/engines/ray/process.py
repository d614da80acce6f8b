"""A rank's process, and an actor's ranks in such processes, as a caller sees them."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pickle import PicklingError
from secrets import token_hex
from typing import Protocol, TypeVar, cast
from weakref import WeakSet, WeakValueDictionary

from ray.exceptions import NodeDiedError, OutOfMemoryError, RayActorError, RayError, RayTaskError, WorkerCrashedError

from meshrl.engines.ray.pickling import carry_modules, unpacked
from meshrl.engines.ray.wire import CYCLE, Ask, Construction, Failure, Place, RayRef, Stopped
from meshrl.errors import ContractError, MeshStopped, RankDied, RankFailed
from meshrl.events import clock
from meshrl.mesh import Rank, Request

T = TypeVar("T")

_DEATHS = (RayActorError, NodeDiedError, OutOfMemoryError, WorkerCrashedError)


class Method(Protocol):
    """A method of a Ray actor."""

    def remote(self, *arguments: object) -> Awaitable[object]:
        """Send a call; what is awaited is the answer."""
        ...

    def options(self, *, name: str) -> "Method":
        """The same method, called under this name."""
        ...


class Signal(Protocol):
    """A method of a Ray actor of which nobody awaits the answer."""

    def remote(self, *arguments: object) -> object:
        """Send a call."""
        ...


class RankHandle(Protocol):
    """Ray's handle of a `RankProcess`."""

    place: Method
    clock: Method
    construct: Method
    call: Method
    stream: Method
    next: Method
    cancel: Signal
    stop: Method
    leave: Method


@dataclass(frozen=True)
class Death:
    """How a process ended."""

    pid: int
    host: str
    reason: str


class Process:
    """One process of a rank. There is one such object for it in each process that calls it."""

    def __init__(self, key: str, handle: RankHandle, place: Place | None = None) -> None:
        self.key = key
        self.handle = handle
        self.known = place
        self.ahead = 0.0
        """Seconds by which its clock is ahead of this process's."""
        self.death: Death | None = None
        self.spawns: WeakSet[Spawn] = WeakSet()
        self.line = token_hex(8)
        """Names the calls that are sent with this object; they are numbered."""
        self.sent = 0
        self.open = 0
        """How many of them have no answer."""
        self.cancelled = False
        """Whether one was cancelled, so that the rank may have seen calls of later numbers."""
        self.call, self.stream, self.next = handle.call, handle.stream, handle.next  # each look-up makes a new one
        _processes[key] = self

    def __reduce__(self) -> tuple[Callable[..., "Process"], tuple[object, ...]]:
        return _process, (self.key, self.handle, self.known)

    def died(self, error: BaseException) -> Death:
        """Remember that the process is gone, for all actors in it."""
        return self.killed(_reason(error))

    def killed(self, reason: str) -> Death:
        """The same, where the reason is known."""
        if self.death is None:
            place = self.known
            self.death = Death(place.pid if place else 0, place.host if place else "an unknown host", reason)
            for spawn in self.spawns:
                spawn.dead = spawn.dead or self
        return self.death


_processes: WeakValueDictionary[str, Process] = WeakValueDictionary()


def _process(key: str, handle: RankHandle, place: Place | None) -> Process:
    return _processes.get(key) or Process(key, handle, place)


class Spawn:
    """An actor on all ranks of a mesh."""

    def __init__(
        self, key: str, name: str, ranks: Sequence[Rank], processes: Sequence[Process], *, together: bool
    ) -> None:
        """`together`: its ranks wait for each other, so that no call is cancelled on one of them."""
        self.key = key
        self.name = name
        self.ranks = ranks
        self.together = together
        self.processes = list(processes)
        self.dead: Process | None = None
        """One that is gone; then no rank takes a call."""
        for process in self.processes:
            process.spawns.add(self)

    def __reduce__(self) -> tuple[Callable[..., "Spawn"], tuple[object, ...]]:
        return partial(Spawn, together=self.together), (self.key, self.name, self.ranks, self.processes)

    def move(self, index: int, process: Process) -> None:
        """The actor's rank is in another process from now on."""
        self.processes[index] = process
        process.spawns.add(self)
        self.dead = next((each for each in self.processes if each.death), None)


class RayMember:
    """One actor instance in its process."""

    def __init__(self, spawn: Spawn, index: int, attempt: int = 0) -> None:
        self.spawn = spawn
        self.index = index
        self.attempt = attempt
        self.stopped = False

    def __reduce__(self) -> tuple[type["RayMember"], tuple[object, ...]]:
        return RayMember, (self.spawn, self.index, self.attempt)

    @property
    def rank(self) -> Rank:
        """Its place on the mesh."""
        return self.spawn.ranks[self.index]

    @property
    def place(self) -> str:
        """Its process and host, where they are known by now."""
        known = self.process.known
        return f"process {known.pid} on {known.host}" if known else "a process that is being made"

    @property
    def process(self) -> Process:
        """Where it runs."""
        return self.spawn.processes[self.index]

    def check(self, endpoint: str) -> None:
        """Raise `MeshStopped` or `RankDied` where no call can be taken."""
        if self.stopped:
            raise self.refusal(endpoint)
        if self.spawn.dead is not None:
            raise self.obituary(endpoint, self.spawn.dead)

    def refusal(self, endpoint: str) -> MeshStopped:
        """What a stopped actor answers."""
        return MeshStopped(
            f"{self.spawn.name}.{endpoint} was called on rank {self.rank.index}, but the actor is stopped"
        )

    def obituary(self, endpoint: str, process: Process) -> MeshStopped | RankDied:
        """What is raised when a process of the mesh is gone: because the mesh was stopped, or else."""
        if self.stopped or process.death is None:
            return self.refusal(endpoint)
        found = self.spawn.processes.index(process) if process in self.spawn.processes else self.index
        rank, death = self.spawn.ranks[found], process.death
        return RankDied(self.spawn.name, rank.index, rank.axes, endpoint, death.pid, death.host, death.reason)

    def failed(self, endpoint: str, failure: Failure) -> RankFailed:
        """What is raised when the rank raised."""
        rank = self.rank
        error = RankFailed(self.spawn.name, rank.index, rank.axes, endpoint, failure.reason, failure.traceback)
        error.__cause__ = unpacked(failure.cause)
        return error

    async def reply(self, process: Process, endpoint: str, sent: Awaitable[object]) -> object:
        """What comes back. Raises `RankDied` (or `MeshStopped`) if the process is gone, `RankFailed` if Ray failed."""
        try:
            return await sent
        except _DEATHS as error:
            process.died(error)
            raise self.obituary(endpoint, process) from None
        except RayTaskError as error:  # not what the actor raised: an argument could not be unpickled, or the like
            reason = f"{type(error.cause).__name__}: {error.cause}"
            raise self.failed(endpoint, Failure(reason, str(error))) from None
        except RayError as error:
            raise self.failed(endpoint, Failure(f"{type(error).__name__}: {error}", "")) from None

    def opened(self, endpoint: str, reply: object) -> object:
        """The result in a reply. Raises `RankFailed` or `MeshStopped` if it says so."""
        if isinstance(reply, Failure):
            raise self.failed(endpoint, reply)
        if isinstance(reply, Stopped):
            raise self.refusal(endpoint)
        return reply

    def again(self, process: Process) -> None:
        """The actor is to be made again, in this process."""
        self.attempt += 1
        self.stopped = False
        self.spawn.move(self.index, process)

    async def construct(self, environment: Mapping[str, str], recipe: RayRef) -> None:
        """Make the actor in its process."""
        wanted = Construction(self.spawn.key, self.attempt, self.rank, environment, recipe)
        process = self.process
        reply = await self.reply(process, "__init__", process.handle.construct.remote(wanted))
        self.opened("__init__", reply)

    async def stop(self) -> None:
        """Cancel the actor's calls, wait for their end, and let it go."""
        self.stopped = True
        process = self.process
        if process.death is None:
            try:
                await process.handle.stop.remote(self.spawn.key, self.attempt)
            except _DEATHS as error:
                process.died(error)


class Sent:
    """One endpoint call, or stream, on one member."""

    def __init__(
        self,
        request: Request,
        endpoint: str,
        *,
        stream: bool = False,
        consumed: bool = False,
        seen: Callable[[float, float], None] | None = None,
    ) -> None:
        """`seen`: told when it began and ended on the rank, on the clock of this process."""
        self._seen = seen
        self._timed = seen is not None
        self._began = clock() if seen else 0.0
        self.member = cast("RayMember", request.member)
        self.member.check(endpoint)
        self.endpoint = endpoint
        self.consumed = consumed
        self.process = self.member.process
        self.number = self.process.sent
        self.ended = False
        ask = Ask(endpoint, self.member.spawn.key, self.process.line, self.number, consumed, self._timed)
        whole = self.process.cancelled or self.process.open >= CYCLE // 2
        method = (self.process.stream if stream else self.process.call).options(name=ask.label(whole=whole))
        if request.arguments or request.keywords:
            arguments = request.arguments, dict(request.keywords)
            self._ref = sendable(f"{self.member.spawn.name}.{endpoint}", partial(method.remote, arguments))
        else:
            self._ref = method.remote()
        self.process.open += 1
        self.process.sent += 1  # only what was sent is waited for by what comes after it

    async def answer(self) -> object:
        """The result, of a stream None when it has ended. Raises `RankFailed`, `RankDied` or `MeshStopped`."""
        reply = await self.member.reply(self.process, self.endpoint, self._ref)
        self.process.open -= not self.ended
        self.ended = True
        if self._timed:
            reply, began, ended = cast("tuple[object, float, float]", reply)
            self._note(began - self.process.ahead, ended - self.process.ahead)
        return self.member.opened(self.endpoint, reply)

    async def next(self) -> object:
        """A stream's next value, or `Over`."""
        sent = self.process.next.remote(self.process.line, self.number)
        return await self.member.reply(self.process, self.endpoint, sent)

    def cancel(self) -> None:
        """Cancel it on the rank, once, unless it has ended: a second time would cut its clean-up short.

        On an actor whose ranks wait for each other it goes on there.
        """
        if not self.ended and self.process.death is None:
            self.ended = True
            self.process.open -= 1
            self.process.cancelled = True
            if not self.member.spawn.together:
                self.process.handle.cancel.remote(self.process.line, self.number)
            self._note(self._began, clock())  # as it was seen from here: nobody waits for the rank's answer

    def _note(self, began: float, ended: float) -> None:
        if self._seen is not None:
            self._seen(began, ended)
            self._seen = None


async def clock_ahead(ask: Callable[[], Awaitable[float]], times: int = 5) -> float:
    """Seconds by which another machine's clock is ahead of this one's: from the quickest of some answers.

    It errs by half of that answer's time at most (Cristian 1989).
    """
    found: list[tuple[float, float]] = []
    for _ in range(times):
        sent = clock()
        theirs = await ask()
        came = clock()
        found.append((came - sent, theirs - (sent + came) / 2))
    return min(found)[1]


def sendable(where: str, send: Callable[[], T]) -> T:
    """Do what pickles a call's arguments. Raises `ContractError` for what cannot be pickled, such as a lock."""
    carry_modules()
    try:
        return send()
    except (TypeError, PicklingError) as error:
        raise ContractError(
            f"{where}: an argument cannot be sent to a rank: {error.__cause__ or error}; make it on the rank, in the "
            "actor's constructor"
        ) from error


def _reason(error: BaseException) -> str:
    """The one line of Ray's account that says what happened."""
    lines = [line for line in str(error).splitlines() if line and not line.startswith("\t")]
    line = lines[-1] if lines else type(error).__name__
    detail = line.partition("Worker exit detail: ")[2].partition(" Some common causes")[0]
    if "SYSTEM_ERROR" in line and detail:
        return f"it was killed, ran out of memory or crashed (Ray: {detail})"
    return detail or line
