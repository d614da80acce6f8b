"""When each rank ran which call: the lanes of the page's timeline, and a Chrome trace for ui.perfetto.dev."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import Final, TypeAlias, TypeVar

import numpy as np
from msgspec.structs import asdict

from meshrl.events import Call, Delivery, Event, Gauge, Restart, Span, Step, Swap, Wait
from meshrl.observe.analysis import SCRIPT, Idleness, IdleReason, Intervals, side, union, within

SPANS: Final = 20_000
"""Spans on the page at most. Beyond it, short ones are drawn together."""
RANKS: Final = 64
"""Ranks on the page at most."""
_CONTROLLER: Final = 0
"""Process id of the controller in a trace. Meshes are 1, 2, ..."""
_ROWS: Final = 1000
"""Threads of a lane in a trace at most. Concurrent calls of one rank each need a row."""

_Key: TypeAlias = tuple[int, str, int]
"""Sorts the lanes: 0 for waits or 1 for ranks, then the mesh, then the rank."""
_Entry: TypeAlias = Mapping[str, object]
E = TypeVar("E", Call, Span, Wait, Step)


@dataclass(frozen=True)
class _Bar:
    began: float
    ended: float
    name: str
    """`Actor.endpoint`, or the awaited thing."""
    about: str = ""
    """What blocked a wait."""
    rows: int = 0
    tokens: int = 0
    count: int = 1
    """Number of spans drawn together."""


@dataclass(frozen=True)
class Idle:
    """Idle moments of a lane, column by column. `why` holds indices of the page's reasons."""

    began: list[float]
    lasted: list[float]
    why: list[int]


@dataclass(frozen=True)
class Lane:
    """A lane of the timeline, column by column. Names and texts are indices of the page's tables."""

    group: str
    label: str
    rows: int
    """Number of rows: the most spans that overlap."""
    began: list[float]
    lasted: list[float]
    name: list[int]
    row: list[int]
    about: list[int]
    batch: list[tuple[int, int]]
    """Rows and tokens of the call."""
    count: list[int]
    idle: Idle


class StringTable:
    """Texts by index, each once."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}

    @property
    def all(self) -> list[str]:
        """The texts in order of their index."""
        return list(self._known)

    def __call__(self, text: str) -> int:
        """The index of a text."""
        return self._known.setdefault(text, len(self._known))


def make_lanes(
    events: Sequence[Event], idleness: Iterable[Idleness], names: StringTable, texts: StringTable
) -> tuple[list[Lane], list[str]]:
    """The lanes: waits of the script and the stream, then ranks by mesh. Also notes for the page."""
    bars = _bars(events)
    notes: list[str] = []
    ranks = [key for key in bars if key[0] == 1]
    if len(ranks) > RANKS:
        notes.append(f"The timeline and the table of idle time show {RANKS} of {len(ranks)} ranks.")
        bars = {key: each for key, each in bars.items() if key not in set(ranks[RANKS:])}
    total = sum(len(each) for each in bars.values())
    grain, detailed = 0.0, union([])
    if total > SPANS:
        detailed = _detailed(bars, [event for event in events if isinstance(event, Step)])
        grain = max(bar.ended for each in bars.values() for bar in each) / 16_000
        while sum(len(each) for each in bars.values()) > SPANS:
            grain *= 2
            bars = {key: _merged(own, grain, detailed) for key, own in bars.items()}
        notes.append(
            f"Of {total:,} spans, those at the beginning, in the middle and at the end are drawn one by one; of the "
            f"others, neighbours shorter than {grain:.3g} s are drawn together, paler."
        )
    why = {(1, each.mesh, each.rank): each.reasons for each in idleness}
    lanes = [
        _lane(key, own, _idle(why.get(key, ()), grain, detailed, texts), names, texts) for key, own in bars.items()
    ]
    return lanes, notes


def _bars(events: Sequence[Event]) -> dict[_Key, list[_Bar]]:
    calls = {event.id: event for event in events if isinstance(event, Call)}
    lanes: dict[_Key, list[_Bar]] = defaultdict(list)
    for event in events:
        if isinstance(event, Wait):
            key = (0, "waits", 0 if event.who in SCRIPT else 1)
            lanes[key].append(_Bar(event.began, event.ended, f"{event.who} waits for {event.what}", event.on))
        elif isinstance(event, Span):
            call = calls.get(event.call)
            rows, tokens = (call.rows or 0, call.tokens or 0) if call else (0, 0)
            lanes[1, event.mesh, event.rank].append(_Bar(event.began, event.ended, _title(event), "", rows, tokens))
    return {key: sorted(bars, key=lambda bar: bar.began) for key, bars in sorted(lanes.items())}


def _merged(bars: Sequence[_Bar], grain: float, detailed: Intervals) -> list[_Bar]:
    """Join bars of one name that are shorter than `grain` seconds and begin in the same `grain`, unless `detailed`."""
    long: list[_Bar] = []
    short: dict[tuple[int, str], _Bar] = {}
    kept = within(detailed, np.array([bar.began for bar in bars]))
    for bar, is_kept in zip(bars, kept.tolist(), strict=True):
        if is_kept or bar.ended - bar.began >= grain:
            long.append(bar)
            continue
        key = int(bar.began / grain), bar.name
        short[key] = _joined(short[key], bar) if key in short else bar
    return sorted([*long, *short.values()], key=lambda bar: bar.began)


def _joined(one: _Bar, other: _Bar) -> _Bar:
    rows, tokens, count = one.rows + other.rows, one.tokens + other.tokens, one.count + other.count
    return replace(one, ended=max(one.ended, other.ended), rows=rows, tokens=tokens, count=count)


def _detailed(bars: Mapping[_Key, Sequence[_Bar]], steps: Sequence[Step]) -> Intervals:
    """The first, middle and last seconds of the steps, which hold half of the page's spans."""
    began = np.sort([bar.began for each in bars.values() for bar in each])
    count = SPANS // 6
    places = [0, len(began) // 2, len(began) - 1]
    if steps:
        anchors = [steps[0].began, steps[len(steps) // 2].began, steps[-1].ended]
        places = np.searchsorted(began, anchors).tolist()
    first, middle, last = places
    runs = [(first, first + count), (middle - count // 2, middle + count // 2), (last - count, last)]
    ends = np.clip(runs, 0, len(began) - 1)
    return union(began[ends])


def _lane(key: _Key, bars: Sequence[_Bar], idle: Idle, names: StringTable, texts: StringTable) -> Lane:
    ranked, group, rank = key
    rows = _rows(bars)
    return Lane(
        group,
        f"rank {rank}" if ranked else ("script", "stream")[rank],
        max(rows, default=0) + 1,
        [rounded(bar.began) for bar in bars],
        [rounded(bar.ended - bar.began) for bar in bars],
        [names(bar.name) for bar in bars],
        rows,
        [texts(bar.about) for bar in bars],
        [(bar.rows, bar.tokens) for bar in bars],
        [bar.count for bar in bars],
        idle,
    )


def _idle(reasons: Sequence[IdleReason], grain: float, detailed: Intervals, texts: StringTable) -> Idle:
    pieces: list[tuple[float, float, int]] = []
    for reason in reasons:
        number, when = texts(reason.why), reason.when
        shown = when[(when[:, 1] - when[:, 0] > grain) | within(detailed, when[:, 0])]
        pieces += [(began, ended, number) for began, ended in shown.tolist()]
    pieces.sort()
    return Idle(
        [rounded(began) for began, _, _ in pieces],
        [rounded(ended - began) for began, ended, _ in pieces],
        [number for _, _, number in pieces],
    )


def rounded(value: float) -> float:
    """Round to 10 microseconds. More digits would only make the page larger."""
    return round(value, 5)


def _rows(spans: Iterable[_Bar | Call | Span | Wait | Step]) -> list[int]:
    """The lowest row for each span, in order of `began`, such that spans in a row do not overlap."""
    rows: list[int] = []
    free: list[int] = []
    taken: list[tuple[float, int]] = []
    for span in spans:
        while taken and taken[0][0] <= span.began:
            heappush(free, heappop(taken)[1])
        rows.append(heappop(free) if free else len(taken))
        heappush(taken, (span.ended, rows[-1]))
    return rows


def make_trace(events: Sequence[Event]) -> dict[str, object]:
    """Make the trace: one process per mesh, one thread per rank (more if calls overlap), times in microseconds.

    The controller is a separate process, with its steps, calls and waits, counters for gauges, and instants for new
    weights and deliveries.
    """
    calls = [event for event in events if isinstance(event, Call)]
    about = {call.id: {"rows": call.rows, "tokens": call.tokens, "error": call.error} for call in calls}
    steps = [event for event in events if isinstance(event, Step)]
    entries: list[_Entry] = [_name("process", _CONTROLLER, 0, "controller")]
    entries += _threads(_CONTROLLER, 0, "steps", [(s, f"step {s.step}", "step", {}) for s in steps])
    entries += _threads(_CONTROLLER, 1, "calls", [(c, _title(c), side(c.endpoint), about[c.id]) for c in calls])
    waits: dict[str, list[Wait]] = defaultdict(list)
    spans: dict[str, dict[int, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for event in events:
        if isinstance(event, Wait):
            waits[event.who].append(event)
        elif isinstance(event, Span):
            spans[event.mesh][event.rank].append(event)
    for number, (who, own) in enumerate(sorted(waits.items()), 2):
        items = [(wait, f"waits for {wait.what}", "wait", {"blocked by": wait.on}) for wait in own]
        entries += _threads(_CONTROLLER, number, f"{who}'s waits", items)
    for pid, (mesh, ranks) in enumerate(sorted(spans.items()), 1):
        entries.append(_name("process", pid, 0, f"mesh {mesh}"))
        for rank, same in sorted(ranks.items()):
            ran = [(span, _title(span), side(span.endpoint), about.get(span.call, {})) for span in same]
            entries += _threads(pid, rank, f"rank {rank}", ran)
    entries += [entry for event in events if (entry := _moment(event))]
    return {"traceEvents": entries, "displayTimeUnit": "ms"}


def _title(call: Call | Span) -> str:
    return f"{call.actor}.{call.endpoint}"


def _threads(pid: int, lane: int, name: str, items: Sequence[tuple[E, str, str, Mapping[str, object]]]) -> list[_Entry]:
    """Complete events. Overlapping ones get different threads, because a thread's events must nest."""
    items = sorted(items, key=lambda item: item[0].began)
    rows = _rows(item[0] for item in items)
    entries: list[_Entry] = []
    for row in range(max(rows, default=-1) + 1):
        tid = lane * _ROWS + row
        entries.append(_name("thread", pid, tid, f"{name} ({row + 1})" if row else name))
        entries.append({"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}})
    for (event, title, category, about), row in zip(items, rows, strict=True):
        entries.append(
            {
                "ph": "X",
                "name": title,
                "cat": category,
                "pid": pid,
                "tid": lane * _ROWS + row,
                "ts": event.began * 1e6,
                "dur": max(0.0, event.ended - event.began) * 1e6,
                "args": {key: value for key, value in about.items() if value is not None},
            }
        )
    return entries


def _moment(event: Event) -> _Entry | None:
    """The counter of a gauge, or the instant of another event without duration."""
    match event:
        case Gauge():
            return _point("C", event.name, event.at, {event.name: event.value})
        case Swap():
            return _point("i", f"weights of version {event.version}", event.ended, asdict(event))
        case Delivery():
            return _point("i", f"batch {event.batch}", event.at, asdict(event))
        case Restart():
            return _point("i", f"restart {event.number}", event.at, asdict(event))
        case _:
            return None


def _point(phase: str, name: str, at: float, args: Mapping[str, object]) -> _Entry:
    scope = {"s": "g"} if phase == "i" else {}
    return {"ph": phase, "name": name, "pid": _CONTROLLER, "tid": 0, "ts": at * 1e6, "args": args, **scope}


def _name(kind: str, pid: int, tid: int, name: str) -> _Entry:
    return {"ph": "M", "name": f"{kind}_name", "pid": pid, "tid": tid, "args": {"name": name}}
