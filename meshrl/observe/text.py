"""Where a run's time went, as lines for a terminal."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from meshrl.events import Delivery, Step
from meshrl.observe.analysis import Share, idleness, overlap
from meshrl.observe.reading import Record

_RANKS: Final = 16
"""Ranks at most whose idle time is reported."""

BOUND: Final = {"sync": "new weights"}
"""Names of bottlenecks that differ from the names of a step's parts."""

Idle = tuple[str, int, float, Mapping[str, float]]
"""A rank's mesh and number, idle seconds per step, and these by reason, the longest first."""


def run_lines(record: Record) -> list[tuple[str, str]]:
    """A run's bottlenecks, staleness and idle ranks, as names with values.

    Empty if the events contain no steps. The names are those that `meshrl simulate` prints.
    """
    lengths = [event.ended - event.began for event in record.events if isinstance(event, Step)]
    if not lengths:
        return []
    shares, idle = overlap(record.events), idleness(record.events)
    bound = Counter(step.bound for step in shares.steps)
    staleness, dropped = deliveries_of(event for event in record.events if isinstance(event, Delivery))
    count = len(lengths)
    ranks = [
        (rank.mesh, rank.rank, rank.idle / count, {reason.why: reason.seconds / count for reason in rank.reasons})
        for rank in idle[:_RANKS]
    ]
    told = [
        ("step time, mean", duration(float(np.mean(lengths)))),
        ("step time, median", duration(float(np.median(lengths)))),
        ("parts of a step", _parts(shares.total)),
        ("busy in a step", _sides(shares.total, count)),
        *([("in turns, at these speeds", duration(_turns(shares.total) / count))] if shares.total.both else []),
        *time_lines(
            shares.efficiency,
            {name: steps / count for name, steps in bound.most_common()},
            [staleness[age] for age in range(max(staleness, default=-1) + 1)],
            dropped,
            ranks,
        ),
    ]
    if (more := len(idle) - _RANKS) > 0:
        told.append(("other ranks", f"{more:,} more, which the page shows"))
    return told


def time_lines(
    efficiency: float,
    bound: Mapping[str, float],
    staleness: Sequence[int],
    dropped: Mapping[str, int],
    idle: Iterable[Idle],
) -> list[tuple[str, str]]:
    """Lines common to forecasts and runs. `bound`: shares of the steps. `staleness`: rows by publications behind."""
    told = [
        ("overlap efficiency", f"{efficiency:.2f}"),
        ("bound by", listed({BOUND.get(name, name): f"{share:.0%}" for name, share in bound.items() if share})),
        ("rows by staleness", listed({str(age): f"{rows:,}" for age, rows in enumerate(staleness)})),
        ("groups dropped", listed({why: f"{count:,}" for why, count in dropped.items()})),
    ]
    for mesh, rank, seconds, reasons in idle:
        why = listed({reason: duration(part) for reason, part in reasons.items()})
        told.append((f"{mesh} {rank}, idle a step", f"{duration(seconds)} ({why})"))
    return told


def deliveries_of(deliveries: Iterable[Delivery]) -> tuple[Counter[int], Counter[str]]:
    """Count rows by the number of versions they were behind, and dropped groups by reason."""
    staleness: Counter[int] = Counter()
    dropped: Counter[str] = Counter()
    for delivery in deliveries:
        staleness.update(dict(enumerate(delivery.staleness)))
        dropped.update(delivery.dropped)
    return staleness, dropped


def listed(values: Mapping[str, str]) -> str:
    """Write names with values on one line."""
    return ", ".join(f"{name}: {value}" for name, value in values.items()) or "none"


def duration(seconds: float) -> str:
    """Write a number of seconds with its unit, as in `12.5 ms` or `3.20 s`."""
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _sides(total: Share, steps: int) -> str:
    """The mean time in which each side was busy: R, T and C of the page."""
    sides = {"rollout": total.rollout, "training": total.training, "scoring": total.scoring}
    return listed({name: duration(seconds / steps) for name, seconds in sides.items() if seconds})


def _turns(total: Share) -> float:
    """Seconds if the sides took turns. On shared cores, a run with `ahead=0` is faster than that."""
    return total.rollout + total.training + total.scoring


def _parts(total: Share) -> str:
    """The parts of the steps' time, named as on the page."""
    parts = {
        "both at once": total.both,
        "rollout alone": total.rollout_alone,
        "training alone": total.training_alone,
        "scoring": total.scoring_alone,
        "new weights": total.sync,
        "other": total.other,
    }
    whole = total.seconds or 1.0
    return listed({name: f"{seconds / whole:.0%}" for name, seconds in parts.items()})
