"""Split the arguments of a call over ranks, and join the results."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from inspect import BoundArguments, Parameter
from itertools import product, repeat
from typing import Self, cast

import numpy as np

from meshrl.errors import ContractError, ReplicasDisagree, shortened
from meshrl.mesh.partition import plan_of
from meshrl.mesh.sharding import EVERY_RANK, Addable, Array, Averageable, Axes, Joinable, Rows, Splittable

Plan = Sequence[Rows]
"""The rows of each part."""
Planner = Callable[[Mapping[str, object], int, Rows | None], Plan]
"""Makes the plan of a call, like `make_plan`."""
UNDIVIDED: Plan = ()
"""The plan of a call that divided no argument: the results of its ranks are concatenated."""


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
            every = range(math.prod(shape.values()))
            return cls(len(every), every, every)
        places = [dict(zip(shape, place, strict=True)) for place in product(*map(range, shape.values()))]
        indices = [0] * len(places)
        for axis in axes:
            indices = [index * shape[axis] + place[axis] for index, place in zip(indices, places, strict=True)]
        others = shape.keys() - axes
        first = [number for number, place in enumerate(places) if not any(place[axis] for axis in others)]
        return cls(math.prod(shape[axis] for axis in axes), indices, sorted(first, key=indices.__getitem__))


def make_plan(values: Mapping[str, object], parts: int, owners: Rows | None = None) -> Plan:
    """Make one plan for all values that a call shards over the same axes.

    `owners`, int64[rows], names the part that takes each row. Without it, a value that knows the cost of its rows (a
    `Batch`) decides. Arrays alone are cut into runs of rows. Returns `UNDIVIDED` if every value is None. Raises
    `ContractError` if row counts differ, or if `owners` does not fit them.
    """
    counts = {f"{name}{path}": len(leaf) for name, value in values.items() for path, leaf in _leaves(value)}
    if not counts:
        return UNDIVIDED
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"`{name}` has {count}" for name, count in counts.items())
        raise ContractError(f"values sharded over one axis in one call need the same number of rows: {listed}")
    if owners is not None:
        rows = next(iter(counts.values()))
        if len(owners) != rows or (rows and not 0 <= owners.min() <= owners.max() < parts):
            raise ContractError(
                f"rows cannot be divided in this way: {len(owners)} owners from {owners.min(initial=0)} to "
                f"{owners.max(initial=0)} are given for {rows} rows and {parts} parts: give each row the number of a "
                f"part, 0 to {parts - 1}"
            )
        return plan_of(owners, parts)
    for value in values.values():
        for _, leaf in _leaves(value):
            if not isinstance(leaf, np.ndarray):
                return leaf.plan(parts)
    return np.array_split(np.arange(next(iter(counts.values()))), parts)


def scatter_args(
    bound: BoundArguments, shares: Mapping[str, tuple[Plan, Sequence[int]]], members: int
) -> Iterator[tuple[tuple[object, ...], Mapping[str, object]]]:
    """Yield each member's positional and keyword arguments.

    `shares`: for each divided parameter, its plan and the part of each member.
    """
    for name, (plan, indices) in shares.items():
        if name in bound.arguments:
            kind = bound.signature.parameters[name].kind
            bound.arguments[name] = _each_value(bound.arguments[name], kind, partial(_PerMember.of, plan, indices))
    by_position, by_name = bound.args, bound.kwargs
    if not shares:
        yield from repeat((by_position, by_name), members)
        return
    named = _transposed(by_name.values(), members)
    for given, values in zip(_transposed(by_position, members), named, strict=True):
        yield given, dict(zip(by_name, values, strict=True))


class _PerMember(list[object]):
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
    columns = [each if isinstance(each, _PerMember) else repeat(each, members) for each in arguments]
    return zip(*columns, strict=True) if columns else repeat((), members)


def split(value: object, plan: Plan) -> Sequence[object]:
    """Split a value. Each part has the same tree of containers, with the part's rows of every leaf."""
    if value is None:
        return [None] * len(plan)
    if isinstance(value, Mapping):
        items = [split(item, plan) for item in value.values()]
        return [dict(zip(value, [item[part] for item in items], strict=True)) for part in range(len(plan))]
    if isinstance(value, list | tuple):
        items = [split(item, plan) for item in value]
        return [type(value)([item[part] for item in items]) for part in range(len(plan))]
    if isinstance(value, np.ndarray):
        return [value[rows] for rows in plan]
    return _splittable(value).parts(plan)


def gather(parts: Sequence[object], plan: Plan | None) -> object:
    """Join one value of each rank, with rows in the order of the sharded argument."""

    def leaf(values: Sequence[object]) -> object:
        if isinstance(values[0], np.ndarray):
            return _gather_arrays(cast("Sequence[Array]", values), plan)
        return cast("type[Joinable]", type(values[0])).join(cast("Sequence[Joinable]", values), plan)

    return _reduce(parts, leaf)


def mean(parts: Sequence[object]) -> object:
    """Average one value of each rank, container by container."""

    def leaf(values: Sequence[object]) -> object:
        if isinstance(values[0], int | float | np.ndarray | np.generic):
            return cast("float", _total(values)) / len(values)
        return cast("type[Averageable]", type(values[0])).mean(cast("Sequence[Averageable]", values))

    return _reduce(parts, leaf)


def total(parts: Sequence[object]) -> object:
    """Sum one value of each rank, container by container."""
    return _reduce(parts, _total)


def check_same(parts: Sequence[object], ranks: Sequence[int], where: str) -> None:
    """Raise `ReplicasDisagree`, which names the ranks, unless all of them returned the same."""
    for rank, part in zip(ranks[1:], parts[1:], strict=True):
        if not _equal(parts[0], part):
            raise ReplicasDisagree(
                f"{where} is marked Same, but rank {ranks[0]} returned {shortened(parts[0])} "
                f"and rank {rank} returned {shortened(part)}; make them agree, return Gather, or call each()"
            )


def _leaves(value: object, path: str = "") -> Iterator[tuple[str, Splittable | Array]]:
    if value is None:
        return
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    else:
        yield path, value if isinstance(value, np.ndarray) else _splittable(value)


def _splittable(value: object) -> Splittable:
    if not hasattr(value, "parts"):
        raise ContractError(
            f"{type(value).__name__} cannot be split over ranks: shard a Batch, an array, or a dict or list of them"
        )
    return cast("Splittable", value)


def _gather_arrays(parts: Sequence[Array], plan: Plan | None) -> Array:
    joined: Array = np.concatenate(parts)
    if not plan:
        return joined
    if [len(part) for part in parts] != [len(rows) for rows in plan]:
        raise ContractError(
            f"ranks were given {[len(rows) for rows in plan]} rows and returned arrays of "
            f"{[len(part) for part in parts]}: return one element a row, or a Batch made from the argument's rows"
        )
    ordered = np.empty_like(joined)
    ordered[np.concatenate(list(plan))] = joined
    return ordered


def _reduce(parts: Sequence[object], join: Callable[[Sequence[object]], object]) -> object:
    _check_alike(parts)
    first = parts[0]
    if isinstance(first, Mapping):
        return {key: _reduce([cast("Mapping[str, object]", part)[key] for part in parts], join) for key in first}
    if isinstance(first, list | tuple):
        lists = cast("Sequence[Sequence[object]]", parts)
        return type(first)(_reduce(values, join) for values in zip(*lists, strict=True))
    return None if first is None else join(parts)


def _check_alike(parts: Sequence[object]) -> None:
    """Raise `ContractError` if some ranks returned None, other keys, or lists of other lengths."""
    none = [rank for rank, part in enumerate(parts) if part is None]
    if none and len(none) < len(parts):
        raise ContractError(f"parts {none} are None and the others are not: return an empty Batch instead of None")
    keys = [sorted(part) for part in parts if isinstance(part, Mapping)]
    if any(each != keys[0] for each in keys):
        raise ContractError(f"ranks returned dicts with different keys, {keys}: return the same keys from each")
    lengths = [len(part) for part in parts if isinstance(part, list | tuple)]
    if len(set(lengths)) > 1:
        raise ContractError(
            f"ranks returned lists of {lengths} values, which are joined one by one: return the same number from each "
            "rank"
        )


def _total(values: Sequence[object]) -> object:
    addable = cast("Sequence[Addable]", values)
    return reduce(lambda one, other: one + other, addable)


def _equal(one: object, other: object) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=one.dtype.kind in "fc")
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return one == other or (math.isnan(one) and math.isnan(other))
    return bool(one == other)
