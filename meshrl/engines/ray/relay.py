"""Relay of large values to several machines: each machine forwards what it receives to the next.

A value leaves its machine once, and is everywhere soon after the time of one copy. On each machine, the first rank that
gets the value takes it into the shared memory, for all processes there.
"""

import asyncio
import pickle
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias, TypeVar, cast
from weakref import ref

from meshrl import log
from meshrl.engines.ray.cluster import Machine
from meshrl.engines.ray.refs import Handle, PackedValue, Route, ValueStream, available, pack, unless_silent, unpack
from meshrl.engines.remote import PoolRef
from meshrl.errors import DataError
from meshrl.mesh import Bytes, Segment, in_transit, pool

if TYPE_CHECKING:
    from ray import ObjectRef

    from meshrl.engines.ray.link import Link, Rendezvous


RELAY: Final = "relay"
"""The concurrency group of a `RankProcess` that forwards values. It has its own thread, so no call delays it."""
_GRACE: Final = 3.0
"""Seconds that a received value is kept for the next machine."""
_REMEMBERED: Final = 1000
"""Number of received values that are remembered."""
_IDLE: Final = 600.0
"""Seconds of silence after which a link is dropped. Its other end may be dead, which it does not notice."""
_ALIGNED: Final = 64

K = TypeVar("K")
Key: TypeAlias = "list[ObjectRef[object]]"
"""One reference, in a list. Ray would fetch a bare argument."""


class LinkSlot(NamedTuple):
    """The link that carries a value."""

    rendezvous: "Rendezvous"
    number: int
    """The number of the value on the link."""


class Relay:
    """The values that reach this machine through this rank, which sends them to the next one."""

    def __init__(self, put: Callable[[object], PoolRef]) -> None:
        """`put`: keeps a value in this machine's shared memory."""
        self._put = put
        self._flows: dict[bytes, asyncio.Task[_Arrival]] = {}
        """Values that arrive now or did so a moment ago."""
        self._copies: OrderedDict[bytes, ref[PoolRef]] = OrderedDict()
        """Values that have arrived, while a process here reads them."""
        self._into: dict[Handle, asyncio.Task[Link]] = {}
        """Links from the ranks of other machines, which bring values."""
        self._from: dict[str, asyncio.Task[Link]] = {}
        """The sending ends of such links, by name."""

    async def host_copy(self, key: Key, route: Route) -> bytes:
        """Return a value in this machine's shared memory, pickled for a process of this machine."""
        arrival = await self._arrival(key, route)
        await asyncio.shield(asyncio.wrap_future(arrival.flow.whole))
        if (copy := self._copy(key)) is None:
            copy = self._put(arrival.value())
            self._copies[key[0].binary()] = ref(copy)
            if len(self._copies) > _REMEMBERED:
                self._copies.popitem(last=False)
        asyncio.get_running_loop().call_later(_GRACE, id, copy)  # kept until the asking process has opened it
        with in_transit():
            return pickle.dumps(copy)

    async def hand_on(self, key: Key, route: Route, slot: LinkSlot) -> tuple[bytes, Sequence[int]] | None:
        """Start to send a value. Returns its pickle and the bytes of each buffer, or None if it is no longer here."""
        if not available():
            return None
        flow = await self._flow(key, route)
        if flow is None:
            return None
        link = await _linked(
            self._from, slot.rendezvous.name, partial(_link, route[-1].machine, slot.rendezvous), 2 * _IDLE
        )
        _in_thread(link.send, flow, slot.number)
        return flow.head, flow.sizes

    async def _flow(self, key: Key, route: Route) -> ValueStream | None:
        if route[0].machine.is_here:
            return _flowing(cast("PackedValue", await key[0]))
        if key[0].binary() in self._copies and key[0].binary() not in self._flows:
            copy = self._copy(key)
            return _flowing(cast("PackedValue", pack(copy.value()))) if copy else None
        return (await self._arrival(key, route)).flow

    def _copy(self, key: Key) -> PoolRef | None:
        known = self._copies.get(key[0].binary())
        return known() if known else None

    async def _arrival(self, key: Key, route: Route) -> "_Arrival":
        name = key[0].binary()
        if name not in self._flows:
            self._flows[name] = asyncio.create_task(self._begin(key, route))
            self._flows[name].add_done_callback(lambda begun: self._begun(name, begun))
        return await asyncio.shield(self._flows[name])

    def _begun(self, name: bytes, begun: "asyncio.Task[_Arrival]") -> None:
        """Forget a value some time after its arrival, or at once if it fails."""
        if begun.cancelled() or begun.exception():
            del self._flows[name]
            return
        loop = asyncio.get_running_loop()
        whole = begun.result().flow.whole

        def ended(_: object) -> None:
            loop.call_soon_threadsafe(loop.call_later, 0 if whole.exception() else _GRACE, self._flows.pop, name)

        whole.add_done_callback(ended)

    async def _begin(self, key: Key, route: Route) -> "_Arrival":
        """Ask the previous machine for a value. If it is no longer there, ask the machine that made it."""
        own = route[-1].machine
        if len(route) == 1:
            raise DataError("a value that was made on this machine is no longer here")
        for before in (route[:-1], route[:1]):
            forwarder = before[-1]
            link = await _linked(self._into, forwarder.handle, partial(_link, own), _IDLE)
            slot = LinkSlot(link.rendezvous, next(link.numbers))
            answer = await unless_silent(forwarder, forwarder.handle.hand_on.remote(key, before, slot))
            if answer is not None:
                arrival = _Arrival(*cast("tuple[bytes, Sequence[int]]", answer))
                _in_thread(link.receive, arrival.flow, slot.number)
                return arrival
        raise DataError(f"{forwarder.machine} cannot forward it by a collective: torch is not installed there")


class _Arrival:
    """A value that arrives in this machine's shared memory."""

    def __init__(self, head: bytes, sizes: Sequence[int]) -> None:
        *starts, end = accumulate((-(-size // _ALIGNED) * _ALIGNED for size in sizes), initial=0)
        writing = pool.write(end)
        if writing is None:
            raise DataError(f"{end} bytes do not fit into this machine's shared memory: {pool.state()}")
        self._spans = [(start, start + size) for start, size in zip(starts, sizes, strict=True)]
        self._segment: Segment = writing.done()
        self.flow: Final = ValueStream(head, [writing.memory[start:stop] for start, stop in self._spans], here=False)

    def value(self) -> object:
        """Return the value, once it is complete."""
        memory: Bytes = self._segment.memory
        return unpack(PackedValue(self.flow.head, [memory[start:stop] for start, stop in self._spans], []))


async def _linked(links: "dict[K, asyncio.Task[Link]]", key: K, make: "Callable[[], Link]", idle: float) -> "Link":
    """Return the link of this key, made once for concurrent callers, and made again after a failure.

    Links that were idle for `idle` seconds are dropped. The receiver drops first, because it sends the requests.
    """
    for known in [each for each, made in links.items() if made.done() and _is_over(made, idle)]:
        del links[known]
    if key not in links:
        links[key] = asyncio.ensure_future(asyncio.to_thread(make))
    return await asyncio.shield(links[key])


def _is_over(made: "asyncio.Task[Link]", idle: float) -> bool:
    if made.cancelled() or made.exception() is not None:
        return True
    return bool(made.result().failed) or time.monotonic() - made.result().used > idle


def _link(own: Machine, rendezvous: "Rendezvous | None" = None) -> "Link":
    from meshrl.engines.ray.link import Link  # noqa: PLC0415 -- it loads torch, which takes seconds

    return Link(own.health_port.ip, own.health_port.patience, rendezvous)


def _flowing(parcel: PackedValue) -> ValueStream:
    return ValueStream(parcel.head, parcel.buffers, here=True)


def _in_thread(carry: Callable[[ValueStream, int], None], flow: ValueStream, number: int) -> None:
    """Run in a new thread: it mostly waits, and others may wait for it."""

    def run() -> None:
        try:
            carry(flow, number)
        except Exception as error:  # noqa: BLE001 -- the waiter gets it, whatever it is
            log.warning("a value is not forwarded to the next machine", error=str(error))

    threading.Thread(target=run, name="meshrl-relay", daemon=True).start()
