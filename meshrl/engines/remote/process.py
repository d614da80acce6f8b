"""A rank's process and its log file, and an actor's ranks in such processes, from the caller's side."""

import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Final
from weakref import WeakSet, WeakValueDictionary, finalize

from meshrl.engines.ranks import actor_stopped
from meshrl.engines.remote.messages import (
    Channel,
    Construction,
    Failure,
    MessageLost,
    Place,
    ProcessExited,
    Reply,
    Stopped,
)
from meshrl.engines.remote.pickling import unpickled_error
from meshrl.errors import MeshStopped, RankDied, RankFailed
from meshrl.events import clock
from meshrl.mesh import Rank, Ref

ROOM: Final = 16 * 2**20
"""Size in bytes at which a new log file begins. The previous one stays as MESH-RANK.log.1."""
_QUOTED_LINES: Final = 30
_LINE_LENGTH: Final = 400
"""Characters of a line when the last lines are quoted."""
_TAIL: Final = _QUOTED_LINES * _LINE_LENGTH
_MARK: Final = "--- process "


class LogFolder:
    """The log files of one mesh. The folder stays open, because a run may rename it and rotation must still find it."""

    def __init__(self, place: Path) -> None:
        """`place`: FOLDER/MESH. Creates a missing folder."""
        place.parent.mkdir(parents=True, exist_ok=True)
        self.descriptor: int = os.open(place.parent, os.O_RDONLY | os.O_DIRECTORY)
        self._mesh = place.name
        finalize(self, os.close, self.descriptor)

    def of(self, rank: int) -> "RankLog":
        """Return the log of a rank."""
        return RankLog(self.descriptor, f"{self._mesh}-{rank}.log", keeps=self)


class RankLog:
    """The log file of a rank, RUN/logs/MESH-RANK.log, which includes output of native libraries.

    Text that the disk does not take is lost: a log never ends a run.
    """

    def __init__(self, folder: int, name: str, keeps: object = None) -> None:
        """`folder`: its descriptor. `keeps`: an object that must stay open as long."""
        self.folder = folder
        self._keeps = keeps
        self.name = name
        self.catch_up: Callable[[], None] = lambda: None
        """Called before the last lines are read, to fetch output that is still on its way."""

    def begin(self, pid: int, host: str) -> None:
        """Mark that another process writes from here on."""
        self.append(f"{_MARK}{pid} on {host}, {time.strftime('%d %b %H:%M:%S')} ---\n".encode())

    def append(self, text: bytes) -> None:
        """Append text. A full file replaces the previous one."""
        with suppress(OSError):
            file = self._open(os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            try:
                if os.fstat(file).st_size + len(text) > ROOM:
                    os.rename(self.name, f"{self.name}.1", src_dir_fd=self.folder, dst_dir_fd=self.folder)
                    os.close(file)
                    file = self._open(os.O_WRONLY | os.O_APPEND | os.O_CREAT)
                while text:
                    text = text[os.write(file, text) :]
            finally:
                os.close(file)

    def last(self) -> str:
        """Return the last lines of the present process, with the file's name. Empty if it wrote nothing."""
        self.catch_up()
        lines = self._tail().decode(errors="replace").splitlines()
        began = max((at for at, line in enumerate(lines) if line.startswith(_MARK)), default=-1)
        quoted = [line[:_LINE_LENGTH] for line in lines[began + 1 :][-_QUOTED_LINES:]]
        return "\n".join([f"--- the end of logs/{self.name} ---", *quoted]) if quoted else ""

    def _tail(self) -> bytes:
        with suppress(OSError):
            file = self._open(os.O_RDONLY)
            try:
                return os.pread(file, _TAIL, max(0, os.fstat(file).st_size - _TAIL))
            finally:
                os.close(file)
        return b""

    def _open(self, flags: int) -> int:
        return os.open(self.name, flags, 0o644, dir_fd=self.folder)


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
        self.stopped: bool = False
        self.has_started: bool = False

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
            raise self.stopped_error(endpoint)
        dead = self.spawn.dead if self.spawn.together else self.process if self.process.death else None
        if dead is not None:
            raise self.death_error(endpoint, dead)

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

    def failure_error(self, endpoint: str, failure: Failure) -> RankFailed:
        """Return the error for an exception on the rank."""
        rank = self.rank
        error = RankFailed(self.spawn.name, rank.index, rank.axes, endpoint, failure.reason, failure.traceback)
        error.__cause__ = unpickled_error(failure.cause)
        return error

    def answer(self, process: Process, endpoint: str, reply: Reply) -> object:
        """Return the reply's value. `RankDied` or `MeshStopped` if the process is gone, `RankFailed` if it got lost."""
        if isinstance(reply.error, ProcessExited):
            process.died(str(reply.error))
            raise self.death_error(endpoint, process)
        if isinstance(reply.error, MessageLost):  # not raised by the actor: perhaps its answer could not be unpickled
            raise self.failure_error(endpoint, Failure(reply.error.reason, reply.error.traceback))
        return reply.value

    def result(self, endpoint: str, answer: object) -> object:
        """Return the result. Raises `RankFailed` or `MeshStopped` if the answer says so."""
        if isinstance(answer, Failure):
            raise self.failure_error(endpoint, answer)
        if isinstance(answer, Stopped):
            raise self.stopped_error(endpoint)
        return answer

    def move(self, process: Process) -> None:
        """Prepare to construct the actor again, in this process."""
        self.attempt += 1
        self.stopped = False
        self.spawn.move(self.index, process)

    async def construct(self, environment: Mapping[str, str], recipe: Ref) -> None:
        """Construct the actor in its process."""
        construction = Construction(self.spawn.key, self.attempt, self.rank, environment, recipe)
        process = self.process
        reply = process.channel.request("construct", construction)
        await reply.wait()
        self.result("__init__", self.answer(process, "__init__", reply))
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
