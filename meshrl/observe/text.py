"""Where a run's time went, as lines for a terminal."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeAlias

import numpy as np

from meshrl.events import Delivery, Step
from meshrl.observe.analysis import idleness, overlap
from meshrl.observe.run_files import Record

_RANKS: Final = 16
"""Ranks at most whose idle time is reported."""
BOUND: Final = {"sync": "new weights"}
"""Names of bottlenecks that differ from the names of a step's parts."""
_PARTS: Final = {
    "both": "both at once",
    "rollout_alone": "rollout alone",
    "training_alone": "training alone",
    "scoring_alone": "scoring",
    "sync": "new weights",
    "other": "other",
}
"""The parts of a step's time, named as on the page."""

IdleLine: TypeAlias = tuple[str, int, float, Mapping[str, float]]
"""A rank's mesh and number, idle seconds per step, and these by reason, the longest first."""


def run_lines(record: Record) -> list[tuple[str, str]]:
    """A run's bottlenecks, staleness and idle ranks, as names with values.

    Empty if the events contain no steps. The names are those that `meshrl simulate` prints.
    """
    lengths = [event.ended - event.began for event in record.events if isinstance(event, Step)]
    if not lengths:
        return []
    count, shares, idle = len(lengths), overlap(record.events), idleness(record.events)
    total, bound = shares.total, Counter(step.bound for step in shares.steps)
    staleness, dropped = deliveries_of(event for event in record.events if isinstance(event, Delivery))
    ranks = [
        (rank.mesh, rank.rank, rank.idle / count, {reason.why: reason.seconds / count for reason in rank.reasons})
        for rank in idle[:_RANKS]
    ]
    parts = {text: f"{getattr(total, name) / (total.seconds or 1.0):.0%}" for name, text in _PARTS.items()}
    # R, T and C of the page.
    sides = {"rollout": total.rollout, "training": total.training, "scoring": total.scoring}
    lines = [
        ("step time, mean", duration(float(np.mean(lengths)))),
        ("step time, median", duration(float(np.median(lengths)))),
        ("parts of a step", _listed(parts)),
        ("busy in a step", _listed({name: duration(busy / count) for name, busy in sides.items() if busy})),
    ]
    if total.both:  # on shared cores, a run with `ahead=0` is faster than that
        lines.append(("in turns, at these speeds", duration(sum(sides.values()) / count)))
    bounds: dict[str, float] = {name: steps / count for name, steps in bound.most_common()}
    lines += time_lines(shares.efficiency, bounds, staleness, dropped, ranks)
    if (more := len(idle) - _RANKS) > 0:
        lines.append(("other ranks", f"{more:,} more, which the page shows"))
    return lines


def time_lines(
    efficiency: float,
    bound: Mapping[str, float],
    staleness: Sequence[int],
    dropped: Mapping[str, int],
    idle: Iterable[IdleLine],
) -> list[tuple[str, str]]:
    """Lines common to forecasts and runs. `bound`: shares of the steps. `staleness`: rows by publications behind."""
    lines = [
        ("overlap efficiency", f"{efficiency:.2f}"),
        ("bound by", _listed({BOUND.get(name, name): f"{share:.0%}" for name, share in bound.items() if share})),
        ("rows by staleness", _listed({str(age): f"{rows:,}" for age, rows in enumerate(staleness)})),
        ("groups dropped", _listed({why: f"{count:,}" for why, count in dropped.items()})),
    ]
    for mesh, rank, seconds, reasons in idle:
        why = _listed({reason: duration(part) for reason, part in reasons.items()})
        lines.append((f"{mesh} {rank}, idle a step", f"{duration(seconds)} ({why})"))
    return lines


def deliveries_of(deliveries: Iterable[Delivery]) -> tuple[list[int], dict[str, int]]:
    """Count the rows that were 0, 1, 2, ... publications behind, and dropped groups by reason."""
    staleness: Counter[int] = Counter()
    dropped: Counter[str] = Counter()
    for delivery in deliveries:
        staleness.update(dict(enumerate(delivery.staleness)))
        dropped.update(delivery.dropped)
    return [staleness[age] for age in range(max(staleness, default=-1) + 1)], dict(+dropped)


def duration(seconds: float) -> str:
    """Write a number of seconds with its unit, as in `12.5 ms` or `3.20 s`."""
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _listed(values: Mapping[str, str]) -> str:
    """Write names with values on one line."""
    return ", ".join(f"{name}: {value}" for name, value in values.items()) or "none"
