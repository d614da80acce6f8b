"""Arrays that are created in shared memory, and passed on without a copy."""

from collections.abc import Sequence
from math import prod
from operator import index
from typing import Final, SupportsIndex

import numpy as np
from numpy.typing import DTypeLike

from meshrl.mesh.sharding import Array
from meshrl.mesh.shared_memory import Writing, pool

_FROM: Final = 1 << 16
"""Bytes of the smallest array for which that pays."""


class _Place(np.ndarray[tuple[int, ...], np.dtype[np.generic]]):
    """What such an array is based on; it keeps the memory from being written anew.

    It lies on the mapping itself: numpy lets a view skip bases of its own type.
    """

    writing: Writing


def empty(shape: SupportsIndex | Sequence[SupportsIndex], dtype: DTypeLike) -> Array:
    """An array to be filled, as `np.empty` makes it; where ranks are processes, in shared memory that has room.

        tokens = mesh.empty(count, np.int32)
        ...                                                # fill it
        return Batch.of(tokens=Ragged(tokens, offsets))    # nothing is copied

    A `Batch` takes it as it is, whole, and it is read-only from then on, as `ragged.frozen` says: views of it that were
    made before stay writable, which numpy cannot tell, and whoever writes into them writes into what others read.
    A part of it, or a view in another shape, is copied as of any array. A process that is forked meanwhile shares it.
    """
    dims = tuple(map(index, (shape,) if isinstance(shape, SupportsIndex) else shape))
    kind = np.dtype(dtype)
    nbytes = prod(dims) * kind.itemsize
    shared = pool.hands_on and nbytes >= _FROM and not kind.hasobject
    writing = pool.write(nbytes, on_disk=False) if shared else None
    if writing is None:
        return np.empty(dims, kind)
    place = _Place(dims, kind, writing.mapping)
    place.writing = writing
    array: Array = np.asarray(place)
    place.flags.writeable = False  # whether anybody may still write is asked of the array, and of its views' base
    writing.fills(array)
    return array


def is_in_place(array: Array) -> bool:
    """Whether it is an array of `empty`, all of it."""
    return isinstance(array.base, _Place)
