"""The Ray actor that hosts a rank, and the channel to it: a socket on the same machine, else Ray."""

import asyncio
import fcntl
import os
import shutil
import socket
import struct
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from secrets import token_bytes
from typing import TYPE_CHECKING, Final, cast

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

from meshrl import log
from meshrl.engines.ray.cluster import Machine, this_machine
from meshrl.engines.ray.code import Method, settle_in
from meshrl.engines.ray.refs import (
    Forwarder,
    Handle,
    HostRef,
    PackedValue,
    RayRef,
    Route,
    local_forwarders,
    pack,
    unpack,
)
from meshrl.engines.ray.relay import RELAY, Key, LinkSlot, Relay
from meshrl.engines.remote import (
    NO_ARGUMENTS,
    TOKEN_BYTES,
    Address,
    Arguments,
    Call,
    Channel,
    Host,
    MessageLost,
    Place,
    ProcessExited,
    Reply,
    Server,
    Service,
    SocketChannel,
    listen,
    monitor_of,
    remove_folder,
    socket_folder,
    work_as,
)
from meshrl.mesh import NotHere, Share, boot_id, pool

if TYPE_CHECKING:
    from ray.actor import ActorHandle

_DEATHS = (RayActorError, NodeDiedError, OutOfMemoryError, WorkerCrashedError)
_SIOCGIFADDR: Final = 0x8915
_INTERFACE_NAME: Final = 15
"""Most characters of an interface's name."""


class RankProcess:
    """The process of one rank: a `Host`, whose calls are the tasks of a Ray actor."""

    def __init__(
        self,
        folder: str,
        paths: Sequence[str],
        inline_bytes: int,
        shares_memory: bool,
        share: Share,
        controller: Machine,
        environment: Mapping[str, str],
        packaged: Sequence[str],
    ) -> None:
        """`controller`: its place. `environment`: variables to set. `packaged`: folders of a `Package`.

        The others: see `work_as`, `Host` and `pool`.
        """
        os.environ.update(environment)
        settle_in(packaged, paths)
        work_as(folder, paths)
        os.environ["RAY_WARN_BLOCKING_GET_INSIDE_ASYNC"] = "0"  # only mapped values are fetched this way
        pool.join(share, hands_on=True)
        self._host = Host(HostRef.put, inline_bytes, shares_memory)
        self._relay = Relay(HostRef.put)
        self._socket: tuple[str, bytes] | None = None
        self._controller = controller

    async def call(self, call: Call, parcel: PackedValue | None = None) -> PackedValue | None:
        """Call an endpoint, or run a generator to its end."""
        given, lost = NO_ARGUMENTS, None
        if parcel is not None:
            try:
                given = cast("Arguments", unpack(parcel))
            except BaseException as error:  # noqa: BLE001 -- a value's code may raise anything; the caller gets it
                given, lost = cast("Arguments", None), error
        return pack(await self._host.call(call, given, lost))

    async def request(self, service: Service, arguments: PackedValue | None = None) -> PackedValue | None:
        """Answer a request of a `Channel`."""
        if service == "place":
            return pack(await self._place())
        return pack(await self._host.serve(service, cast("tuple[object, ...]", unpack(arguments) or ())))

    async def _place(self) -> Place:
        """Return the place of this process and a free port. From now on it ends if it loses its controller."""
        self._host.keep_loop()
        if self._socket is None:
            RayRef.here = await asyncio.to_thread(this_machine, self._controller.health_port.patience)
            local_forwarders.insert(0, Forwarder(cast("Handle", ray.get_runtime_context().current_actor), RayRef.here))
            if not self._controller.is_here:
                monitor_of(self._controller.health_port).watch(Reply(), self)
            path, token = socket_folder() / "rank", token_bytes(TOKEN_BYTES)
            Server(listen(path), token, self._host)
            self._socket = str(path), token
            self._host.leaving = partial(remove_folder, path.parent)
        ip = cast("str", ray.util.get_node_ip_address())
        # Else gloo listens on the address of the host's name, on Debian 127.0.1.1, which other hosts cannot reach.
        if interface := interface_of(ip):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        return self._host.place()._replace(
            ip=ip,
            node=ray.get_runtime_context().get_node_id(),
            socket=self._socket,
            health_port=RayRef.here and RayRef.here.health_port,
            files=_output_files(),
        )

    def lose(self, reason: str) -> None:
        """End this process at once. The unreachable controller gives this rank up, and no work may run twice."""
        log.warning(
            "a rank ends because its controller counts it as lost", controller=str(self._controller), reason=reason
        )
        self._host.leave()
        os._exit(1)

    @ray.method(concurrency_group=RELAY)
    async def host_copy(self, key: Key, route: Route) -> bytes:
        """See `Relay`."""
        return await self._relay.host_copy(key, route)

    @ray.method(concurrency_group=RELAY)
    async def hand_on(self, key: Key, route: Route, slot: LinkSlot) -> tuple[bytes, Sequence[int]] | None:
        """See `Relay`."""
        return await self._relay.hand_on(key, route, slot)

    @ray.method(concurrency_group=RELAY)
    async def answers(self) -> None:
        """Answer. This works while the process computes or waits."""


def _output_files() -> Sequence[str]:
    """Return the files to which Ray writes this process's output, if any."""
    from ray._private.worker import global_worker  # noqa: PLC0415 -- Ray has no public way to ask

    files: list[str] = [global_worker.get_out_file_path(), global_worker.get_err_file_path()]
    return [file for file in files if file]


def interface_of(ip: str) -> str | None:
    """Return the network interface with this IPv4 address. None if there is none, or the system does not say."""
    if not sys.platform.startswith("linux"):
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                request = struct.pack("256s", name.encode()[:_INTERFACE_NAME])
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
            except OSError:
                continue  # it has no address
            if socket.inet_ntoa(answer[20:24]) == ip:
                return name
    return None


def _method(handle: object, name: str) -> Method:
    return cast("Method", getattr(handle, name))


class RayChannel(Channel):
    """The channel to a `RankProcess`, an actor of Ray: through its socket on the same machine, else through Ray."""

    def __init__(self, handle: object, place: Place | None = None) -> None:
        self.handle = handle
        self._call, self._request = _method(handle, "call"), _method(handle, "request")  # each look-up makes a new one
        self._place = place
        self._forwarder: Forwarder | None = None
        self._near: SocketChannel | None = None
        self._open: set[Reply] = set()
        """Replies that Ray carries and that have not arrived."""
        self.farewell: Callable[[], Awaitable[None]] | None = None
        """Runs when the process is gone, before anybody learns it."""
        self._lost = ""
        """Why nothing is sent to it any more."""
        if place:
            self.found(place)

    def found(self, place: Place) -> None:
        """Set the place of the process. From now on it is reached the shortest way."""
        self._place = place
        if self._near is None and place.socket and place.boot == boot_id() and Path(place.socket[0]).exists():
            self._near = SocketChannel(Address(*place.socket))
        if self._forwarder is None and place.health_port:
            self._forwarder = Forwarder(cast("Handle", self.handle), Machine(place.host, place.boot, place.health_port))
            if self._forwarder.machine.is_here:
                local_forwarders.append(self._forwarder)

    @property
    def is_lost(self) -> bool:
        """True if it was given up."""
        return bool(self._lost)

    def lose(self, reason: str) -> None:
        """Give the process up, alive or not."""
        self._lost = reason
        self._leave_route()
        if self._near is not None:
            self._near.close(reason)
        for reply in list(self._open):
            reply.arrive(None, ProcessExited(reason))

    def kill(self) -> None:
        """End the process at once."""
        ray.kill(cast("ActorHandle[object]", self.handle), no_restart=True)

    def close(self) -> None:
        """Drop the process. A killed one has left its folder."""
        self._leave_route()
        if self._near is not None:
            self._near.close()
            shutil.rmtree(Path(self._near.address.path).parent, ignore_errors=True)

    def _leave_route(self) -> None:
        if self._forwarder and self._forwarder in local_forwarders:
            local_forwarders.remove(self._forwarder)

    def __reduce__(self) -> tuple[type["RayChannel"], tuple[object, Place | None]]:
        return RayChannel, (self.handle, self._place)

    def prepare(self, arguments: Arguments | None) -> Callable[[Call], Reply]:
        """Pickle a call's arguments, and return what sends the call."""
        if self._near is not None and not self._lost:
            with suppress(NotHere):  # Ray brings values from other machines to the rank, past this process
                return self._near.prepare(arguments)
        parcel = () if self._lost or arguments is None else (pack(arguments, self._forwarder),)
        return lambda call: self._sent(self._call, call, *parcel)

    def request(self, service: Service, *arguments: object) -> Reply:
        """Send another request, and return its reply."""
        if self._near is not None and not self._lost and service != "place":
            return self._near.request(service, *arguments)
        parcel = () if self._lost else (pack(arguments),)
        return self._sent(self._request, service, *parcel)

    def notify(self, service: Service, *arguments: object) -> None:
        """Send a request that needs no answer."""
        if self._lost:
            return
        if self._near is not None:
            self._near.notify(service, *arguments)
        else:
            _ = self._request.remote(service, pack(arguments))

    def _sent(self, method: Method, *arguments: object) -> Reply:
        """Let Ray send a call, and return its reply."""
        reply = Reply()
        if self._lost:
            reply.arrive(None, ProcessExited(self._lost))
            return reply
        sent = method.remote(*arguments)
        self._open.add(reply)
        reply.add_callback(partial(self._open.discard, reply))
        _arriving.add(task := asyncio.ensure_future(self._arrive(reply, sent)))
        task.add_done_callback(_arriving.discard)
        if self._place is not None and self._place.health_port is not None:
            monitor_of(self._place.health_port).watch(reply, self)
        return reply

    async def _arrive(self, reply: Reply, sent: Awaitable[object]) -> None:
        try:
            value, error = await _answer(sent), None
        except _OutcomeUnknown as failure:  # it would continue with a call whose answer is lost
            self.lose(str(failure))
            await asyncio.to_thread(self.kill)
            return
        except (ProcessExited, MessageLost) as failure:
            if isinstance(failure, ProcessExited) and self.farewell:
                await self.farewell()
            value, error = None, failure
        except BaseException as failure:  # noqa: BLE001 -- a value's code may raise anything; the waiter gets it
            value, error = None, MessageLost(f"{type(failure).__name__}: {failure}")
        reply.arrive(value, error)


class _OutcomeUnknown(Exception):
    """The connection broke before the answer came, so it is unknown whether the call ran."""


_arriving: set[asyncio.Task[None]] = set()


async def _answer(sent: Awaitable[object]) -> object:
    try:
        parcel = cast("PackedValue | None", await sent)
    except ActorUnavailableError as error:
        raise _OutcomeUnknown(
            "the connection to it broke, and with it went the answer: whether the call has run is not known, so the "
            f"process is ended (Ray: {_reason(error)})"
        ) from None
    except _DEATHS as error:
        raise ProcessExited(_reason(error)) from None
    except RayTaskError as error:
        raise MessageLost(f"{type(error.cause).__name__}: {error.cause}", str(error)) from None
    except RayError as error:
        raise MessageLost(f"{type(error).__name__}: {error}") from None
    try:
        return unpack(parcel)
    except Exception as error:  # a value's code may raise anything; the waiter gets it
        raise MessageLost(f"{type(error).__name__}: {error}") from error


def _reason(error: BaseException) -> str:
    """Return the line of Ray's report that says what happened."""
    lines = [line for line in str(error).splitlines() if line and not line.startswith("\t")]
    line = lines[-1] if lines else type(error).__name__
    detail = line.partition("Worker exit detail: ")[2].partition(" Some common causes")[0]
    if "SYSTEM_ERROR" in line and detail:
        return f"it was killed, ran out of memory or crashed (Ray: {detail})"
    return detail or line
