"""The messages between a caller and a rank's process, and the channel that carries them, whatever the transport."""

import asyncio
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias

from meshrl.mesh import Rank, Ref


class HealthPort(NamedTuple):
    """A port at which a host accepts connections while it is reachable."""

    ip: str
    port: int
    patience: float
    """Seconds without an answer after which a host is given up."""


class Place(NamedTuple):
    """The place of a rank's process."""

    pid: int
    host: str
    ip: str
    node: str
    """Identifies the machine within the engine."""
    port: int
    """A port that is reserved for a server of this process."""
    boot: str
    """Identifies the machine since its start. Processes with the same value have the same monotonic clock."""
    socket: tuple[str, bytes] | None = None
    """The path at which it also answers processes of its machine, and the secret that these have to show."""
    health_port: HealthPort | None = None
    """The port at which other machines see whether this one is reachable."""
    files: Sequence[str] = ()
    """Files of its machine that receive all its output."""


def boot_id() -> str:
    """Identify this machine since its start. If that is unknown, identify this process."""
    known = Path("/proc/sys/kernel/random/boot_id")
    return known.read_text("ascii").strip() if known.exists() else f"{socket.gethostname()} {os.getpid()}"


def reserved_port() -> socket.socket:
    """Return a socket that reserves a port: while it is open, the system gives the port to nobody who asks for any.

    A server that asks for this port by its number, and reuses addresses as torch's store does, may listen there. That
    is so on Linux.
    """
    reserving = socket.socket()
    reserving.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserving.bind(("", 0))
    return reserving


class Call(NamedTuple):
    """A call of an endpoint, or the opening of a stream, without its arguments."""

    endpoint: str
    actor: str
    """The key of the actor, among those in the process."""
    caller: str
    """Identifies the caller. Its calls start in the order of their numbers."""
    number: int
    stream: bool = False
    consumed: bool = True
    """For a stream, True if the caller reads this rank's values."""
    timed: bool = False
    """True if the answer includes its times: `(answer, began, ended)`."""


Arguments: TypeAlias = tuple[tuple[object, ...], Mapping[str, object]]
"""Positional and keyword arguments."""
NO_ARGUMENTS: Final[Arguments] = (), {}


class Construction(NamedTuple):
    """An actor to construct."""

    key: str
    attempt: int
    """How many times it was made here before. An attempt that was stopped before it arrived is not started."""
    rank: Rank
    environment: Mapping[str, str]
    recipe: Ref
    """The class, the arguments and the keywords. Unpickled after the environment is set, because it may load torch."""


@dataclass(frozen=True)
class Failure:
    """The answer after an exception on the rank."""

    reason: str
    traceback: str
    cause: bytes | None = None
    """The exception, if it can be pickled."""


class Stopped:
    """The answer of a rank whose actor is stopped."""


class StreamEnd:
    """The answer of a stream without more values."""


class ProcessExited(Exception):
    """Raised when the rank's process has exited. The message is the exit reason."""


class MessageLost(Exception):
    """Raised when a message could not be delivered: for example, its arguments could not be unpickled."""

    def __init__(self, reason: str, traceback: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.traceback = traceback


class Reply:
    """The answer of a process. Callbacks run as it arrives. Awaiting tasks continue one turn of the loop later."""

    __slots__ = ("_callbacks", "done", "error", "value")

    def __init__(self, error: Exception | None = None) -> None:
        """`error`: if there will be no answer."""
        self.done: bool = error is not None
        self.value: object = None
        self.error: Exception | None = error
        """`ProcessExited` or `MessageLost`, if there is no value."""
        self._callbacks: list[Callable[[], object]] = []

    def arrive(self, value: object, error: Exception | None = None) -> None:
        """Set the answer. A later one is ignored, such as one from a host that was given up."""
        if self.done:
            return
        self.done, self.value, self.error = True, value, error
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def add_callback(self, callback: Callable[[], object]) -> None:
        """Call `callback`, which must not raise, when the answer has arrived, or now."""
        if self.done:
            callback()
        else:
            self._callbacks.append(callback)

    async def wait(self) -> None:
        """Wait until the answer has arrived."""
        if not self.done:
            arrived = asyncio.Event()
            self._callbacks.append(arrived.set)
            await arrived.wait()

    def __await__(self) -> Generator[object, None, object]:
        yield from self.wait().__await__()
        if self.error is not None:
            raise self.error
        return self.value


Service: TypeAlias = Literal["place", "clock", "construct", "next", "cancel", "stop", "leave"]
"""The services of a process besides calls, which are methods of `Host`."""


class Channel(ABC):
    """Carries calls to one process, which orders them by their numbers.

    Awaiting a reply raises `ProcessExited`, or `MessageLost` if its message or its answer was lost.
    """

    @abstractmethod
    def prepare(self, arguments: Arguments | None) -> Callable[[Call], Reply]:
        """Pickle a call's arguments, and return what sends the call. TypeError or PicklingError if that fails."""

    @abstractmethod
    def request(self, service: Service, *arguments: object) -> Reply:
        """Send another request, and return its reply."""

    @abstractmethod
    def notify(self, service: Service, *arguments: object) -> None:
        """Send a request that needs no answer."""
