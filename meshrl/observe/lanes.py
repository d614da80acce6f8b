"""Lanes of the timeline: spans of each rank and of each waiting part. Many short spans are drawn as one."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from meshrl.events import Call, Event, Span, Step, Wait
from meshrl.observe.analysis import SCRIPT, Idleness
from meshrl.observe.intervals import Intervals, tracks, union, within

SPANS = 20_000
"""Spans on the page at most. Beyond it, short ones are drawn together."""
RANKS = 64
"""Ranks on the page at most."""


@dataclass(frozen=True)
class Bar:
    """A drawn span."""

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

    began: list[float] = field(default_factory=list)
    lasted: list[float] = field(default_factory=list)
    why: list[int] = field(default_factory=list)


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


class Names:
    """Texts by index, each once."""

    def __init__(self) -> None:
        self.all: list[str] = []
        self._known: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        """The index of a text."""
        if text not in self._known:
            self._known[text] = len(self.all)
            self.all.append(text)
        return self._known[text]


def make_lanes(
    events: Sequence[Event], idleness: Iterable[Idleness], names: Names, texts: Names
) -> tuple[list[Lane], list[str]]:
    """The lanes: waits of the script and the stream, then ranks by mesh. Also notes for the page."""
    bars = _bars(events)
    notes: list[str] = []
    ranks = [key for key in bars if key[0] == 1]
    if len(ranks) > RANKS:
        notes.append(f"The timeline and the table of idle time show {RANKS} of {len(ranks)} ranks.")
        bars = {key: each for key, each in bars.items() if key not in set(ranks[RANKS:])}
    total = sum(len(each) for each in bars.values())
    grain, whole = 0.0, union([])
    if total > SPANS:
        whole = _whole(bars, [event for event in events if isinstance(event, Step)])
        grain = max(bar.ended for each in bars.values() for bar in each) / 16_000
        merged = bars
        while sum(len(each) for each in merged.values()) > SPANS:
            grain *= 2
            merged = {key: merge(own, grain, whole) for key, own in merged.items()}
        bars = merged
        notes.append(
            f"Of {total:,} spans, those at the beginning, in the middle and at the end are drawn one by one; of the "
            f"others, neighbours shorter than {grain:.3g} s are drawn together, paler."
        )
    idle = {(each.mesh, each.rank): each for each in idleness}
    lanes: list[Lane] = []
    for (ranked, group, rank), own in bars.items():
        why = idle.get((group, rank)) if ranked else None
        label = f"rank {rank}" if ranked else ("script", "stream")[rank]
        lanes.append(_lane(group, label, own, _idle(why, grain, whole, texts) if why else Idle(), names, texts))
    return lanes, notes


def merge(bars: Sequence[Bar], grain: float, whole: Intervals) -> list[Bar]:
    """Join bars of one name that are shorter than `grain` seconds and begin in the same `grain`, except in `whole`."""
    found: list[Bar] = []
    short: dict[tuple[int, str], Bar] = {}
    kept = within(whole, np.array([bar.began for bar in bars]))
    for bar, alone in zip(bars, kept.tolist(), strict=True):
        if alone or bar.ended - bar.began >= grain:
            found.append(bar)
            continue
        key = int(bar.began / grain), bar.name
        one = short.get(key)
        if one is None:
            short[key] = bar
        else:
            short[key] = Bar(
                one.began,
                max(one.ended, bar.ended),
                bar.name,
                one.about,
                one.rows + bar.rows,
                one.tokens + bar.tokens,
                one.count + bar.count,
            )
    return sorted([*found, *short.values()], key=lambda bar: bar.began)


def _bars(events: Sequence[Event]) -> dict[tuple[int, str, int], list[Bar]]:
    """The bars of each lane, by begin. Keys sort the lanes: waits before meshes, then group, then rank or lane."""
    calls: Mapping[int, Call] = {event.id: event for event in events if isinstance(event, Call)}
    found: dict[tuple[int, str, int], list[Bar]] = defaultdict(list)
    for event in events:
        if isinstance(event, Wait):
            script = event.who in SCRIPT
            key = (0, "waits", 0 if script else 1)
            found[key].append(Bar(event.began, event.ended, f"{event.who} waits for {event.what}", event.on))
        elif isinstance(event, Span):
            call = calls.get(event.call)
            rows, tokens = (call.rows or 0, call.tokens or 0) if call else (0, 0)
            name = f"{event.actor}.{event.endpoint}"
            found[1, event.mesh, event.rank].append(Bar(event.began, event.ended, name, "", rows, tokens))
    return {key: sorted(bars, key=lambda bar: bar.began) for key, bars in sorted(found.items())}


def _whole(bars: Mapping[tuple[int, str, int], Sequence[Bar]], steps: Sequence[Step]) -> Intervals:
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


def _lane(group: str, label: str, bars: Sequence[Bar], idle: Idle, names: Names, texts: Names) -> Lane:
    rows = tracks([bar.began for bar in bars], [bar.ended for bar in bars])
    return Lane(
        group,
        label,
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


def _idle(idleness: Idleness, grain: float, whole: Intervals, texts: Names) -> Idle:
    pieces: list[tuple[float, float, int]] = []
    for reason in idleness.reasons:
        number = texts(reason.why)
        pieces += [(began, ended, number) for began, ended in _longer(reason.when, grain, whole).tolist()]
    pieces.sort()
    return Idle(
        [rounded(began) for began, _, _ in pieces],
        [rounded(ended - began) for began, ended, _ in pieces],
        [number for _, _, number in pieces],
    )


def _longer(when: Intervals, grain: float, whole: Intervals) -> Intervals:
    return when[(when[:, 1] - when[:, 0] > grain) | within(whole, when[:, 0])]


def rounded(value: float) -> float:
    """Round to 10 microseconds. More digits would only make the page larger."""
    return round(value, 5)
