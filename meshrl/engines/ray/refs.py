"""Values that processes of a cluster hand to each other: on one machine in shared memory, else in Ray's store."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Self, cast
from weakref import WeakValueDictionary

import ray
from ray import ObjectRef
from ray.cloudpickle.cloudpickle import register_pickle_by_value
from ray.exceptions import ObjectLostError

from meshrl.engines.hosting import carries
from meshrl.engines.ray.parcel import Parcel, carried, pack, unpack
from meshrl.engines.transport import PoolRef
from meshrl.errors import DataError, MeshStopped
from meshrl.mesh import Ref, is_in_transit

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

    __slots__ = ("__weakref__", "_near", "ref")

    way = "the object store"

    def __init__(self, ref: "ObjectRef[object]") -> None:
        self.ref = ref
        self._near: HostRef | None = None
        """Where a process of this machine finds it, once it was sent to one."""
        _known[ref.binary()] = self

    @classmethod
    def put(cls, value: object) -> "RayRef":
        """Keep a value; numpy arrays in it are read without a copy on the same machine."""
        _check_open()
        ref: ObjectRef[object] = ray.put(pack(value))
        return cls(ref)

    @classmethod
    async def fetch(cls, held: Sequence[Ref]) -> list[object]:
        """The values, arrays read-only. Raises `DataError` if one is lost."""
        refs = [each.ref for each in cast("Sequence[RayRef]", held)]
        if not ray.is_initialized():
            raise DataError(
                "a column lies on the ranks of an engine that is closed, and is lost: load what is needed before"
            )
        try:
            _, elsewhere = ray.wait(refs, num_returns=len(refs), timeout=0)
            if elsewhere:
                await asyncio.gather(*elsewhere)
            # What is on this machine is only mapped: faster at once than awaited one by one.
            return [unpack(parcel) for parcel in cast("list[Parcel]", ray.get(refs))]
        except ObjectLostError as error:
            raise DataError(
                f"a column lies on a rank that has died or was stopped, and is lost ({type(error).__name__}): make the "
                "batch again, or load what is needed later while its ranks live"
            ) from None

    def __reduce__(self) -> tuple[Callable[..., Ref], tuple[object, ...]]:
        if (refs := carried()) is not None:
            return _numbered(refs, self)
        if is_in_transit():
            self._near = self._near or HostRef.put(unpack(cast("Parcel", ray.get(self.ref))))
            return self._near.reduced()
        return _received, (self.ref,)


def _check_open() -> None:
    if not ray.is_initialized():  # Ray would join whatever cluster it finds
        raise MeshStopped("the engine is closed: nothing can be sent to its ranks any more")


_known: WeakValueDictionary[bytes, RayRef] = WeakValueDictionary()


def _received(ref: "ObjectRef[object]") -> RayRef:
    return _known.get(ref.binary()) or RayRef(ref)


def _numbered(refs: "list[ObjectRef[object]]", far: RayRef) -> tuple[Callable[..., Ref], tuple[object, ...]]:
    refs.append(far.ref)
    return _unpacked, (len(refs) - 1,)


def _unpacked(number: int) -> RayRef:
    return _received((carried() or ())[number])
