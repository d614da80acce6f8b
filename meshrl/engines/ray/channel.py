"""The channel to a Ray process: a socket on the same machine, else Ray."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import ray
from ray.exceptions import (
    ActorUnavailableError,
    NodeDiedError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)

from meshrl.engines.hosting import CYCLE, Arguments, Ask, Broken, Channel, Gone, Place, Reply, Service, boot, vigil
from meshrl.engines.ray.nodes import Home
from meshrl.engines.ray.parcel import Parcel, pack, unpack
from meshrl.engines.ray.route import Handle, Stop, near
from meshrl.engines.transport import Address, SocketChannel
from meshrl.mesh import NotHere

if TYPE_CHECKING:
    from ray.actor import ActorHandle

_DEATHS = (RayActorError, NodeDiedError, OutOfMemoryError, WorkerCrashedError)


class Signal(Protocol):
    """A method of a Ray actor, called without waiting for the answer."""

    def remote(self, *arguments: object) -> object:
        """Send a call."""
        ...


class Method(Protocol):
    """A method of a Ray actor."""

    def remote(self, *arguments: object) -> Awaitable[object]:
        """Send a call. Await the result for the answer."""
        ...

    def options(self, *, name: str) -> "Method":
        """Return the same method, called under this name."""
        ...


class RayChannel(Channel):
    """The channel to a `RankProcess`, an actor of Ray: through its socket on the same machine, else through Ray."""

    def __init__(self, handle: object, place: Place | None = None) -> None:
        self.handle = handle
        self._call, self._stream = _method(handle, "call"), _method(handle, "stream")  # each look-up makes a new one
        self._place = place
        self._stop: Stop | None = None
        self._near: SocketChannel | None = None
        self._open: set[Reply] = set()
        """Replies that Ray carries and that have not arrived."""
        self._cancelled = False
        """True if a call was cancelled, so the process may have seen later numbers."""
        self.farewell: Callable[[], Awaitable[None]] | None = None
        """Runs when the process is gone, before anybody learns it."""
        self._lost = ""
        """Why nothing is sent to it any more."""
        if place:
            self.found(place)

    def found(self, place: Place) -> None:
        """Set the place of the process. From now on it is reached the shortest way."""
        self._place = place
        if self._near is None and place.socket and place.boot == boot() and Path(place.socket[0]).exists():
            self._near = SocketChannel(Address(*place.socket))
        if self._stop is None and place.door:
            self._stop = Stop(cast("Handle", self.handle), Home(place.host, place.boot, place.door))
            if self._stop.home.is_here:
                near.append(self._stop)

    @property
    def is_lost(self) -> bool:
        """True if it was given up."""
        return bool(self._lost)

    def lose(self, reason: str) -> None:
        """Give the process up, alive or not."""
        self._lost = reason
        self._give_up()
        if self._near is not None:
            self._near.close(reason)
        for reply in list(self._open):
            reply.arrive(None, Gone(reason))

    def kill(self) -> None:
        """End the process at once."""
        ray.kill(cast("ActorHandle[object]", self.handle), no_restart=True)

    def close(self) -> None:
        """Drop the process. A killed one has left its folder."""
        self._give_up()
        if self._near is not None:
            self._near.close()
            shutil.rmtree(Path(self._near.address.path).parent, ignore_errors=True)

    def _give_up(self) -> None:
        if self._stop and self._stop in near:
            near.remove(self._stop)

    def __reduce__(self) -> tuple[type["RayChannel"], tuple[object, Place | None]]:
        return RayChannel, (self.handle, self._place)

    def call(self, ask: Ask, given: Arguments | None, *, stream: bool) -> Reply:
        """Send a call, or open a stream."""
        if self._lost:
            return self._refused()
        if self._near is not None:
            with suppress(NotHere):  # Ray brings values from other machines to the rank, past this process
                return self._near.call(ask, given, stream=stream)
        far = self._near is not None or self._cancelled or len(self._open) >= CYCLE // 2
        name = label(ask, whole=far)
        method = (self._stream if stream else self._call).options(name=name)
        return self._reply(method.remote(pack(given, self._stop)) if given else method.remote())

    def request(self, service: Service, *arguments: object) -> Reply:
        """Ask for something else."""
        if self._lost:
            return self._refused()
        if self._near is not None and service != "place":
            return self._near.request(service, *arguments)
        return self._reply(_method(self.handle, service).remote(*map(pack, arguments)))

    def tell(self, service: Service, *arguments: object) -> None:
        """Send a request that needs no answer."""
        if self._lost:
            return
        if self._near is not None:
            self._near.tell(service, *arguments)
            return
        self._cancelled |= service == "cancel"
        cast("Signal", getattr(self.handle, service)).remote(*map(pack, arguments))

    def _refused(self) -> Reply:
        reply = Reply()
        reply.arrive(None, Gone(self._lost))
        return reply

    def _reply(self, sent: Awaitable[object]) -> Reply:
        reply = Reply()
        self._open.add(reply)
        reply.tell(partial(self._open.discard, reply))
        _arriving.add(task := asyncio.ensure_future(self._arrive(reply, sent)))
        task.add_done_callback(_arriving.discard)
        if self._place is not None and self._place.door is not None:
            vigil(self._place.door).attend(reply, self)
        return reply

    async def _arrive(self, reply: Reply, sent: Awaitable[object]) -> None:
        try:
            value, error = await _answer(sent), None
        except _Unknown as failure:  # it would continue with a call whose answer is lost
            self.lose(str(failure))
            await asyncio.to_thread(self.kill)
            return
        except (Gone, Broken) as failure:
            if isinstance(failure, Gone) and self.farewell:
                await self.farewell()
            value, error = None, failure
        except BaseException as failure:  # noqa: BLE001 -- a value's code may raise anything; the waiter gets it
            value, error = None, Broken(f"{type(failure).__name__}: {failure}")
        reply.arrive(value, error)


class _Unknown(Exception):
    """The connection broke before the answer came, so it is unknown whether the call ran."""


def _method(handle: object, name: str) -> Method:
    return cast("Method", getattr(handle, name))


_arriving: set[asyncio.Task[None]] = set()


async def _answer(sent: Awaitable[object]) -> object:
    try:
        parcel = cast("Parcel | None", await sent)
    except ActorUnavailableError as error:
        raise _Unknown(
            "the connection to it broke, and with it went the answer: whether the call has run is not known, so the "
            f"process is ended (Ray: {_reason(error)})"
        ) from None
    except _DEATHS as error:
        raise Gone(_reason(error)) from None
    except RayTaskError as error:
        raise Broken(f"{type(error.cause).__name__}: {error.cause}", str(error)) from None
    except RayError as error:
        raise Broken(f"{type(error).__name__}: {error}") from None
    try:
        return unpack(parcel)
    except Exception as error:  # a value's code may raise anything; the waiter gets it
        raise Broken(f"{type(error).__name__}: {error}") from error


def _reason(error: BaseException) -> str:
    """Return the line of Ray's report that says what happened."""
    lines = [line for line in str(error).splitlines() if line and not line.startswith("\t")]
    line = lines[-1] if lines else type(error).__name__
    detail = line.partition("Worker exit detail: ")[2].partition(" Some common causes")[0]
    if "SYSTEM_ERROR" in line and detail:
        return f"it was killed, ran out of memory or crashed (Ray: {detail})"
    return detail or line


def label(ask: Ask, *, whole: bool) -> str:
    """Encode a call as the name of Ray's task. `whole`: its number may be too far from those that the rank has seen.

    As an argument it would make an empty call a fifth slower. Ray keeps some kilobytes for each name, on both sides, so
    names repeat: a number is sent modulo `CYCLE`, and the rank completes it.
    """
    number = f"={ask.number}" if whole else str(ask.number % CYCLE)
    return f"{ask.endpoint} {ask.key} {ask.line} {number} {ask.consumed:d} {ask.timed:d}"


def current_ask(whole: Callable[[str, int], int]) -> Ask:
    """Decode the call of the running task. `whole`: returns the number of a line's call from its remainder."""
    endpoint, key, line, number, consumed, timed = str(ray.get_runtime_context().get_task_name()).split()
    told = int(number[1:]) if number.startswith("=") else whole(line, int(number))
    return Ask(endpoint, key, line, told, consumed == "1", timed == "1")
