"""References to values in a cluster: in shared memory on the same machine, else in Ray's store."""

import asyncio
import pickle
from collections.abc import Callable, Sequence
from typing import ClassVar, Self, cast
from weakref import WeakValueDictionary

import ray
from ray import ObjectRef
from ray.cloudpickle.cloudpickle import register_pickle_by_value
from ray.exceptions import ObjectLostError, RayError

from meshrl import log
from meshrl.engines.hosting import Gone, carries
from meshrl.engines.ray.nodes import Home
from meshrl.engines.ray.parcel import Parcel, addressee, carried, pack, unpack
from meshrl.engines.ray.relay import LARGE, available, unless_lost, unless_silent
from meshrl.engines.ray.route import Route, Stop, near
from meshrl.engines.transport import PoolRef
from meshrl.errors import DataLost, MeshStopped
from meshrl.mesh import ForAll, NotHere, Ref, is_in_transit

carries(register_pickle_by_value, ObjectRef)


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

    __slots__ = ("__weakref__", "_lost", "_near", "_route", "_stops", "home", "ref", "way")

    here: ClassVar[Home | None] = None
    """The place of this process, if it is a rank."""

    def __init__(self, ref: "ObjectRef[object]", home: Home | None = None, route: Route = ()) -> None:
        """`route`: its way to this machine. If that does not end at one of its ranks, Ray brings the value."""
        self.ref: ObjectRef[object] = ref
        self.way: str = "the object store"
        self.home: Home | None = home
        """The process that keeps it, without which nobody can fetch it."""
        self._lost = ""
        """Why nobody waits for it any more."""
        self._near: HostRef | None = None
        """Its copy in this machine's shared memory, after it was sent to a process here or came by its route."""
        self._route = route
        self._stops = {stop.home.boot: stop for stop in route}
        """The machines on its way, in order, and the first rank on each that received it."""
        _known[ref.binary()] = self

    @classmethod
    def put(cls, value: object) -> "RayRef":
        """Keep a value. Processes of the same machine read its numpy arrays without a copy."""
        _check_open()
        parcel = pack(value)
        ref: ObjectRef[object] = ray.put(parcel)
        large = parcel and not parcel.refs and sum(each.nbytes for each in parcel.buffers) >= LARGE
        return cls(ref, cls.here, near[:1] if large and isinstance(value, ForAll) else ())

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
            parcels = dict(zip(mapped, cast("list[Parcel]", ray.get(list(mapped.values()))), strict=True))
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
        return not self.is_near and bool(self._route) and not self._route[0].home.is_here

    async def come(self) -> None:
        """Wait until it is on this machine. Raises `DataLost` if it is lost, or its host or rank is silent."""
        if self._route and self._route[-1].home.is_here and available():
            try:
                stop = self._route[-1]
                told = await unless_silent(stop, stop.handle.host_copy.remote([self.ref], self._route))
                copy = cast("HostRef", pickle.loads(cast("bytes", told)))  # noqa: S301 -- of this run's own ranks
                copy.value()  # raises if it is lost
                self._near, self.way = copy, "collectives"
                return
            except (RayError, DataLost, Gone) as error:
                log.warning("a value is sent by Ray's store instead of a collective", error=str(error))
        self._route = ()
        first = next(iter(self._stops.values()), None)
        try:
            if not self._lost:
                await (unless_silent(first, self.ref) if first else unless_lost(self.home, self.ref))
        except Gone as gone:
            self._lost = str(gone)
        except ObjectLostError:  # reported where it is mapped
            pass
        if self._lost:
            raise DataLost(self._where, self._lost)

    def mapped(self) -> object:
        """Return the value, which is on this machine. Raises `DataLost` if it is lost."""
        if self._near is not None:
            return self._near.value()
        try:
            return unpack(cast("Parcel", ray.get(self.ref)))
        except ObjectLostError as error:
            reason = f"the rank has died or was stopped ({type(error).__name__})"
            raise DataLost(self._where, reason) from None

    def goes_by(self, route: Route) -> None:
        """Set its way to this machine, unless that is known."""
        if not self._stops:
            self._route = route
            self._stops = {stop.home.boot: stop for stop in route}

    def route_to(self, to: Stop | None) -> Route:
        """Return its way to a rank. If that is unknown, return where it starts."""
        if not self._stops or to is None:
            return tuple(self._stops.values())[:1]
        self._stops.setdefault(to.home.boot, to)
        return tuple(self._stops.values())[: list(self._stops).index(to.home.boot) + 1]

    @property
    def _where(self) -> str:
        return str(self.home) if self.home else "a rank of another machine"

    def __reduce__(self) -> tuple[Callable[..., Ref], tuple[object, ...]]:
        if (refs := carried()) is not None:
            return _numbered(refs, self)
        if is_in_transit():
            if self._near is None:
                if self.is_far or not ray.wait([self.ref], timeout=0)[0]:
                    raise NotHere(self)
                self._near = HostRef.put(self.mapped())
            return self._near.reduced()
        return _received, (self.ref, self.home)


def _check_open() -> None:
    if not ray.is_initialized():  # otherwise Ray would join any cluster that it finds
        raise MeshStopped("the engine is closed: nothing more can be sent to its ranks")


_known: WeakValueDictionary[bytes, RayRef] = WeakValueDictionary()


def _received(ref: "ObjectRef[object]", home: Home | None) -> RayRef:
    return _known.get(ref.binary()) or RayRef(ref, home)


def _numbered(refs: "list[ObjectRef[object]]", far: RayRef) -> tuple[Callable[..., Ref], tuple[object, ...]]:
    refs.append(far.ref)
    return _unpacked, (len(refs) - 1, far.home, far.route_to(addressee()))


def _unpacked(number: int, home: Home | None, route: Route) -> RayRef:
    ref = _received((carried() or ())[number], home)
    ref.goes_by(route)
    return ref
