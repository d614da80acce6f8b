"""References to values in this machine's shared memory, which all its processes can read."""

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Self, cast
from weakref import WeakValueDictionary

import numpy as np

from meshrl.engines.remote.messages import Pickler
from meshrl.errors import DataError, DataLost
from meshrl.mesh import Ref, Segment, address_of, in_transit, note_transit, pool
from meshrl.user_code import pickle_scripts_by_value

_ALIGNED = 64
"""Bytes. Each buffer starts at a multiple."""

_NAMED_FROM = 1 << 16
"""Size in bytes of the smallest buffer that may stay in place."""
_NAMED_PART = 8
"""A buffer that stays in its segment has at least this part of the segment's bytes, which are all kept with it."""

Span = tuple[int, int, int]
"""The segment of a buffer, its start and its end."""
Spans = tuple[Span, ...]
"""The spans of all buffers. The first is the pickle, which refers to the others."""


class PoolRef(Ref):
    """A value that was written once. Each process has one such object for it, which leases the memory."""

    __slots__ = ("__weakref__", "_inner", "_lost", "_segments", "_spans")

    transport = "shared memory"

    def __init__(
        self, segments: Sequence[Segment], spans: Spans, lost: str = "", inner: Sequence[Segment] = ()
    ) -> None:
        """`segments`: its own comes first, none if they are gone (`lost`: why). `inner`: those that the value names."""
        self._segments = segments
        self._spans = spans
        self._lost = lost
        self._inner = inner

    @classmethod
    def put(cls, value: object) -> Self:
        """Keep a value. Its numpy arrays are read without a copy. DataError if there is no room.

        Large arrays that are in shared memory already and cannot be written any more stay there.
        """
        pickle_scripts_by_value()
        buffers: list[pickle.PickleBuffer] = []
        file = io.BytesIO()
        with in_transit() as inner:
            Pickler(file, protocol=5, buffer_callback=buffers.append).dump(value)
        parts = [file.getbuffer(), *(each.raw() for each in buffers)]
        others, named = _in_place(parts)
        spans, fresh, end = _laid_out(parts, named)
        writing = pool.write(end)
        if writing is None:
            raise DataError(f"{end} bytes do not fit into this machine's shared memory: {pool.state()}")
        for number in fresh:
            _, start, stop = spans[number]
            writing.memory[start:stop] = np.frombuffer(parts[number], np.uint8)
        pool.copied += sum(parts[number].nbytes for number in fresh if number)  # the pickle is not a copy
        segment = writing.done()
        ref = cls((segment, *others), tuple(spans), inner=inner)
        _known[segment.path] = ref
        return ref

    @classmethod
    async def fetch(cls, held: Sequence[Ref]) -> list[object]:
        """Return the values, with read-only arrays. Raises `DataLost` if one is lost."""
        return [each.value() for each in cast("Sequence[PoolRef]", held)]

    def value(self) -> object:
        """Return the value. Raises `DataLost` if it is lost."""
        if not self._segments:
            raise DataLost("a rank of this machine", f"the rank has died or was stopped ({self._lost})")
        memory = [segment.memory for segment in self._segments]
        head, *rest = (memory[where][start:stop] for where, start, stop in self._spans)
        return cast("object", pickle.loads(head.data, buffers=rest))  # noqa: S301 -- of this run's own processes

    def __reduce__(self) -> tuple[Callable[..., Ref], tuple[object, ...]]:
        return self.reduced()

    def reduced(self) -> tuple[Callable[..., Ref], tuple[object, ...]]:
        """Pickle it for a process of this machine."""
        if not self._segments:
            return type(self), ((), self._spans, self._lost)
        for segment in (*self._segments, *self._inner):
            note_transit(segment)
        places = tuple((segment.path, segment.nbytes) for segment in self._segments)
        return _received, (type(self), places, self._spans)


_known: WeakValueDictionary[str, PoolRef] = WeakValueDictionary()


def _received(kind: type[PoolRef], places: Sequence[tuple[str, int]], spans: Spans) -> PoolRef:
    own, _ = places[0]
    known = _known.get(own)
    if known is not None:
        return known
    try:
        ref = kind([Segment(path, nbytes) for path, nbytes in places], spans)
    except DataError as error:  # reported by `fetch`: an error raised here would be lost
        return kind((), spans, str(error))
    _known[own] = ref
    return ref


def _laid_out(parts: Sequence[memoryview], named: Mapping[int, Span]) -> tuple[list[Span], list[int], int]:
    """Return the span of each part, the parts to write, and their total size in bytes.

    Columns of the same rows share the array of offsets, which is written once.
    """
    spans: list[Span] = []
    fresh: list[int] = []
    known: dict[tuple[int, int], Span] = {}
    end = 0
    for number, part in enumerate(parts):
        place = address_of(part), part.nbytes
        span = named.get(number) or known.get(place)
        if span is None:
            span = known[place] = 0, end, end + part.nbytes
            fresh.append(number)
            end += -(-part.nbytes // _ALIGNED) * _ALIGNED
        spans.append(span)
    return spans, fresh, end


def _in_place(parts: Sequence[memoryview]) -> tuple[list[Segment], dict[int, Span]]:
    """Return the segments in which parts can stay, and the spans of these parts by number."""
    by_path: dict[str, tuple[Segment, dict[int, tuple[int, int]]]] = {}
    for number, part in enumerate(parts):
        if part.readonly and part.nbytes >= _NAMED_FROM and (place := pool.find(part)) is not None:
            segment, start = place
            by_path.setdefault(segment.path, (segment, {}))[1][number] = start, start + part.nbytes
    segments: list[Segment] = []
    named: dict[int, Span] = {}
    for segment, places in by_path.values():
        if sum(stop - start for start, stop in set(places.values())) * _NAMED_PART >= segment.nbytes:
            segments.append(segment)
            named |= {number: (len(segments), *place) for number, place in places.items()}
    return segments, named
