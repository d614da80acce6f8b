"""References: large values stay where they were made, and are fetched where they are read."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar, cast

import numpy as np

T = TypeVar("T")


class Ref(ABC):
    """A value that an engine keeps. Whoever has this may fetch it; it is let go with the last that names it."""

    __slots__ = ()

    way: str = "memory"
    """What carries the value, as people read it."""

    @classmethod
    @abstractmethod
    async def fetch(cls, held: "Sequence[Ref]") -> list[object]:
        """The values of several of this class, read-only, uncopied where the engine can. `DataLost` if one is lost."""

    def __deepcopy__(self, memo: object) -> Self:
        return self


Put = Callable[[object], Ref]
"""How an engine keeps a value."""


class ForAll:
    """Base of a value that whoever is sent it reads whole, as weights are: it goes from each machine on to the next."""

    __slots__ = ()


class NotHere(Exception):
    """A value was to be handed to a process of this machine, and is on another one still."""

    def __init__(self, held: Ref) -> None:
        super().__init__("a value lies on another machine")
        self.held = held


async def when_here(send: Callable[[], T]) -> T:
    """What this returns, after what it hands on is on this machine. `DataLost` if it is lost."""
    while True:
        try:
            return send()
        except NotHere as far:
            await far.held.fetch([far.held])


class HasRefs(ABC):
    """Base of a value that can leave its large parts behind: `Batch`, `Weights`."""

    __slots__ = ()

    @abstractmethod
    def hold(self, put: Put, limit: int, shares: bool = False) -> Self:
        """The same value, each part of more than `limit` bytes as a reference only.

        `shares`: whether all who may fetch it share this machine's memory; what lies there may then stay there.
        """

    @abstractmethod
    async def load(self) -> Self:
        """The same value, all parts readable."""

    @abstractmethod
    def __deepcopy__(self, memo: object) -> Self:
        """The same value for another reader, who may write what can be written in it."""


@dataclass(frozen=True)
class ArrayRef:
    """Stands for an array while it travels."""

    held: Ref


def put_large(value: T, put: Put, limit: int | None, *, arrays: bool = False, shares: bool = False) -> T:
    """The value with the large parts of what it contains held; with `arrays`, arrays of more than `limit` bytes too.

    Looks into dicts, lists and tuples. What is held is sent once, whatever the number of ranks that fetch it. A `limit`
    of None holds nothing. For `shares` see `HasRefs.hold`.
    """
    return value if limit is None else cast("T", _put_large(value, put, limit, arrays, shares))


def _put_large(value: object, put: Put, limit: int, arrays: bool, shares: bool) -> object:
    if isinstance(value, np.ndarray):
        plain = type(value) is np.ndarray and value.dtype.kind in "biufc"
        return ArrayRef(put(value)) if arrays and plain and value.nbytes > limit else value
    if type(value) in (list, tuple):
        items = cast("list[object]", value)
        return type(items)(_put_large(item, put, limit, arrays, shares) for item in items)
    if type(value) is dict:
        table = cast("dict[object, object]", value)
        return {key: _put_large(item, put, limit, arrays, shares) for key, item in table.items()}
    return value.hold(put, limit, shares) if isinstance(value, HasRefs) else value


async def resolve(value: T) -> T:
    """The value with everything readable that `put_large` left behind."""
    return cast("T", await _resolve(value))


async def _resolve(value: object) -> object:
    if isinstance(value, ArrayRef):
        return (await fetch([value.held]))[value.held]
    if type(value) in (list, tuple):
        items = cast("list[object]", value)
        return type(items)([await _resolve(item) for item in items])
    if type(value) is dict:
        table = cast("Mapping[object, object]", value)
        return {key: await _resolve(item) for key, item in table.items()}
    return await value.load() if isinstance(value, HasRefs) else value


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
    """The values. Nothing else runs meanwhile if they are in this process: so calls start in their order."""
    by_kind: dict[type[Ref], list[Ref]] = {}
    for each in dict.fromkeys(held):
        by_kind.setdefault(type(each), []).append(each)
    values: dict[Ref, object] = {}
    for kind, some in by_kind.items():
        values.update(zip(some, await kind.fetch(some), strict=True))
    return values
