"""References to values in a cluster: in shared memory on the same machine, else in Ray's store."""

import asyncio
import io
import pickle
import threading
from collections.abc import Awaitable, Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from importlib.util import find_spec
from typing import ClassVar, Final, NamedTuple, Protocol, Self, TypeAlias, TypeVar, cast
from weakref import WeakValueDictionary

import numpy as np
import ray
from numpy.typing import NDArray
from ray import ObjectRef
from ray.cloudpickle.cloudpickle import register_pickle_by_value
from ray.exceptions import ObjectLostError, RayError

from meshrl import log
from meshrl.engines.ray.cluster import Machine
from meshrl.engines.ray.code import Method
from meshrl.engines.remote import PROBES, Pickler, PoolRef, ProcessExited, Reply, monitor_of, register_pickler
from meshrl.errors import DataLost, MeshStopped
from meshrl.mesh import Bytes, ForAll, NotHere, Ref, is_in_transit, seal_arrays
from meshrl.user_code import pickle_scripts_by_value


class Handle(Protocol):
    """The Ray actor of a `RankProcess`."""

    host_copy: Method
    hand_on: Method
    answers: Method


class Forwarder(NamedTuple):
    """A rank on the route of a value."""

    handle: Handle
    machine: Machine


Route: TypeAlias = Sequence[Forwarder]
"""One rank on each machine, from the machine that holds a value to the one that needs it. Empty: Ray brings it."""

local_forwarders: Final[list[Forwarder]] = []
"""Ranks of this machine that forward its values. If this process is one, it comes first."""


class PackedValue(NamedTuple):
    """A value in transit."""

    head: bytes
    buffers: list[NDArray[np.uint8]]
    refs: "list[ObjectRef[object]]"


_under_way = threading.local()


@contextmanager
def _carrying(refs: "list[ObjectRef[object]]", to: Forwarder | None = None) -> Generator[None]:
    outer = carried(), addressee()
    _under_way.refs, _under_way.to = refs, to
    try:
        yield
    finally:
        _under_way.refs, _under_way.to = outer


def carried() -> "list[ObjectRef[object]] | None":
    """Return the references of the parcel that is being packed or unpacked. None outside of that."""
    refs: list[ObjectRef[object]] | None = getattr(_under_way, "refs", None)
    return refs


def addressee() -> Forwarder | None:
    """Return the rank that gets the parcel that is being packed, if it is on another machine."""
    to: Forwarder | None = getattr(_under_way, "to", None)
    return to


def pack(value: object, to: Forwarder | None = None) -> PackedValue | None:
    """Pack a value for a rank. None stays None."""
    if value is None:
        return None
    pickle_scripts_by_value()
    file, buffers, refs = io.BytesIO(), list[pickle.PickleBuffer](), list["ObjectRef[object]"]()
    with _carrying(refs, to):
        Pickler(file, protocol=5, buffer_callback=buffers.append).dump(value)
    return PackedValue(file.getvalue(), [np.frombuffer(each.raw(), np.uint8) for each in buffers], refs)


def unpack(parcel: PackedValue | None) -> object:
    """Unpack the value, with read-only arrays."""
    if parcel is None:
        return None
    with _carrying(parcel.refs):
        value: object = pickle.loads(parcel.head, buffers=parcel.buffers)  # noqa: S301 -- of this run's own ranks
    seal_arrays(value)
    return value


PIECE: Final = 1 << 20
"""Bytes of a piece. A machine forwards one piece while the next arrives."""
LARGE: Final = 1 << 23
"""Size in bytes of the smallest value that is relayed."""

T = TypeVar("T")

register_pickler(register_pickle_by_value, ObjectRef)


async def unless_lost(machine: Machine | None, coming: Awaitable[T]) -> T:
    """Await something from a machine. Raises `ProcessExited` if the machine is given up first."""
    waits = asyncio.ensure_future(coming)
    transfer = _Transfer()
    waits.add_done_callback(lambda _: transfer.reply.arrive(None))
    if machine is not None:
        monitor_of(machine.health_port).watch(transfer.reply, transfer)
    try:
        await transfer.reply
        return await waits
    finally:
        waits.cancel()


async def unless_silent(forwarder: Forwarder, coming: Awaitable[T]) -> T:
    """Await something from a rank. Raises `ProcessExited` if its machine is given up, or it is silent that long."""
    patience = forwarder.machine.health_port.patience
    waits, silent = asyncio.ensure_future(unless_lost(forwarder.machine, coming)), 0
    answer = _answer(forwarder)
    try:
        while not (await asyncio.wait([waits], timeout=patience / PROBES))[0]:
            silent = 0 if answer.done() else silent + 1
            if silent == PROBES:
                raise ProcessExited(
                    f"a rank on {forwarder.machine} has not answered for {patience:g} s, which is run.patience: its "
                    "process is stopped, or lets none of its threads run"
                )
            answer = _answer(forwarder) if answer.done() else answer
        return await waits
    finally:
        waits.cancel()
        answer.cancel()


def _answer(forwarder: Forwarder) -> asyncio.Future[object]:
    answer = asyncio.ensure_future(forwarder.handle.answers.remote())
    answer.add_done_callback(lambda done: done.cancelled() or done.exception())  # its death fails what is awaited
    return answer


class _Transfer:
    """A task that waits for a value from another machine."""

    def __init__(self) -> None:
        self.reply = Reply()

    def lose(self, reason: str) -> None:
        """Give that machine up."""
        self.reply.arrive(None, ProcessExited(reason))


def available() -> bool:
    """True if torch is installed, so this process can relay."""
    return find_spec("torch") is not None


class ValueStream:
    """The bytes of a value, which are here or arrive."""

    def __init__(self, head: bytes, buffers: Sequence[Bytes], *, here: bool) -> None:
        """`head`: the pickle of the value without its buffers. `here`: True if the buffers are filled."""
        self.head: Final = head
        self.sizes: Final = [buffer.nbytes for buffer in buffers]
        """Bytes of each buffer."""
        self.pieces: Final = [each[start : start + PIECE] for each in buffers for start in range(0, len(each), PIECE)]
        self.whole: Final[Future[None]] = Future()
        """Done when all bytes are here. Has the error if they never come."""
        self._here = 0
        self._changed = threading.Condition()
        if here:
            self.came(len(self.pieces))

    def came(self, number: int) -> None:
        """Note that this many pieces are here."""
        with self._changed:
            self._here = number
            self._changed.notify_all()

    def end(self, error: Exception | None = None) -> None:
        """Note that all bytes are here, or the failure."""
        with self._changed:
            if error is None:
                self.whole.set_result(None)
            else:
                self.whole.set_exception(error)
            self._changed.notify_all()

    def piece(self, number: int) -> Bytes:
        """Wait for a piece and return it. Raises the flow's failure."""
        with self._changed:
            self._changed.wait_for(lambda: number < self._here or self.whole.done())
        if number >= self._here:
            self.whole.result()
        return self.pieces[number]


class HostRef(PoolRef):
    """A value in this machine's shared memory. It is copied into Ray's store when it is sent to another machine."""

    __slots__ = ("_far",)

    @classmethod
    def put(cls, value: object) -> Self:
        """Keep a value. Its numpy arrays are read without a copy. DataError if there is no room."""
        _check_open()
        return super().put(value)

    def __reduce__(self) -> tuple[Callable[..., Ref], tuple[object, ...]]:
        if (refs := carried()) is None:
            return self.reduced()
        self._far: RayRef = getattr(self, "_far", None) or RayRef.put(self.value())
        return _numbered(refs, self._far)


class RayRef(Ref):
    """A value in Ray's object store. Each process has one such object for it."""

    __slots__ = ("__weakref__", "_forwarders", "_lost", "_near", "_route", "machine", "ref", "transport")

    here: ClassVar[Machine | None] = None
    """The place of this process, if it is a rank."""

    def __init__(self, ref: "ObjectRef[object]", machine: Machine | None = None, route: Route = ()) -> None:
        """`route`: its way to this machine. If that does not end at one of its ranks, Ray brings the value."""
        self.ref: ObjectRef[object] = ref
        self.transport: str = "the object store"
        self.machine: Machine | None = machine
        """The process that keeps it, without which nobody can fetch it."""
        self._lost = ""
        """Why nobody waits for it any more."""
        self._near: HostRef | None = None
        """Its copy in this machine's shared memory, after it was sent to a process here or came by its route."""
        self._route = route
        self._forwarders = {forwarder.machine.boot: forwarder for forwarder in route}
        """The machines on its way, in order, and the first rank on each that received it."""
        _known[ref.binary()] = self

    @classmethod
    def put(cls, value: object) -> "RayRef":
        """Keep a value. Processes of the same machine read its numpy arrays without a copy."""
        _check_open()
        parcel = pack(value)
        ref: ObjectRef[object] = ray.put(parcel)
        large = parcel and not parcel.refs and sum(each.nbytes for each in parcel.buffers) >= LARGE
        return cls(ref, cls.here, local_forwarders[:1] if large and isinstance(value, ForAll) else ())

    @classmethod
    async def fetch(cls, held: Sequence[Ref]) -> list[object]:
        """Return the values, with read-only arrays. Raises `DataLost` if one is lost."""
        wanted = cast("Sequence[RayRef]", held)
        if not ray.is_initialized():
            raise DataLost("the ranks of an engine", "the engine is closed")
        stored = {each.ref: each for each in wanted if not each.is_near and not each.is_far}
        missing = ray.wait(list(stored), num_returns=len(stored), timeout=0)[1] if stored else []
        if elsewhere := [*(each for each in wanted if each.is_far), *(stored[each] for each in missing)]:
            await asyncio.gather(*(each.come() for each in elsewhere))
        mapped = {each: each.ref for each in wanted if not each.is_near}
        try:  # mapping what is on this machine at once is faster than awaiting each
            parcels = dict(zip(mapped, cast("list[PackedValue]", ray.get(list(mapped.values()))), strict=True))
            return [unpack(parcels[each]) if each in parcels else each.mapped() for each in wanted]
        except ObjectLostError:
            return [each.mapped() for each in wanted]  # one of these reports where it was

    @property
    def is_near(self) -> bool:
        """True if it is in this machine's shared memory."""
        return self._near is not None

    @property
    def is_far(self) -> bool:
        """True if it is only on other machines, as far as is known."""
        return not self.is_near and bool(self._route) and not self._route[0].machine.is_here

    async def come(self) -> None:
        """Wait until it is on this machine. Raises `DataLost` if it is lost, or its host or rank is silent."""
        if self._route and self._route[-1].machine.is_here and available():
            try:
                forwarder = self._route[-1]
                pickled = await unless_silent(forwarder, forwarder.handle.host_copy.remote([self.ref], self._route))
                copy = cast("HostRef", pickle.loads(cast("bytes", pickled)))  # noqa: S301 -- of this run's own ranks
                copy.value()  # raises if it is lost
                self._near, self.transport = copy, "collectives"
                return
            except (RayError, DataLost, ProcessExited) as error:
                log.warning("a value is sent by Ray's store instead of a collective", error=str(error))
        self._route = ()
        first = next(iter(self._forwarders.values()), None)
        try:
            if not self._lost:
                await (unless_silent(first, self.ref) if first else unless_lost(self.machine, self.ref))
        except ProcessExited as exited:
            self._lost = str(exited)
        except ObjectLostError:  # reported where it is mapped
            pass
        if self._lost:
            raise DataLost(self._where, self._lost)

    def mapped(self) -> object:
        """Return the value, which is on this machine. Raises `DataLost` if it is lost."""
        if self._near is not None:
            return self._near.value()
        try:
            return unpack(cast("PackedValue", ray.get(self.ref)))
        except ObjectLostError as error:
            reason = f"the rank has died or was stopped ({type(error).__name__})"
            raise DataLost(self._where, reason) from None

    def goes_by(self, route: Route) -> None:
        """Set its way to this machine, unless that is known."""
        if not self._forwarders:
            self._route = route
            self._forwarders = {forwarder.machine.boot: forwarder for forwarder in route}

    def route_to(self, to: Forwarder | None) -> Route:
        """Return its way to a rank. If that is unknown, return where it starts."""
        if not self._forwarders or to is None:
            return tuple(self._forwarders.values())[:1]
        self._forwarders.setdefault(to.machine.boot, to)
        return tuple(self._forwarders.values())[: list(self._forwarders).index(to.machine.boot) + 1]

    @property
    def _where(self) -> str:
        return str(self.machine) if self.machine else "a rank of another machine"

    def __reduce__(self) -> tuple[Callable[..., Ref], tuple[object, ...]]:
        if (refs := carried()) is not None:
            return _numbered(refs, self)
        if is_in_transit():
            if self._near is None:
                if self.is_far or not ray.wait([self.ref], timeout=0)[0]:
                    raise NotHere(self)
                self._near = HostRef.put(self.mapped())
            return self._near.reduced()
        return _received, (self.ref, self.machine)


def _check_open() -> None:
    if not ray.is_initialized():  # otherwise Ray would join any cluster that it finds
        raise MeshStopped("the engine is closed: nothing more can be sent to its ranks")


_known: WeakValueDictionary[bytes, RayRef] = WeakValueDictionary()


def _received(ref: "ObjectRef[object]", machine: Machine | None) -> RayRef:
    return _known.get(ref.binary()) or RayRef(ref, machine)


def _numbered(refs: "list[ObjectRef[object]]", far: RayRef) -> tuple[Callable[..., Ref], tuple[object, ...]]:
    refs.append(far.ref)
    return _unpacked, (len(refs) - 1, far.machine, far.route_to(addressee()))


def _unpacked(number: int, machine: Machine | None, route: Route) -> RayRef:
    ref = _received((carried() or ())[number], machine)
    ref.goes_by(route)
    return ref
