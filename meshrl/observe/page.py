"""The report page of a run: its content as a plain value for JSON, and the HTML, static or live.

A static page is one file that contains its style, code and data, and loads nothing from a network.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from html import escape
from importlib.metadata import entry_points
from itertools import count, pairwise
from pathlib import Path
from typing import Final, cast

import msgspec
import numpy as np
import numpy.typing as npt
import tomli_w

from meshrl.events import Delivery, Gauge, Restart, Step, Swap
from meshrl.observe.analysis import PARTS, Overlap, StepTime, deliveries_of, idleness, overlap, side
from meshrl.observe.diagnosis import diagnose
from meshrl.observe.metric_info import FRONT, metric_info
from meshrl.observe.run_files import Line, Record
from meshrl.observe.run_statistics import digits, finite
from meshrl.observe.samples import head_of, shown_rows, tokens_within
from meshrl.observe.timeline import RANKS, Lane, StringTable, make_lanes, rounded

POINTS: Final = 1000
"""Points of a curve at most. Beyond it, neighbours are averaged."""
_GAUGE: Final = 240
"""Points of a gauge at most. Beyond it, means over equal times are shown."""
_STEPS: Final = 120
"""Bars of steps at most. Beyond it, neighbours are averaged."""
NO_CURVES: Final = ("step", "seconds")
"""Numbers of a line of metrics.jsonl without a curve."""
STYLES: Final = ("theme.css", "style.css", "parts.css", "rows.css")
"""Style sheets of every page."""
SCRIPTS: Final = ("draw.js", "axes.js", "timeline.js", "gestures.js", "charts.js", "tokens.js", "rows.js", "app.js")
"""Scripts of the report, static and live."""
_STATIC: Final = """<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:">"""


@dataclass(frozen=True)
class DrawnCurve:
    """A number over steps or seconds."""

    name: str
    x: list[float]
    y: list[float | None]
    band: tuple[list[float], list[float]] | None
    """Lowest and highest value around each point, if `y` are means."""
    unit: str
    hue: str
    """The side that gives it its colour."""


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
    alarms: list[dict[str, str]]
    """What `diagnose` finds: name, evidence, advice, and the page of the docs."""
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
    total: StepTime | None
    efficiency: float | None
    """Overlap efficiency, if rollouts run ahead."""
    busy: dict[str, float]
    """Mean share of busy time over each side's ranks."""
    bound: dict[str, int]
    """Number of steps that each side bounded."""
    bounds: Mapping[str, Sequence[float]] | None
    """Of each bar of steps: numbers of the first and the last step, mean seconds by part, and the efficiency."""
    idle: list[IdleRow]
    curves: list[DrawnCurve]
    front: int
    """Number of curves at the top."""
    gauges: list[DrawnCurve]
    staleness: list[int]
    """Number of rows that were 0, 1, 2, ... publications behind at delivery."""
    dropped: dict[str, int]
    samples: list[Line]
    """The rows that the run kept, without their tokens. `at` is the number of a row in samples.jsonl."""
    tokens: dict[int, msgspec.Raw]
    """The columns of tokens by the number of their row. A live page asks its server for them."""
    config: str


def render(record: Record) -> str:
    """Render the report page of a run."""
    return static_page(record.name, make_content(record), STYLES, (*SCRIPTS, "whole.js"))


def static_page(title: str, content: object, styles: Iterable[str], scripts: Iterable[str]) -> str:
    """Render a page with its content and these files inside."""
    # The run's text must not end the element that contains the data.
    data = msgspec.json.encode(content).decode().replace("<", "\\u003c")
    style = f"{_STATIC}\n<style>\n{joined(styles)}\n</style>"
    return html_page(f"{title} · meshrl", style, data, f"<script>\n{joined(scripts)}\n</script>")


def html_page(title: str, style: str, data: str, script: str) -> str:
    """Fill the HTML that all pages share. `style`, `script`: elements."""
    parts = {"title": escape(title, quote=False), "style": style, "data": data, "script": script}
    before, *pieces = joined(["page.html"]).split("{{")
    return before + "".join(parts[name] + tail for name, _, tail in (piece.partition("}}") for piece in pieces))


def joined(files: Iterable[str]) -> str:
    """Join files of this folder."""
    return "\n".join((Path(__file__).parent / file).read_text("utf-8") for file in files)


def make_content(record: Record, heads: Sequence[Line] | None = None) -> Content:
    """Make the content of a run's page. Large runs are thinned, and `notes` says how.

    `heads`: of the rows of a live page, which are sent without their tokens.
    """
    events = record.events
    again = "A machine failed, and the run was begun again"
    restarts = ((event.number, event.error.partition("\n")[0]) for event in events if isinstance(event, Restart))
    notes = [*record.notes, *(f"{again} (restart {number}): {error}." for number, error in restarts)]
    names, texts = StringTable(), StringTable()
    idle = idleness(events)
    lanes, thinned = make_lanes(events, idle, names, texts)
    notes += thinned
    shares = overlap(events)
    steps = [event for event in events if isinstance(event, Step)]
    known = bool(lanes) and bool(steps)
    staleness, dropped = deliveries_of(event for event in events if isinstance(event, Delivery))
    table = record.table
    curves = _curves(record.metrics, notes) + _curves(record.evaluations, notes)
    samples = shown_rows([*map(head_of, record.samples, count())] if heads is None else heads, notes)
    front = sorted(filter(_is_in_front, curves), key=lambda curve: FRONT.index(curve.name))
    return Content(
        name=record.name,
        status=str(record.summary.get("status", "not ended")),
        notes=notes,
        alarms=[{**asdict(each), "page": each.page} for each in diagnose(record)],
        summary=record.summary or _summary_so_far(record),
        units={name: metric_info(name).unit for name in map(_measured, [*record.summary, "reward"])},
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
        idle=[
            IdleRow(
                each.mesh,
                each.rank,
                rounded(each.busy),
                rounded(each.idle),
                [(reason.why, reason.blocked, rounded(reason.seconds)) for reason in each.reasons],
            )
            for each in idle[:RANKS]
        ],
        curves=[*front, *(curve for curve in curves if curve not in front)],
        front=len(front),
        gauges=_gauges([event for event in events if isinstance(event, Gauge)]),
        staleness=staleness,
        dropped=dropped,
        samples=samples,
        tokens=tokens_within(record.samples, samples, notes) if heads is None else {},
        config=tomli_w.dumps(_used(table)) if table else record.config,
    )


def _used(table: Mapping[str, object]) -> dict[str, object]:
    """Leave out empty tables, and in a role the tables of other backends."""
    others = _backends() - {table.get("backend")} if "backend" in table else set[str]()
    used = {
        key: _used(cast("Mapping[str, object]", value)) if isinstance(value, dict) else value
        for key, value in table.items()
        if key not in others
    }
    return {key: value for key, value in used.items() if value != {}}


@lru_cache(maxsize=1)
def _backends() -> frozenset[str]:
    """Names of the installed backends. Cached, because the search is slow."""
    return frozenset(entry_points(group="meshrl.backends").names)


def _measured(name: str) -> str:
    return name.removesuffix("_before").removesuffix("_after")


def _is_in_front(curve: DrawnCurve) -> bool:
    values = [value for value in curve.y if value is not None]
    return curve.name in FRONT and (len(values) < 2 or len(set(values)) > 1)


def _summary_so_far(record: Record) -> Line:
    rewards = [line["reward"] for line in record.metrics if isinstance(line.get("reward"), float | int)]
    first, last = (rewards[0], rewards[-1]) if rewards else (None, None)
    seconds = record.metrics[-1].get("seconds") if record.metrics else None
    return {"steps": len(record.metrics), "wall_s": seconds, "first_reward": first, "last_reward": last}


def _bounds(shares: Overlap, notes: list[str]) -> Mapping[str, Sequence[float]]:
    count = len(shares.steps)
    numbers = np.array_split(np.array(shares.numbers), min(_STEPS, count))
    if len(numbers) < count:
        notes.append(f"What bounded a step: {len(numbers)} bars of {count:,} steps, each a mean of neighbours.")
    columns: dict[str, Sequence[float]] = {
        name: [int(each[at]) for each in numbers] for name, at in (("first", 0), ("last", -1))
    }
    for name in (*PARTS, "efficiency"):
        values = np.array([getattr(step, name) for step in shares.steps], np.float64)
        columns[name] = [rounded(float(each.mean())) for each in np.array_split(values, len(numbers))]
    return columns


def _curves(metrics: Sequence[Line], notes: list[str]) -> list[DrawnCurve]:
    names = dict.fromkeys(name for line in metrics for name in line if name not in NO_CURVES)
    if len(metrics) > POINTS:
        notes.append(f"Curves have {POINTS:,} points for {len(metrics):,} steps, each a mean of neighbours.")
    steps = _column(metrics, "step")
    return [_curve(name, steps, _column(metrics, name)) for name in names]


def _column(lines: Sequence[Line], name: str) -> npt.NDArray[np.float64]:
    """The numbers of this name. NaN, a gap in the curve, for other values and for integers beyond float64."""
    return np.array([finite(line.get(name)) for line in lines], np.float64)


def _curve(name: str, x: npt.NDArray[np.float64], y: npt.NDArray[np.float64]) -> DrawnCurve:
    if len(x) <= POINTS:
        return _named(name, x.tolist(), [digits(value) if math.isfinite(value) else None for value in y.tolist()])
    groups = np.array_split(np.arange(len(x)), POINTS)
    finite_values = (y[group][np.isfinite(y[group])] for group in groups)
    means = [digits(float(values.mean())) if len(values) else None for values in finite_values]
    return _named(name, [float(x[group[0]]) for group in groups], means)


def _named(
    name: str, x: list[float], y: list[float | None], band: tuple[list[float], list[float]] | None = None
) -> DrawnCurve:
    known = metric_info(name)
    return DrawnCurve(name, x, y, band, known.unit, known.hue)


def _gauges(events: Sequence[Gauge]) -> list[DrawnCurve]:
    """A gauge holds its value until the next event. One with many events becomes means over equal times."""
    curves: list[DrawnCurve] = []
    for name in sorted({event.name for event in events}):
        own = sorted((event for event in events if event.name == name), key=lambda event: event.at)
        at = np.array([event.at for event in own])
        value = np.array([event.value for event in own], np.float64)
        many = len(own) > _GAUGE and at[-1] > at[0]
        curves.append(_means(name, at, value) if many else _named(name, at.round(5).tolist(), value.tolist()))
    return curves


def _means(name: str, at: npt.NDArray[np.float64], value: npt.NDArray[np.float64]) -> DrawnCurve:
    edges = np.linspace(at[0], at[-1], _GAUGE + 1)
    area = np.concatenate([[0.0], np.cumsum(np.diff(at) * value[:-1])])
    means = np.diff(np.interp(edges, at, area)) / np.diff(edges)
    # The value at the beginning of a piece is one of its values.
    pieces = np.searchsorted(at, edges, "right")
    held = [value[max(0, first - 1) : last] for first, last in pairwise(pieces)]
    band = [float(each.min()) for each in held], [float(each.max()) for each in held]
    return _named(name, edges[:-1].round(5).tolist(), means.round(4).tolist(), band)
