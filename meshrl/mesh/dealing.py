"""The arguments that each rank receives: its part of sharded arguments, and all of the others."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import BoundArguments, Parameter
from itertools import product, repeat
from math import prod
from typing import Self, cast

from meshrl.mesh.marks import EVERY_RANK, Axes
from meshrl.mesh.scatter import Plan, split


@dataclass(frozen=True)
class Along:
    """A mesh, seen along some of its axes. Members are numbered with the last axis fastest."""

    parts: int
    """Number of parts of a value that is split over these axes."""
    indices: Sequence[int]
    """The part of each member: its joint coordinate on the axes."""
    replica: Sequence[int]
    """The members whose results are joined, in order: those at 0 on every other axis."""

    @classmethod
    def of(cls, axes: Axes, shape: Mapping[str, int]) -> Self:
        """Return a mesh of this shape along these axes."""
        if axes == EVERY_RANK:
            every = range(prod(shape.values()))
            return cls(len(every), every, every)
        places = [dict(zip(shape, place, strict=True)) for place in product(*map(range, shape.values()))]
        indices = [0] * len(places)
        for axis in axes:
            indices = [index * shape[axis] + place[axis] for index, place in zip(indices, places, strict=True)]
        others = shape.keys() - axes
        first = [number for number, place in enumerate(places) if not any(place[axis] for axis in others)]
        return cls(prod(shape[axis] for axis in axes), indices, sorted(first, key=indices.__getitem__))


def deal(
    bound: BoundArguments, shares: Mapping[str, tuple[Plan, Sequence[int]]], members: int
) -> Iterator[tuple[tuple[object, ...], Mapping[str, object]]]:
    """Yield each member's positional and keyword arguments.

    `shares`: for each divided parameter, its plan and the part of each member.
    """
    for name, (plan, indices) in shares.items():
        if name in bound.arguments:
            kind = bound.signature.parameters[name].kind
            bound.arguments[name] = _each_value(bound.arguments[name], kind, partial(_Dealt.of, plan, indices))
    by_position, by_name = bound.args, bound.kwargs
    if not shares:
        yield from repeat((by_position, by_name), members)
        return
    named = _transposed(by_name.values(), members)
    for given, values in zip(_transposed(by_position, members), named, strict=True):
        yield given, dict(zip(by_name, values, strict=True))


class _Dealt(list[object]):
    """The value of one argument for each member."""

    @classmethod
    def of(cls, plan: Plan, indices: Sequence[int], value: object) -> Self:
        """Divide a value. `indices`: the part of each member."""
        parts = split(value, plan)
        return cls(parts[index] for index in indices)


def _each_value(given: object, kind: object, function: Callable[[object], object]) -> object:
    """Apply a function to an argument, or to each of its values if the parameter takes several."""
    if kind is Parameter.VAR_POSITIONAL:
        return tuple(map(function, cast("tuple[object, ...]", given)))
    if kind is Parameter.VAR_KEYWORD:
        return {name: function(value) for name, value in cast("Mapping[str, object]", given).items()}
    return function(given)


def _transposed(arguments: Collection[object], members: int) -> Iterable[tuple[object, ...]]:
    """Yield the arguments of each member."""
    columns = [each if isinstance(each, _Dealt) else repeat(each, members) for each in arguments]
    return zip(*columns, strict=True) if columns else repeat((), members)
