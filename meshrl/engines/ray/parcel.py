"""A value as Ray carries it to another machine: its bytes, its buffers, and its references to Ray's store.

Ray counts references to objects that it pickles itself. It would miss references that are made during pickling, as for
values in this machine's shared memory. So all are made before.
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
    """A value in transit."""

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
    """Return the references of the parcel that is being packed or unpacked. None outside of that."""
    refs: list[ObjectRef[object]] | None = getattr(_under_way, "refs", None)
    return refs


def addressee() -> Stop | None:
    """Return the rank that gets the parcel that is being packed, if it is on another machine."""
    to: Stop | None = getattr(_under_way, "to", None)
    return to


def pack(value: object, to: Stop | None = None) -> Parcel | None:
    """Pack a value for a rank. None stays None."""
    if value is None:
        return None
    carry_modules()
    file, buffers, refs = io.BytesIO(), list[pickle.PickleBuffer](), list["ObjectRef[object]"]()
    with _carrying(refs, to):
        Pickler(file, protocol=5, buffer_callback=buffers.append).dump(value)
    return Parcel(file.getvalue(), [np.frombuffer(each.raw(), np.uint8) for each in buffers], refs)


def unpack(parcel: Parcel | None) -> object:
    """Unpack the value, with read-only arrays."""
    if parcel is None:
        return None
    with _carrying(parcel.refs):
        value: object = pickle.loads(parcel.head, buffers=parcel.buffers)  # noqa: S301 -- of this run's own ranks
    seal_arrays(value)
    return value
