"""References: large values stay where they were made, and are fetched where they are read.

What is pickled for a process of this machine refers to shared memory, which is kept until it has arrived.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self, TypeVar, cast

import numpy as np

from meshrl.mesh.segment import Segment

T = TypeVar("T")


class Ref(ABC):
    """A value that an engine keeps. Any holder may fetch it. It is freed when the last reference to it goes."""

    __slots__ = ()

    transport: str = "memory"
    """How the value travels, for people."""

    @classmethod
    @abstractmethod
    async def fetch(cls, held: "Sequence[Ref]") -> list[object]:
        """Fetch the values of references, read-only, without a copy if the engine can. `DataLost` if one is lost."""

    def __deepcopy__(self, memo: object) -> Self:
        return self


Put = Callable[[object], Ref]
"""Keeps a value in an engine."""


class ForAll:
    """Base of values that each receiver reads whole, such as weights. They go from machine to machine in a chain."""

    __slots__ = ()


class NotHere(Exception):
    """A value for a process of this machine is still on another machine."""

    def __init__(self, held: Ref) -> None:
        super().__init__("a value lies on another machine")
        self.held = held


async def when_here(send: Callable[[], T]) -> T:
    """Return the result of `send`, once everything that it passes on is on this machine. `DataLost` if it is lost."""
    while True:
        try:
            return send()
        except NotHere as far:
            await far.held.fetch([far.held])


class HasRefs(ABC):
    """Base of values that can leave their large parts behind: `Batch`, `Weights`."""

    __slots__ = ()

    @abstractmethod
    def hold(self, put: Put, limit: int, shares: bool = False) -> Self:
        """Return the same value with each part of more than `limit` bytes as a reference only.

        `shares`: True if all that may fetch it share this machine's memory. Parts in that memory may then stay there.
        """

    @abstractmethod
    async def load(self) -> Self:
        """Return the same value with all parts readable."""

    @abstractmethod
    def __deepcopy__(self, memo: object) -> Self:
        """Copy the value for another reader, who may change its mutable parts."""


@dataclass(frozen=True)
class ArrayRef:
    """Stands for an array in transit."""

    held: Ref


def put_large(value: T, put: Put, limit: int | None, *, arrays: bool = False, shares: bool = False) -> T:
    """Return the value with its large parts held. With `arrays`, also arrays of more than `limit` bytes.

    Looks into dicts, lists and tuples. A held part is sent once, for any number of ranks that fetch it. A `limit` of
    None holds nothing. For `shares` see `HasRefs.hold`.
    """
    if limit is None:
        return value
    light: object = value
    if isinstance(value, np.ndarray):
        plain = type(value) is np.ndarray and value.dtype.kind in "biufc"
        light = ArrayRef(put(value)) if arrays and plain and value.nbytes > limit else value
    elif type(value) in (list, tuple):
        items = cast("list[object]", value)
        light = type(items)(put_large(item, put, limit, arrays=arrays, shares=shares) for item in items)
    elif type(value) is dict:
        table = cast("dict[object, object]", value)
        light = {key: put_large(item, put, limit, arrays=arrays, shares=shares) for key, item in table.items()}
    elif isinstance(value, HasRefs):
        light = value.hold(put, limit, shares)
    return cast("T", light)


async def resolve(value: T) -> T:
    """Return the value with everything readable that `put_large` left behind."""
    whole: object = value
    if isinstance(value, ArrayRef):
        whole = (await fetch([value.held]))[value.held]
    elif type(value) in (list, tuple):
        items = cast("list[object]", value)
        whole = type(items)([await resolve(item) for item in items])
    elif type(value) is dict:
        table = cast("Mapping[object, object]", value)
        whole = {key: await resolve(item) for key, item in table.items()}
    elif isinstance(value, HasRefs):
        whole = await value.load()
    return cast("T", whole)


def seal_arrays(value: object) -> None:
    """Make the arrays in a value read-only, in place."""
    if isinstance(value, np.ndarray):
        value.flags.writeable = False
    elif type(value) is dict:
        for item in cast("dict[object, object]", value).values():
            seal_arrays(item)
    elif type(value) in (list, tuple):
        for item in cast("list[object]", value):
            seal_arrays(item)


async def fetch(held: Iterable[Ref]) -> dict[Ref, object]:
    """Fetch values. In one process it runs without a break, so that calls start in their order."""
    by_kind: dict[type[Ref], list[Ref]] = {}
    for each in dict.fromkeys(held):
        by_kind.setdefault(type(each), []).append(each)
    values: dict[Ref, object] = {}
    for kind, some in by_kind.items():
        values.update(zip(some, await kind.fetch(some), strict=True))
    return values


_transit = threading.local()


@contextmanager
def in_transit() -> Generator[list[Segment]]:
    """Collect the segments that are pickled inside the block. Keep them until the message has arrived."""
    outer = getattr(_transit, "segments", None)
    segments: list[Segment] = []
    _transit.segments = segments
    try:
        yield segments
    finally:
        _transit.segments = outer


def is_in_transit() -> bool:
    """True if the pickled value goes to a process of this machine and `note_transit` is heard."""
    return getattr(_transit, "segments", None) is not None


def note_transit(segment: Segment) -> None:
    """Report a segment that is being pickled."""
    segments: list[Segment] | None = getattr(_transit, "segments", None)
    if segments is not None:
        segments.append(segment)
