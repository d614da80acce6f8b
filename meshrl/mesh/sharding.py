"""Marks: how an endpoint's arguments are split over ranks, and how its results are joined.

A mark keeps the type: `Shard[Batch]` *is* a `Batch` for the type checker, for the caller and for the rank. The mark is
read once, when the actor is spawned (see `contract`).

    async def update(self, batch: Shard[Batch]) -> Mean[Metrics]: ...
"""

import types
import typing
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypeAliasType, TypeVar

DP = Literal["dp"]
"""Data parallel: ranks with different rows."""
TP = Literal["tp"]
"""Tensor parallel: ranks with different slices of each weight."""
PP = Literal["pp"]
"""Pipeline parallel: ranks with different layers."""
CP = Literal["cp"]
"""Context parallel: ranks with different parts of each row's tokens."""

EVERY = Literal["*"]
"""All ranks, regardless of the axes: `Gather[Weights, EVERY]`."""

Rows: TypeAlias = NDArray[np.int64]
"""Row numbers, `int64[rows]`."""


class Splittable(Protocol):
    """A value with rows, which a mesh can divide over ranks, such as `Batch`."""

    def __len__(self) -> int:
        """The number of rows."""
        ...

    def plan(self, parts: int) -> list[Rows]:
        """Return the row numbers of each part. Every row is in exactly one part. A part may be empty."""
        ...

    def parts(self, plan: Sequence[Rows]) -> Sequence[Self]:
        """Return one value for each part, with its rows only."""
        ...


class Joinable(Protocol):
    """A value that can be joined from the values of several ranks."""

    @classmethod
    def join(cls, parts: Sequence[Self], plan: Sequence[Rows] | None = None) -> Self:
        """Join the parts of all ranks. `plan`: how the argument was divided. Empty if it was not, None if unknown."""
        ...


class Averageable(Protocol):
    """A value that can be averaged over ranks, such as `Metrics`."""

    @classmethod
    def mean(cls, parts: Sequence[Self]) -> Self:
        """Return the mean of the ranks' values, weighted as their type defines."""
        ...


class Addable(Protocol):
    """A value with `+`."""

    def __add__(self, other: Self, /) -> Self: ...


Array: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.generic]]

SplitT = TypeVar(
    "SplitT",
    bound=Splittable | Array | Mapping[str, Splittable | Array] | Sequence[Splittable] | Sequence[Array] | None,
)
JoinT = TypeVar(
    "JoinT", bound=Joinable | Array | Mapping[str, Joinable | Array] | Sequence[Joinable] | Sequence[Array] | None
)
MeanT = TypeVar("MeanT", bound=Averageable | float | Array | Mapping[str, float])
SumT = TypeVar("SumT", bound=Addable | float | Array | Mapping[str, float])
AnyT = TypeVar("AnyT")
Axis = TypeVar("Axis", bound=str, default=DP)
SameAxis = TypeVar("SameAxis", bound=str, default=EVERY)

Shard = TypeAliasType("Shard", Annotated[SplitT, "shard", Axis], type_params=(SplitT, Axis))
"""Split the argument along the axis: each rank gets some of the rows. Arrays are split along their first dim."""
Replicate = TypeAliasType("Replicate", Annotated[AnyT, "replicate"], type_params=(AnyT,))
"""Send the whole argument to each rank. This is what happens without a mark, too."""
Gather = TypeAliasType("Gather", Annotated[JoinT, "gather", Axis], type_params=(JoinT, Axis))
"""Join the ranks' results along the axis, with rows in the order of the sharded argument."""
Mean = TypeAliasType("Mean", Annotated[MeanT, "mean", Axis], type_params=(MeanT, Axis))
"""Average the ranks' results along the axis."""
Sum = TypeAliasType("Sum", Annotated[SumT, "sum", Axis], type_params=(SumT, Axis))
"""Sum the ranks' results along the axis."""
Same = TypeAliasType("Same", Annotated[AnyT, "same", SameAxis], type_params=(AnyT, SameAxis))
"""Return the result that all ranks (or all ranks along the axis) agree on. A disagreement is an error."""

Axes = tuple[str, ...]
EVERY_RANK: Axes = ("*",)


@dataclass(frozen=True)
class Mark:
    """One annotation: `Shard[Batch, TP]` is `Mark("shard", ("tp",), Batch)`."""

    kind: str
    axes: Axes
    type: object

    def __str__(self) -> str:
        name = self.kind.capitalize()
        axes = "" if self.axes in ((), ("dp",), EVERY_RANK) else f", {' x '.join(self.axes)}"
        return f"{name}[{type_name(self.type)}{axes}]" if self.kind != "plain" else type_name(self.type)


def read_mark(hint: object) -> Mark:
    """Read the mark on an annotation: `Mark("plain", (), hint)` if there is none."""
    alias = getattr(hint, "__origin__", None)
    if isinstance(hint, types.UnionType) or alias is typing.Union:
        marked = [read_mark(option) for option in typing.get_args(hint)]
        marks = [mark for mark in marked if mark.kind != "plain"]
        return marks[0] if len(marks) == 1 and len(marked) == 2 else Mark("plain", (), hint)
    if not isinstance(alias, TypeAliasType) or alias not in _KINDS:
        return Mark("plain", (), hint)
    inner, *axis = typing.get_args(hint)
    kind = _KINDS[alias]
    default = {"replicate": (), "same": EVERY_RANK}.get(kind, ("dp",))
    return Mark(kind, typing.get_args(axis[0]) if axis else default, inner)


_KINDS: Mapping[TypeAliasType, str] = {
    Shard: "shard",
    Replicate: "replicate",
    Gather: "gather",
    Mean: "mean",
    Sum: "sum",
    Same: "same",
}


def read_marks(function: Callable[..., object], cls: type) -> tuple[dict[str, Mark], bool]:
    """Read the marks of a class's method by parameter and "return", and whether it streams.

    Annotations may name the class itself, wherever it is defined. NameError if another type is unknown.
    """
    own = {each.__name__: each for each in reversed(cls.__mro__)}
    hints = typing.get_type_hints(function, localns=own, include_extras=True)
    returned = hints.get("return")
    stream = typing.get_origin(returned) in (AsyncIterator, AsyncGenerator)
    if stream:
        hints["return"] = typing.get_args(returned)[0]
    return {name: read_mark(hint) for name, hint in hints.items()}, stream


def holds_mark(hint: object) -> bool:
    """True if an annotation carries a mark or contains one."""
    return read_mark(hint).kind != "plain" or any(map(holds_mark, typing.get_args(hint)))


def type_name(hint: object) -> str:
    """The name of a type as its author wrote it."""
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint).replace("typing.", "")
