"""The messages between a caller and a rank's process, the channel that carries them, and how values are pickled.

Classes of scripts are pickled by value. Exceptions may not be picklable.
"""

import asyncio
import copyreg
import io
import pickle
import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Final, Literal, NamedTuple, TypeAlias

from meshrl.mesh import Rank, Ref
from meshrl.user_code import REDUCED, CodePickler, carry_scripts_with


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


@dataclass(eq=False, slots=True)
class Reply:
    """The answer of a process. Callbacks run as it arrives. Awaiting tasks continue one turn of the loop later."""

    done: bool = field(default=False, init=False)
    value: object = field(default=None, init=False)
    error: Exception | None = field(default=None, init=False)
    """`ProcessExited` or `MessageLost`, if there is no value."""
    _callbacks: list[Callable[[], object]] = field(default_factory=list[Callable[[], object]], init=False)

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


_EVERYWHERE: Final = frozenset({"meshrl", "numpy"})
"""Packages that every rank can import."""
_NAMED: Final = type, FunctionType
_reference_types: list[type] = [Ref]
"""Types that cannot travel in an exception, because their store could not count them."""


def register_pickler(register: Callable[[ModuleType], object], reference: type) -> None:
    """Register another library that pickles: how it carries a module by value, and the type of its references."""
    carry_scripts_with(register)
    if reference not in _reference_types:
        _reference_types.append(reference)


class Pickler(CodePickler):
    """A `CodePickler` with fewer checks for each object."""

    def reducer_override(self, obj: object) -> object:  # type: ignore[override]
        """Reduce an object. cloudpickle looks each class and function up in its module, and all types in tables."""
        if isinstance(obj, _NAMED):
            # Every rank finds it under its name. But a wrapper may have the name of what it wraps.
            module = sys.modules.get(obj.__module__)
            is_everywhere = module is not None and obj.__module__.partition(".")[0] in _EVERYWHERE
            is_named = is_everywhere and getattr(module, obj.__qualname__, None) is obj
            return NotImplemented if is_named else super().reducer_override(obj)
        if type(obj) in REDUCED or type(obj) in copyreg.dispatch_table:
            return super().reducer_override(obj)
        return obj.__reduce_ex__(5)


class _ExceptionPickler(Pickler):
    """Refuses references to a store: they would not be counted this way, nor freed."""

    def persistent_id(self, value: object) -> None:
        """Replace nothing."""
        if isinstance(value, tuple(_reference_types)):
            raise TypeError("a reference cannot travel in an exception")


def pickled_error(error: BaseException) -> bytes | None:
    """Return the exception as bytes. None if it cannot be pickled, or not be made again from that."""
    file = io.BytesIO()
    try:
        _ExceptionPickler(file).dump(error)
        return file.getvalue() if unpickled_error(file.getvalue()) else None
    except Exception:  # noqa: BLE001 -- pickling a user's exception may raise anything
        return None


def unpickled_error(cause: bytes | None) -> BaseException | None:
    """Return the exception. None if this process cannot make it."""
    if cause is None:
        return None
    try:
        error: object = pickle.loads(cause)  # noqa: S301 -- from our own ranks
    except Exception:  # noqa: BLE001 -- its module may exist on the rank only
        return None
    return error if isinstance(error, BaseException) else None
