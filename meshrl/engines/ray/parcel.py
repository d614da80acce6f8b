"""A value as Ray carries it to another machine: its bytes, its buffers, and its references to Ray's store.

Ray counts the references of an object that it pickles itself, and would not count one that is made meanwhile, as those
are of values that lie in this machine's shared memory. So they are all made before.
"""

import io
import pickle
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshrl.engines.hosting import Pickler, carry_modules
from meshrl.engines.ray.route import Stop
from meshrl.mesh import seal_arrays

if TYPE_CHECKING:
    from collections.abc import Generator

    from ray import ObjectRef


class Parcel(NamedTuple):
    """A value on its way."""

    head: bytes
    buffers: list[NDArray[np.uint8]]
    refs: "list[ObjectRef[object]]"


_under_way = threading.local()


@contextmanager
def _carrying(refs: "list[ObjectRef[object]]", to: Stop | None = None) -> "Generator[None]":
    outer = carried(), addressee()
    _under_way.refs, _under_way.to = refs, to
    try:
        yield
    finally:
        _under_way.refs, _under_way.to = outer


def carried() -> "list[ObjectRef[object]] | None":
    """The references of the parcel that is being packed or unpacked; None where none is."""
    refs: list[ObjectRef[object]] | None = getattr(_under_way, "refs", None)
    return refs


def addressee() -> Stop | None:
    """The rank that the parcel is for that is being packed, where that is one on another machine."""
    to: Stop | None = getattr(_under_way, "to", None)
    return to


def pack(value: object, to: Stop | None = None) -> Parcel | None:
    """The value as a parcel, which goes there; None for None."""
    if value is None:
        return None
    carry_modules()
    file, buffers, refs = io.BytesIO(), list[pickle.PickleBuffer](), list["ObjectRef[object]"]()
    with _carrying(refs, to):
        Pickler(file, protocol=5, buffer_callback=buffers.append).dump(value)
    return Parcel(file.getvalue(), [np.frombuffer(each.raw(), np.uint8) for each in buffers], refs)


def unpack(parcel: Parcel | None) -> object:
    """The value again, its arrays read-only."""
    if parcel is None:
        return None
    with _carrying(parcel.refs):
        value: object = pickle.loads(parcel.head, buffers=parcel.buffers)  # noqa: S301 -- of this run's own ranks
    seal_arrays(value)
    return value
