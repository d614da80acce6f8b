"""The Ray actor that hosts a rank."""

import asyncio
import os
from collections.abc import Sequence
from functools import partial
from secrets import token_bytes
from typing import cast

import ray

from meshrl import log
from meshrl.engines.hosting import NO_ARGUMENTS, Arguments, Construction, Host, Reply, vigil, work_as
from meshrl.engines.ray.channel import current_ask
from meshrl.engines.ray.code import settle_in
from meshrl.engines.ray.interface import interface_of
from meshrl.engines.ray.nodes import Home, home
from meshrl.engines.ray.parcel import Parcel, pack, unpack
from meshrl.engines.ray.refs import HostRef, RayRef
from meshrl.engines.ray.relay import RELAY, Key, Relay, Wire
from meshrl.engines.ray.route import Handle, Route, Stop, near
from meshrl.engines.transport import TOKEN_BYTES, Server, listen, remove_folder, socket_folder
from meshrl.mesh import Share, pool


class RankProcess:
    """The process of one rank: a `Host`, whose calls are the tasks of a Ray actor."""

    def __init__(
        self,
        folder: str,
        paths: Sequence[str],
        inline_bytes: int,
        shares_memory: bool,
        share: Share,
        controller: Home,
        carried: Sequence[str],
    ) -> None:
        """`controller`: its place. `carried`: folders of a `Package`. The others: see `work_as`, `Host` and `pool`."""
        settle_in(carried, paths)
        work_as(folder, paths)
        os.environ["RAY_WARN_BLOCKING_GET_INSIDE_ASYNC"] = "0"  # only mapped values are fetched this way
        pool.join(share, hands_on=True)
        self._host = Host(HostRef.put, inline_bytes, shares_memory)
        self._relay = Relay(HostRef.put)
        self._socket: tuple[str, bytes] | None = None
        self._controller = controller

    async def place(self) -> Parcel | None:
        """Return the place of this process and a free port. From now on it ends if it loses its controller."""
        self._host.keep_loop()
        if self._socket is None:
            RayRef.here = await asyncio.to_thread(home, self._controller.door.patience)
            near.insert(0, Stop(cast("Handle", ray.get_runtime_context().current_actor), RayRef.here))
            if not self._controller.is_here:
                vigil(self._controller.door).attend(Reply(), self)
            path, token = socket_folder() / "rank", token_bytes(TOKEN_BYTES)
            Server(listen(path), token, self._host)
            self._socket = str(path), token
            self._host.leaving = partial(remove_folder, path.parent)
        ip = cast("str", ray.util.get_node_ip_address())
        # Else gloo listens on the address of the host's name, on Debian 127.0.1.1, which other hosts cannot reach.
        if interface := interface_of(ip):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        node = ray.get_runtime_context().get_node_id()
        door = RayRef.here and RayRef.here.door
        place = await self._host.place()
        return pack(place._replace(ip=ip, node=node, socket=self._socket, door=door, files=_written_to()))

    def lose(self, reason: str) -> None:
        """End this process at once. The unreachable controller gives this rank up, and no work may run twice."""
        log.warning(
            "a rank ends because its controller counts it as lost", controller=str(self._controller), reason=reason
        )
        self._host.leave()
        os._exit(1)

    async def clock(self) -> Parcel | None:
        """Return the seconds of this machine's clock."""
        return pack(await self._host.clock())

    async def construct(self, wanted: Parcel) -> Parcel | None:
        """Construct an actor."""
        return pack(await self._host.construct(cast("Construction", unpack(wanted))))

    async def call(self, given: Parcel | None = None) -> Parcel | None:
        """Call the endpoint in the task's name."""
        ask = current_ask(self._host.whole)
        return pack(await self._host.call(ask, _arguments(given)))

    async def stream(self, given: Parcel | None = None) -> Parcel | None:
        """Run the generator in the task's name to its end. `next` returns its values."""
        ask = current_ask(self._host.whole)
        return pack(await self._host.stream(ask, _arguments(given)))

    async def next(self, line: Parcel, number: Parcel) -> Parcel | None:
        """Return the next value of a stream."""
        return pack(await self._host.next(cast("str", unpack(line)), cast("int", unpack(number))))

    async def cancel(self, line: Parcel, number: Parcel) -> None:
        """Cancel a call or close a stream, even before it arrives."""
        self._host.cancel(cast("str", unpack(line)), cast("int", unpack(number)))

    async def stop(self, key: Parcel, attempt: Parcel) -> None:
        """Cancel an actor's calls, wait for their end, and drop the actor."""
        await self._host.stop(cast("str", unpack(key)), cast("int", unpack(attempt)))

    @ray.method(concurrency_group=RELAY)
    async def host_copy(self, key: Key, route: Route) -> bytes:
        """See `Relay`."""
        return await self._relay.host_copy(key, route)

    @ray.method(concurrency_group=RELAY)
    async def hand_on(self, key: Key, route: Route, wire: Wire) -> tuple[bytes, Sequence[int]] | None:
        """See `Relay`."""
        return await self._relay.hand_on(key, route, wire)

    @ray.method(concurrency_group=RELAY)
    async def answers(self) -> None:
        """Answer. This works while the process computes or waits."""

    async def leave(self) -> None:
        """Give back memory that would outlive this process. The mesh ends, and this process is killed next."""
        self._host.leave()


def _written_to() -> Sequence[str]:
    """Return the files to which Ray writes this process's output, if any."""
    from ray._private.worker import global_worker  # noqa: PLC0415 -- Ray has no public way to ask

    files: list[str] = [global_worker.get_out_file_path(), global_worker.get_err_file_path()]
    return [file for file in files if file]


def _arguments(given: Parcel | None) -> Arguments:
    return NO_ARGUMENTS if given is None else cast("Arguments", unpack(given))
