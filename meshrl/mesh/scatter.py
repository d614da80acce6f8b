"""Divide rows over ranks, split the arguments of a call accordingly, and join the results."""

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from inspect import BoundArguments
from itertools import pairwise, product, repeat
from typing import Self, cast

import numpy as np

from meshrl.errors import ContractError, ReplicasDisagree, shortened
from meshrl.mesh.sharding import EVERY_RANK, Addable, Array, Averageable, Axes, Joinable, Rows, Splittable

Plan = Sequence[Rows]
"""The rows of each part."""
Planner = Callable[[Mapping[str, object], int, Rows | None], Plan]
"""Makes the plan of a call, like `make_plan`."""
_EVEN = 256
"""Runs of rows count as even if the heaviest exceeds the lightest by at most the mean divided by this."""
UNDIVIDED: Plan = ()
"""The plan of a call that divided no argument: the results of its ranks are concatenated."""


@dataclass(frozen=True)
class MeshView:
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


def plan_of(owners: Rows, parts: int) -> list[Rows]:
    """Convert the owner of each row into the rows of each part, ascending."""
    order = owners.argsort(kind="stable")
    ends = np.bincount(owners, minlength=parts).cumsum().tolist()
    return [order[start:end] for start, end in pairwise([0, *ends])]


def even_plan(costs: Rows, parts: int) -> list[Rows]:
    """Return the rows of each part, so that parts cost about the same. `costs`: int64[rows].

    Parts are runs of adjacent rows if these are even, at most one row's cost apart. Otherwise each row goes to the
    lightest part, costliest row first. Two parts differ by at most the cost of one row.
    """
    ends = np.concatenate([[0], costs.cumsum()])
    if total := int(ends[-1]):
        wanted = total * np.arange(1, parts) / parts
        after = ends.searchsorted(wanted)
        nearest = after - (wanted - ends[after - 1] < ends[after] - wanted)
        loads = [end - start for start, end in pairwise([0, *ends[nearest].tolist(), total])]
        spread = max(loads) - min(loads)
        if not spread or spread <= min(int(costs.max()), total / parts / _EVEN):
            rows = np.arange(len(costs))
            return [rows[start:end] for start, end in pairwise([0, *nearest.tolist(), len(costs)])]
    return plan_of(lightest(costs, np.zeros(parts, np.int64)), parts)


def lightest(costs: Rows, loads: Rows, homes: Rows | None = None, slack: int = 0) -> Rows:
    """Choose a part for each row, int64[rows]: the costliest row first, each to the lightest part at that time.

    `costs`: int64[rows]. `loads`, int64[parts]: the present load of each part. A part that receives rows ends at most
    one row's cost above the lightest (Graham 1969, LPT). Ties go to the part with the fewest rows, then to the first.
    `homes`, int64[rows], -1 for none: a row goes to this part while it exceeds the lightest by at most `slack`, and
    then adds its cost.
    """
    parts = len(loads)
    order = (-costs).argsort(kind="stable")
    # One number for each part orders by load, then rows, then place. A heap of tuples is half as fast.
    unit = parts * (len(costs) + 1)
    now = [load * unit + part for part, load in enumerate(loads.tolist())]
    heap = sorted(now)
    taken: list[int] = []
    for cost, home in zip(costs[order].tolist(), repeat(-1) if homes is None else homes[order].tolist(), strict=False):
        while (first := heap[0]) != now[first % parts]:  # the part has received rows since
            heapq.heapreplace(heap, now[first % parts])
        part = home if home >= 0 and now[home] // unit - first // unit <= slack else first % parts
        now[part] += cost * unit + parts
        taken.append(part)
    owners = np.empty(len(costs), np.int64)
    owners[order] = taken
    return owners


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
) -> Sequence[tuple[tuple[object, ...], Mapping[str, object]]]:
    """Return each member's positional and keyword arguments.

    `shares`: for each divided parameter, its plan and the part of each member. A parameter that takes several values is
    a tuple or a dict here, whose values are divided.
    """
    divided = [
        (name, split(bound.arguments[name], plan), indices)
        for name, (plan, indices) in shares.items()
        if name in bound.arguments
    ]
    if not divided:
        return [(bound.args, bound.kwargs)] * members
    scattered = []
    for member in range(members):
        for name, parts, indices in divided:
            bound.arguments[name] = parts[indices[member]]
        scattered.append((bound.args, bound.kwargs))
    return scattered


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
    return cast("Splittable", value).parts(plan)


def joined(kind: str, parts: Sequence[object], plan: Plan | None = None) -> object:
    """Join one value of each rank, container by container. `kind`: "gather", "mean" or "sum".

    `plan`: how the argument was divided, whose order of rows gathered values get. Raises `ContractError` if some ranks
    returned None, other keys, or lists of other lengths.
    """
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
    first = parts[0]
    if isinstance(first, Mapping):
        tables = cast("Sequence[Mapping[str, object]]", parts)
        return {key: joined(kind, [table[key] for table in tables], plan) for key in first}
    if isinstance(first, list | tuple):
        lists = cast("Sequence[Sequence[object]]", parts)
        return type(first)(joined(kind, values, plan) for values in zip(*lists, strict=True))
    if first is None:
        return None
    return _gathered(parts, plan) if kind == "gather" else _mean(parts) if kind == "mean" else _total(parts)


def _gathered(parts: Sequence[object], plan: Plan | None) -> object:
    """Concatenate values, with rows in the order of the sharded argument."""
    if not isinstance(parts[0], np.ndarray):
        return cast("type[Joinable]", type(parts[0])).join(cast("Sequence[Joinable]", parts), plan)
    arrays = cast("Sequence[Array]", parts)
    whole: Array = np.concatenate(arrays)
    if not plan:
        return whole
    if [len(part) for part in arrays] != [len(rows) for rows in plan]:
        raise ContractError(
            f"ranks were given {[len(rows) for rows in plan]} rows and returned arrays of "
            f"{[len(part) for part in arrays]}: return one element a row, or a Batch made from the argument's rows"
        )
    ordered = np.empty_like(whole)
    ordered[np.concatenate(list(plan))] = whole
    return ordered


def _mean(parts: Sequence[object]) -> object:
    if isinstance(parts[0], int | float | np.ndarray | np.generic):
        return cast("float", _total(parts)) / len(parts)
    return cast("type[Averageable]", type(parts[0])).mean(cast("Sequence[Averageable]", parts))


def _total(parts: Sequence[object]) -> object:
    return reduce(lambda one, other: one + other, cast("Sequence[Addable]", parts))


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
    elif not isinstance(value, np.ndarray) and not hasattr(value, "parts"):
        raise ContractError(
            f"{type(value).__name__} cannot be split over ranks: shard a Batch, an array, or a dict or list of them"
        )
    else:
        yield path, cast("Splittable | Array", value)


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
