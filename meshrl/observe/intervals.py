"""Sets of moments as sorted, disjoint intervals of seconds, float64[n, 2], with set operations."""

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Intervals: TypeAlias = npt.NDArray[np.float64]
"""Beginnings and ends in seconds, `float64[intervals, 2]`."""


def union(pairs: Iterable[tuple[float, float]] | Intervals) -> Intervals:
    """The moments in any of the pairs (began, ended), in seconds, which may overlap and be in any order."""
    given = np.asarray(pairs if isinstance(pairs, np.ndarray) else list(pairs), np.float64).reshape(-1, 2)
    given = given[given[:, 1] > given[:, 0]]
    if not len(given):
        return given
    given = given[np.argsort(given[:, 0], kind="stable")]
    reached = np.maximum.accumulate(given[:, 1])
    first = np.concatenate([[True], given[1:, 0] > reached[:-1]])
    last = np.concatenate([first[1:], [True]])
    return np.stack([given[first, 0], reached[last]], axis=1)


def intersect(one: Intervals, other: Intervals) -> Intervals:
    """The moments in both."""
    pieces, middles = _pieces(one, other)
    return union(pieces[within(one, middles) & within(other, middles)])


def subtract(one: Intervals, other: Intervals) -> Intervals:
    """The moments of `one` that are not in `other`."""
    pieces, middles = _pieces(one, other)
    return union(pieces[within(one, middles) & ~within(other, middles)])


def seconds(one: Intervals) -> float:
    """Total duration."""
    return float((one[:, 1] - one[:, 0]).sum())


def seconds_in(one: Intervals, windows: Intervals) -> npt.NDArray[np.float64]:
    """Duration in each of the windows, [n, 2], which may touch or overlap: float64[n]."""
    if not len(one):
        return np.zeros(len(windows))
    passed = np.zeros(one.size)
    passed[1::2] = np.cumsum(one[:, 1] - one[:, 0])
    passed[2::2] = passed[1:-1:2]
    before: npt.NDArray[np.float64] = np.interp(windows, one.ravel(), passed)
    return before[:, 1] - before[:, 0]


def running(pairs: Intervals, edges: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Number of pairs that run between each two edges: int64[len(edges) - 1]. All their ends must be edges."""
    began, ended = (np.bincount(np.searchsorted(edges, ends), minlength=len(edges)) for ends in pairs.T)
    count: npt.NDArray[np.int64] = np.cumsum(began - ended)[:-1]
    return count


def alone(pairs: Intervals) -> npt.NDArray[np.float64]:
    """Seconds that each pair would last without sharing its rank, float64[n]. Each of k concurrent pairs has 1/k."""
    edges = np.unique(pairs)
    count = running(pairs, edges)
    share = np.divide(np.diff(edges), count, out=np.zeros(len(count)), where=count > 0)
    served = np.append(0.0, np.cumsum(share))
    began, ended = (served[np.searchsorted(edges, ends)] for ends in pairs.T)
    lasted: npt.NDArray[np.float64] = ended - began
    return lasted


def within(one: Intervals, moments: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """Whether each moment is in the set: bool[n]."""
    if not len(one):
        return np.zeros(len(moments), np.bool_)
    nearest = np.searchsorted(one[:, 0], moments, "right") - 1
    inside: npt.NDArray[np.bool_] = (nearest >= 0) & (moments < one[nearest, 1])
    return inside


def tracks(began: Sequence[float], ended: Sequence[float]) -> list[int]:
    """The lowest row for each span, in order of `began`, such that spans in a row do not overlap."""
    chosen: list[int] = []
    free: list[int] = []
    taken: list[tuple[float, int]] = []
    for start, stop in zip(began, ended, strict=True):
        while taken and taken[0][0] <= start:
            heappush(free, heappop(taken)[1])
        row = heappop(free) if free else len(taken)
        heappush(taken, (stop, row))
        chosen.append(row)
    return chosen


def _pieces(one: Intervals, other: Intervals) -> tuple[Intervals, npt.NDArray[np.float64]]:
    """The pieces between all ends of both sets, and their middles."""
    edges = np.unique(np.concatenate([one.ravel(), other.ravel()]))
    return np.stack([edges[:-1], edges[1:]], axis=1), (edges[:-1] + edges[1:]) / 2
