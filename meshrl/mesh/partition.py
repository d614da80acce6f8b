"""Divide numbered items into parts of about equal weight."""

import heapq
from itertools import pairwise, repeat

import numpy as np

from meshrl.mesh.sharding import Rows

_EVEN = 256
"""Runs of rows count as even if the heaviest exceeds the lightest by at most the mean divided by this."""


def plan_of(owners: Rows, parts: int) -> list[Rows]:
    """Convert the owner of each row into the rows of each part, ascending."""
    order = owners.argsort(kind="stable")
    ends = np.bincount(owners, minlength=parts).cumsum().tolist()
    return [order[start:end] for start, end in pairwise([0, *ends])]


def even_plan(costs: Rows, parts: int) -> list[Rows]:
    """Return the rows of each part, so that parts cost about the same. `costs`: int64[rows].

    Parts are runs of adjacent rows if these are even. Otherwise each row goes to the lightest part, costliest row
    first. Two parts differ by at most the cost of one row.
    """
    return _even_runs(costs, parts) or plan_of(lightest(costs, np.zeros(parts, np.int64)), parts)


def _even_runs(costs: Rows, parts: int) -> list[Rows] | None:
    """Return the rows of each part as even runs, at most one row's cost apart. None if there are no such runs."""
    ends = np.concatenate([[0], costs.cumsum()])
    total = int(ends[-1])
    if not total:
        return None
    wanted = total * np.arange(1, parts) / parts
    after = ends.searchsorted(wanted)
    nearest = after - (wanted - ends[after - 1] < ends[after] - wanted)
    loads = [end - start for start, end in pairwise([0, *ends[nearest].tolist(), total])]
    spread = max(loads) - min(loads)
    if spread and spread > min(int(costs.max()), total / parts / _EVEN):
        return None
    rows = np.arange(len(costs))
    return [rows[start:end] for start, end in pairwise([0, *nearest.tolist(), len(costs)])]


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
