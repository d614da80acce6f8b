"""Values that processes of a cluster hand to each other: on one machine in shared memory, else in Ray's store."""

import asyncio
from collections.abc import Callable, Sequence
from typing import ClassVar, Self, cast
from weakref import WeakValueDictionary

import ray
from ray import ObjectRef
from ray.cloudpickle.cloudpickle import register_pickle_by_value
from ray.exceptions import ObjectLostError

from meshrl.engines.hosting import Gone, Reply, carries, vigil
from meshrl.engines.ray.nodes import Home
from meshrl.engines.ray.parcel import Parcel, carried, pack, unpack
from meshrl.engines.transport import PoolRef
from meshrl.errors import DataLost, MeshStopped
from meshrl.mesh import NotHere, Ref, is_in_transit

carries(register_pickle_by_value, ObjectRef)


class HostRef(PoolRef):
    """A value in this machine's shared memory, which is copied into Ray's store when it is sent to another machine."""

    __slots__ = ("_far",)

    @classmethod
    def put(cls, value: object) -> Self:
        """Keep a value; numpy arrays in it are read without a copy. DataError where there is no room."""
        _check_open()
        return super().put(value)

    def __reduce__(self) -> tuple[Callable[..., Ref], tuple[object, ...]]:
        if (refs := carried()) is None:
            return self.reduced()
        self._far: RayRef = getattr(self, "_far", None) or RayRef.put(self.value())
        return _numbered(refs, self._far)


class RayRef(Ref):
    """A value in Ray's object store. In one process there is one such object for it."""

    __slots__ = ("__weakref__", "_lost", "_near", "home", "ref")

    way = "the object store"
    here: ClassVar[Home | None] = None
    """Where what this process puts lies, if it is a rank."""

    def __init__(self, ref: "ObjectRef[object]", home: Home | None = None) -> None:
        self.ref = ref
        self.home = home
        """Where the process is that has put it, and without which nobody can fetch it."""
        self._lost = ""
        """Why nobody waits for it any more."""
        self._near: HostRef | None = None
        """Where a process of this machine finds it, once it was sent to one."""
        _known[ref.binary()] = self

    @classmethod
    def put(cls, value: object) -> "RayRef":
        """Keep a value; numpy arrays in it are read without a copy on the same machine."""
        _check_open()
        ref: ObjectRef[object] = ray.put(pack(value))
        return cls(ref, cls.here)

    @classmethod
    async def fetch(cls, held: Sequence[Ref]) -> list[object]:
        """The values, arrays read-only. Raises `DataLost` if one is lost."""
        refs = {each.ref: each for each in cast("Sequence[RayRef]", held)}
        if not ray.is_initialized():
            raise DataLost("the ranks of an engine", "the engine is closed")
        _, elsewhere = ray.wait(list(refs), num_returns=len(refs), timeout=0)
        if elsewhere:
            await asyncio.gather(*(refs[each].come() for each in elsewhere))
        try:  # what is on this machine is only mapped: faster at once than awaited one by one
            return [unpack(parcel) for parcel in cast("list[Parcel]", ray.get(list(refs)))]
        except ObjectLostError:
            return [each.mapped() for each in refs.values()]  # one of them says where it lay

    async def come(self) -> None:
        """Wait until it is on this machine. Raises `DataLost` if it is lost, or its host is given up before."""
        coming = asyncio.ensure_future(self.ref)
        waiting = _Waiting()
        coming.add_done_callback(lambda _: waiting.reply.arrive(None))
        if self.home is not None and not self._lost:
            vigil(self.home.door).attend(waiting.reply, waiting)
        try:
            if not self._lost:
                await waiting.reply
        except Gone as gone:
            self._lost = str(gone)
        finally:
            coming.cancel()
        if self._lost:
            raise DataLost(self._where, self._lost)

    def mapped(self) -> object:
        """The value, which is on this machine. Raises `DataLost` if it is lost."""
        try:
            return unpack(cast("Parcel", ray.get(self.ref)))
        except ObjectLostError as error:
            reason = f"the rank has died or was stopped ({type(error).__name__})"
            raise DataLost(self._where, reason) from None

    @property
    def _where(self) -> str:
        return str(self.home) if self.home else "a rank of another machine"

    def __reduce__(self) -> tuple[Callable[..., Ref], tuple[object, ...]]:
        if (refs := carried()) is not None:
            return _numbered(refs, self)
        if is_in_transit():
            if self._near is None:
                if not ray.wait([self.ref], timeout=0)[0]:
                    raise NotHere(self)
                self._near = HostRef.put(self.mapped())
            return self._near.reduced()
        return _received, (self.ref, self.home)


class _Waiting:
    """Somebody waits for a value of another machine."""

    def __init__(self) -> None:
        self.reply = Reply()

    def lose(self, reason: str) -> None:
        """That machine is given up."""
        self.reply.arrive(None, Gone(reason))


def _check_open() -> None:
    if not ray.is_initialized():  # Ray would join whatever cluster it finds
        raise MeshStopped("the engine is closed: nothing can be sent to its ranks any more")


_known: WeakValueDictionary[bytes, RayRef] = WeakValueDictionary()


def _received(ref: "ObjectRef[object]", home: Home | None) -> RayRef:
    return _known.get(ref.binary()) or RayRef(ref, home)


def _numbered(refs: "list[ObjectRef[object]]", far: RayRef) -> tuple[Callable[..., Ref], tuple[object, ...]]:
    refs.append(far.ref)
    return _unpacked, (len(refs) - 1, far.home)


def _unpacked(number: int, home: Home | None) -> RayRef:
    return _received((carried() or ())[number], home)
