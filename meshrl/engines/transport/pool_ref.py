"""Values in this machine's shared memory, for all processes here."""

import io
import pickle
from collections.abc import Callable, Sequence
from typing import Self, cast
from weakref import WeakValueDictionary

import numpy as np

from meshrl.engines.hosting import Pickler, carry_modules
from meshrl.errors import DataError
from meshrl.mesh import Ref, Segment, in_transit, note_transit, pool

_ALIGNED = 64
"""Bytes: each buffer starts at a multiple."""

Spans = tuple[tuple[int, int], ...]
"""Where each buffer begins and ends; the first is the pickle itself, which refers to the others."""


class PoolRef(Ref):
    """A value that was written once. In one process there is one such object for it, which leases the memory."""

    __slots__ = ("__weakref__", "_inner", "_lost", "_segment", "_spans")

    way = "shared memory"

    def __init__(self, segment: Segment | None, spans: Spans, lost: str = "", inner: Sequence[Segment] = ()) -> None:
        """`segment`: None where it is gone, for the reason `lost`; `inner`: those that the value names in turn."""
        self._segment = segment
        self._spans = spans
        self._lost = lost
        self._inner = inner

    @classmethod
    def put(cls, value: object) -> Self:
        """Keep a value; numpy arrays in it are read without a copy. DataError where there is no room."""
        carry_modules()
        buffers: list[pickle.PickleBuffer] = []
        file = io.BytesIO()
        with in_transit() as inner:
            Pickler(file, protocol=5, buffer_callback=buffers.append).dump(value)
        parts = [file.getbuffer(), *(each.raw() for each in buffers)]
        spans: list[tuple[int, int]] = []
        end = 0
        for part in parts:
            spans.append((end, end + part.nbytes))
            end += -(-part.nbytes // _ALIGNED) * _ALIGNED
        writing = pool.write(end)
        if writing is None:
            raise DataError(f"{end} bytes do not fit into this machine's shared memory: {pool.state()}")
        for part, (start, stop) in zip(parts, spans, strict=True):
            writing.memory[start:stop] = np.frombuffer(part, np.uint8)
        segment = writing.done()
        made = cls(segment, tuple(spans), inner=inner)
        _known[segment.path] = made
        return made

    @classmethod
    async def fetch(cls, held: Sequence[Ref]) -> list[object]:
        """The values, arrays read-only. Raises `DataError` if one is lost."""
        return [each.value() for each in cast("Sequence[PoolRef]", held)]

    def value(self) -> object:
        """What is kept. DataError where it is lost."""
        if self._segment is None:
            raise DataError(
                f"a column lay in the memory of a rank that has died or was stopped, and is lost ({self._lost}): make "
                "the batch again, or load what is needed later while its ranks live"
            )
        memory = self._segment.memory
        head, *rest = (memory[start:stop] for start, stop in self._spans)
        return cast("object", pickle.loads(head.data, buffers=rest))  # noqa: S301 -- of this run's own processes

    def __reduce__(self) -> tuple[Callable[..., Ref], tuple[object, ...]]:
        return self.reduced()

    def reduced(self) -> tuple[Callable[..., Ref], tuple[object, ...]]:
        """As it is pickled for a process of this machine."""
        if self._segment is None:
            return type(self), (None, self._spans, self._lost)
        for segment in (self._segment, *self._inner):
            note_transit(segment)
        return _received, (type(self), self._segment.path, self._segment.nbytes, self._spans)


_known: WeakValueDictionary[str, PoolRef] = WeakValueDictionary()


def _received(kind: type[PoolRef], path: str, nbytes: int, spans: Spans) -> PoolRef:
    known = _known.get(path)
    if known is not None:
        return known
    try:
        made = kind(Segment(path, nbytes), spans)
    except DataError as error:  # told where it is fetched: nobody hears what is raised here
        return kind(None, spans, str(error))
    _known[path] = made
    return made
