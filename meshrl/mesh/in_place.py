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
"""Size in bytes of the smallest array for which shared memory pays."""


class _Place(np.ndarray[tuple[int, ...], np.dtype[np.generic]]):
    """The base of such an array. It keeps the memory from being written again.

    It lies on the mapping itself, because numpy lets a view skip bases of the view's type.
    """

    writing: Writing


def empty(shape: SupportsIndex | Sequence[SupportsIndex], dtype: DTypeLike) -> Array:
    """Make an array of any shape to fill, like `np.empty`.

    It is in shared memory if ranks are processes and there is room.

        tokens = mesh.empty(count, np.int32)
        ...                                                # fill it
        return Batch.of(tokens=Ragged(tokens, offsets))    # nothing is copied

    A `Batch` takes the whole array without a copy. The array is read-only from then on, as after `ragged.frozen`. Views
    that were made before stay writable, because numpy does not know them: do not write through them, others read that
    memory. A part of the array, or a view in another shape, is copied. A process forked in between shares the memory.
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
    place.flags.writeable = False  # the owner of the memory finds writers through the array and the base of its views
    writing.fills(array)
    return array


def is_in_place(array: Array) -> bool:
    """True if the array, of any shape, is all of an array of `empty`."""
    return isinstance(array.base, _Place)
