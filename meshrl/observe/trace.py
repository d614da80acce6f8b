"""A run as a Chrome trace, for ui.perfetto.dev and chrome://tracing."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TypeAlias, TypeVar

from msgspec.structs import asdict

from meshrl.events import Call, Delivery, Event, Gauge, Restart, Span, Step, Swap, Wait
from meshrl.observe.analysis import side
from meshrl.observe.intervals import tracks

Entry: TypeAlias = Mapping[str, object]
E = TypeVar("E", Call, Span, Wait, Step)

_CONTROLLER = 0
"""Process id of the controller. Meshes are 1, 2, ..."""
_ROWS = 1000
"""Threads of a lane at most. Concurrent calls of one rank each need a row."""


def make_trace(events: Sequence[Event]) -> dict[str, object]:
    """Make the trace: one process per mesh, one thread per rank (more if calls overlap), times in microseconds.

    The controller is a separate process, with its steps, calls and waits, counters for gauges, and instants for new
    weights and deliveries.
    """
    calls = [event for event in events if isinstance(event, Call)]
    about = {call.id: {"rows": call.rows, "tokens": call.tokens, "error": call.error} for call in calls}
    entries: list[Entry] = [_name("process", _CONTROLLER, 0, "controller")]
    entries += _lane(_CONTROLLER, 0, "steps", [(s, f"step {s.step}", "step", {}) for s in _of(events, Step)])
    entries += _lane(_CONTROLLER, 1, "calls", [(c, _title(c), side(c.endpoint), about[c.id]) for c in calls])
    waits: dict[str, list[Wait]] = defaultdict(list)
    for wait in _of(events, Wait):
        waits[wait.who].append(wait)
    for number, (who, theirs) in enumerate(sorted(waits.items()), 2):
        items = [(wait, f"waits for {wait.what}", "wait", {"blocked by": wait.on}) for wait in theirs]
        entries += _lane(_CONTROLLER, number, f"{who}'s waits", items)
    spans: dict[str, dict[int, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for span in _of(events, Span):
        spans[span.mesh][span.rank].append(span)
    for pid, (mesh, ranks) in enumerate(sorted(spans.items()), 1):
        entries.append(_name("process", pid, 0, f"mesh {mesh}"))
        for rank, same in sorted(ranks.items()):
            ran = [(span, _title(span), side(span.endpoint), about.get(span.call, {})) for span in same]
            entries += _lane(pid, rank, f"rank {rank}", ran)
    entries += [entry for event in events for entry in _moment(event)]
    return {"traceEvents": entries, "displayTimeUnit": "ms"}


def _of(events: Sequence[Event], kind: type[E]) -> list[E]:
    return [event for event in events if isinstance(event, kind)]


def _title(call: Call | Span) -> str:
    return f"{call.actor}.{call.endpoint}"


def _lane(pid: int, lane: int, name: str, items: Sequence[tuple[E, str, str, Mapping[str, object]]]) -> list[Entry]:
    """Complete events. Overlapping ones get different threads, because a thread's events must nest."""
    items = sorted(items, key=lambda item: item[0].began)
    rows = tracks([item[0].began for item in items], [item[0].ended for item in items])
    entries: list[Entry] = []
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


def _moment(event: Event) -> list[Entry]:
    """Counters and instants."""
    if isinstance(event, Gauge):
        return [_point("C", event.name, event.at, {event.name: event.value})]
    if isinstance(event, Swap):
        return [_point("i", f"weights of version {event.version}", event.ended, asdict(event))]
    if isinstance(event, Delivery):
        return [_point("i", f"batch {event.batch}", event.at, asdict(event))]
    if isinstance(event, Restart):
        return [_point("i", f"restart {event.number}", event.at, asdict(event))]
    return []


def _point(phase: str, name: str, at: float, args: Mapping[str, object]) -> Entry:
    scope = {"s": "g"} if phase == "i" else {}
    return {"ph": phase, "name": name, "pid": _CONTROLLER, "tid": 0, "ts": at * 1e6, "args": args, **scope}


def _name(kind: str, pid: int, tid: int, name: str) -> Entry:
    return {"ph": "M", "name": f"{kind}_name", "pid": pid, "tid": tid, "args": {"name": name}}
