"""The content of a report page, as a plain value for its JSON."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import entry_points
from itertools import pairwise
from typing import cast

import numpy as np
import numpy.typing as npt
import tomli_w

from meshrl.events import Delivery, Gauge, Restart, Step, Swap
from meshrl.observe.analysis import Idleness, Overlap, Share, idleness, overlap, side
from meshrl.observe.lanes import RANKS, Lane, Names, make_lanes, rounded
from meshrl.observe.quantities import FRONT, quantity
from meshrl.observe.reading import Line, Record

POINTS = 1000
"""Points of a curve at most. Beyond it, neighbours are averaged."""
GAUGE = 240
"""Points of a gauge at most. Beyond it, means over equal times are shown."""
STEPS = 120
"""Bars of steps at most. Beyond it, neighbours are averaged."""
SAMPLES = 300
"""Samples at most, spread over the run."""
TEXT = 4000
"""Characters of a sample's text at most."""

_NO_CURVES = {"step", "seconds"}


@dataclass(frozen=True)
class Curve:
    """A number over steps or seconds."""

    name: str
    x: list[float]
    y: list[float | None]
    band: tuple[list[float], list[float]] | None = None
    """Lowest and highest value around each point, if `y` are means."""
    unit: str = ""
    hue: str = "plain"
    """The side that gives it its colour."""


@dataclass(frozen=True)
class Bounds:
    """Seconds by side in each step, column by column."""

    first: list[int]
    """Number of the first step of each bar."""
    last: list[int]
    both: list[float]
    rollout_alone: list[float]
    training_alone: list[float]
    scoring_alone: list[float]
    sync: list[float]
    other: list[float]
    efficiency: list[float]


@dataclass(frozen=True)
class IdleRow:
    """A row of the table of idle time."""

    mesh: str
    rank: int
    busy: float
    idle: float
    reasons: list[tuple[str, str, float]]
    """Reason, what blocked it, and seconds, the longest first."""


@dataclass(frozen=True)
class Content:
    """The content of a report page."""

    name: str
    status: str
    notes: list[str]
    summary: Line
    units: dict[str, str]
    """Units of the summary's numbers. Numbers before and after training share an entry."""
    names: list[str]
    sides: list[str]
    """Side of each name: rollout, training, scoring, sync or wait."""
    texts: list[str]
    lanes: list[Lane]
    steps: list[tuple[int, float, float]]
    swaps: list[tuple[float, int]]
    total: Share | None
    efficiency: float | None
    """Overlap efficiency, if rollouts run ahead."""
    busy: dict[str, float]
    """Mean share of busy time over each side's ranks."""
    bound: dict[str, int]
    """Number of steps that each side bounded."""
    bounds: Bounds | None
    idle: list[IdleRow]
    curves: list[Curve]
    front: int
    """Number of curves at the top."""
    gauges: list[Curve]
    staleness: list[int]
    dropped: dict[str, int]
    samples: list[Line]
    config: str


def make_content(record: Record) -> Content:
    """Make the content of a run's page. Large runs are thinned, and `notes` says how."""
    events = record.events
    notes = [*record.notes, *map(_told, (event for event in events if isinstance(event, Restart)))]
    names, texts = Names(), Names()
    idle = idleness(events)
    lanes, told = make_lanes(events, idle, names, texts)
    notes += told
    shares = overlap(events)
    steps = [event for event in events if isinstance(event, Step)]
    known = bool(lanes) and bool(steps)
    deliveries = [event for event in events if isinstance(event, Delivery)]
    table = record.table
    curves = _curves(record.metrics, notes) + _curves(record.evaluations, notes)
    front = sorted(filter(_is_in_front, curves), key=lambda curve: FRONT.index(curve.name))
    return Content(
        name=record.name,
        status=str(record.summary.get("status", "not ended")),
        notes=notes,
        summary=record.summary or _so_far(record),
        units=_units([*record.summary, "reward"]),
        names=names.all,
        sides=["wait" if " waits for " in name else side(name.rpartition(".")[2]) for name in names.all],
        texts=texts.all,
        lanes=lanes,
        steps=[(each.step, rounded(each.began), rounded(each.ended)) for each in steps],
        swaps=[(rounded(event.ended), event.version) for event in events if isinstance(event, Swap)],
        total=shares.total if known else None,
        efficiency=shares.efficiency if known and table.get("ahead") else None,
        busy={str(of): share for of, share in shares.busy.items()} if known else {},
        bound=dict(Counter(step.bound for step in shares.steps)),
        bounds=_bounds(shares, notes) if known else None,
        idle=[_idle_row(each) for each in idle[:RANKS]],
        curves=[*front, *(curve for curve in curves if curve not in front)],
        front=len(front),
        gauges=_gauges([event for event in events if isinstance(event, Gauge)]),
        staleness=_staleness(deliveries),
        dropped=dict(sum((Counter(each.dropped) for each in deliveries), Counter())),
        samples=_samples(record.samples, notes),
        config=tomli_w.dumps(_used(table)) if table else record.config,
    )


def _told(restart: Restart) -> str:
    first = restart.error.partition("\n")[0]
    return f"A machine failed, and the run was begun again (restart {restart.number}): {first}."


def _used(table: Mapping[str, object]) -> dict[str, object]:
    """Leave out empty tables, and in a role the tables of other backends."""
    others = _backends() - {table.get("backend")} if "backend" in table else set[str]()
    found: dict[str, object] = {}
    for key, value in table.items():
        kept = _used(cast("Mapping[str, object]", value)) if isinstance(value, dict) else value
        if kept != {} and key not in others:
            found[key] = kept
    return found


@lru_cache(maxsize=1)
def _backends() -> frozenset[str]:
    """Names of the installed backends. Cached, because the search is slow."""
    return frozenset(entry_points(group="meshrl.backends").names)


def _units(names: Sequence[str]) -> dict[str, str]:
    plain = [name.removesuffix("_before").removesuffix("_after") for name in names]
    return {name: quantity(name).unit for name in plain}


def _is_in_front(curve: Curve) -> bool:
    """True for a curve that users look at first and that varies."""
    there = [value for value in curve.y if value is not None]
    return curve.name in FRONT and (len(there) < 2 or len(set(there)) > 1)


def _so_far(record: Record) -> Line:
    """A summary of a run that has not written one."""
    rewards = [line["reward"] for line in record.metrics if isinstance(line.get("reward"), float | int)]
    ends = [line["seconds"] for line in record.metrics[-1:] if "seconds" in line]
    return {
        "steps": len(record.metrics),
        "wall_s": ends[0] if ends else None,
        "first_reward": rewards[0] if rewards else None,
        "last_reward": rewards[-1] if rewards else None,
    }


def _bounds(shares: Overlap, notes: list[str]) -> Bounds:
    groups = np.array_split(np.arange(len(shares.steps)), min(STEPS, len(shares.steps)))
    if len(groups) < len(shares.steps):
        notes.append(
            f"What bounded a step: {len(groups)} bars of {len(shares.steps):,} steps, each a mean of neighbours."
        )

    def mean(name: str) -> list[float]:
        values = np.array([getattr(step, name) for step in shares.steps], np.float64)
        return [rounded(float(values[group].mean())) for group in groups]

    return Bounds(
        first=[shares.numbers[int(group[0])] for group in groups],
        last=[shares.numbers[int(group[-1])] for group in groups],
        both=mean("both"),
        rollout_alone=mean("rollout_alone"),
        training_alone=mean("training_alone"),
        scoring_alone=mean("scoring_alone"),
        sync=mean("sync"),
        other=mean("other"),
        efficiency=mean("efficiency"),
    )


def _idle_row(each: Idleness) -> IdleRow:
    reasons = [(reason.why, reason.blocked, rounded(reason.seconds)) for reason in each.reasons]
    return IdleRow(each.mesh, each.rank, rounded(each.busy), rounded(each.idle), reasons)


def _curves(metrics: Sequence[Line], notes: list[str]) -> list[Curve]:
    """A curve for each number of the steps."""
    names = list(dict.fromkeys(name for line in metrics for name in line if name not in _NO_CURVES))
    if len(metrics) > POINTS:
        notes.append(f"Curves have {POINTS:,} points for {len(metrics):,} steps, each a mean of neighbours.")
    steps = _numbers([line.get("step") for line in metrics])
    return [_curve(name, steps, _numbers([line.get(name) for line in metrics])) for name in names]


def _numbers(values: Sequence[object]) -> npt.NDArray[np.float64]:
    return np.array([_number(value) for value in values])


def _number(value: object) -> float:
    """The number. NaN, a gap in the curve, for other values and for integers beyond float64."""
    try:
        return float(value) if isinstance(value, float | int) else math.nan
    except OverflowError:
        return math.nan


def _curve(name: str, x: npt.NDArray[np.float64], y: npt.NDArray[np.float64]) -> Curve:
    if len(x) <= POINTS:
        return _named(name, x.tolist(), [_digits(value) if math.isfinite(value) else None for value in y.tolist()])
    groups = np.array_split(np.arange(len(x)), POINTS)
    means: list[float | None] = []
    for group in groups:
        there = y[group][np.isfinite(y[group])]
        means.append(_digits(float(there.mean())) if len(there) else None)
    return _named(name, [float(x[group[0]]) for group in groups], means)


def _digits(value: float) -> float:
    return float(f"{value:.6g}")


def _named(
    name: str, x: list[float], y: list[float | None], band: tuple[list[float], list[float]] | None = None
) -> Curve:
    known = quantity(name)
    return Curve(name, x, y, band, known.unit, known.hue)


def _gauges(events: Sequence[Gauge]) -> list[Curve]:
    """A gauge holds its value until the next event. One with many events becomes means over equal times."""
    found: list[Curve] = []
    for name in sorted({event.name for event in events}):
        own = sorted((event for event in events if event.name == name), key=lambda event: event.at)
        at = np.array([event.at for event in own])
        value = np.array([event.value for event in own], np.float64)
        many = len(own) > GAUGE and at[-1] > at[0]
        found.append(_means(name, at, value) if many else _named(name, at.round(5).tolist(), value.tolist()))
    return found


def _means(name: str, at: npt.NDArray[np.float64], value: npt.NDArray[np.float64]) -> Curve:
    edges = np.linspace(at[0], at[-1], GAUGE + 1)
    area = np.concatenate([[0.0], np.cumsum(np.diff(at) * value[:-1])])
    means = np.diff(np.interp(edges, at, area)) / np.diff(edges)
    # The value at the beginning of a piece is one of its values.
    pieces = np.searchsorted(at, edges, "right")
    held = [value[max(0, first - 1) : last] for first, last in pairwise(pieces)]
    band = [float(each.min()) for each in held], [float(each.max()) for each in held]
    return _named(name, edges[:-1].round(5).tolist(), means.round(4).tolist(), band)


def _staleness(deliveries: Sequence[Delivery]) -> list[int]:
    """Number of rows that were 0, 1, 2, ... publications behind at delivery."""
    counts = np.zeros(max((len(each.staleness) for each in deliveries), default=0), np.int64)
    for each in deliveries:
        counts[: len(each.staleness)] += np.array(each.staleness, np.int64)
    whole: list[int] = counts.tolist()
    return whole


def _samples(samples: Sequence[Line], notes: list[str]) -> list[Line]:
    chosen = [samples[index] for index in _spread(len(samples), SAMPLES)]
    if len(chosen) < len(samples):
        notes.append(f"{len(chosen)} of {len(samples):,} samples are shown.")
    return [{name: _cut(value) for name, value in sample.items()} for sample in chosen]


def _cut(value: object) -> object:
    return f"{value[:TEXT]} … ({len(value):,} characters)" if isinstance(value, str) and len(value) > TEXT else value


def _spread(count: int, most: int) -> list[int]:
    """At most `most` of the numbers below `count`, evenly spread, including the first and the last."""
    chosen: list[int] = np.unique(np.linspace(0, count - 1, min(most, count)).astype(np.int64)).tolist()
    return chosen
