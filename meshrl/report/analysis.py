"""Where a run's seconds went: how far rollout and training overlapped, and why each rank was idle.

An endpoint lies on one of three sides: `generate` is rollout; `weights`, `load` and `abort` bring new weights to a
sampler; all else is training. R, T and S are the moments in which a rank runs something of that side.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

import numpy as np

from meshrl.events import Call, Delivery, Event, Span, Step, Swap, Wait
from meshrl.report.intervals import Intervals, intersect, seconds, seconds_in, subtract, union

Side: TypeAlias = Literal["rollout", "training", "sync"]

ROLLOUT = frozenset({"generate"})
SYNC = frozenset({"weights", "load", "abort"})
SCRIPT = frozenset({"trainer", "script", "publish"})
"""Who waits in the script itself, and so keeps trainers idle; other names are parts of the stream of rollouts."""
DRAWS = frozenset({"rollout"})
"""Who waits before prompts go to samplers, and so keeps samplers idle."""
SCRIPTS_OWN = "between calls: the script's own work"


def side(endpoint: str) -> Side:
    """Which side an endpoint lies on."""
    if endpoint in ROLLOUT:
        return "rollout"
    return "sync" if endpoint in SYNC else "training"


@dataclass(frozen=True)
class Share:
    """Some seconds of a run, a step or all steps, and what ran in them.

    `both`, `rollout_alone`, `training_alone`, `sync` and `other` add up to `seconds`.
    """

    seconds: float
    rollout: float
    """R: at least one sampler's rank was generating."""
    training: float
    """T: at least one rank ran an endpoint of the training side."""
    both: float
    """Of R and T: at the same time."""
    rollout_alone: float
    """The trainer waited for rollouts. Of a script without a stream: R without T."""
    training_alone: float
    """No sampler was generating."""
    sync: float
    """New weights kept the trainer from going on: what of publishing was exposed."""
    other: float
    """Nobody trained, and the trainer waited for nothing: the script's own work, and the way to the ranks and back."""

    @property
    def efficiency(self) -> float:
        """Overlap efficiency: max(R, T) / seconds, from 0 to 1; 1 where nothing took time."""
        return max(self.rollout, self.training) / self.seconds if self.seconds > 0 else 1.0

    @property
    def bound(self) -> Literal["rollout", "training", "sync", "other"]:
        """What made it as long as it was: the longer side, or what neither side ran for, where that is longer."""
        parts: dict[Literal["rollout", "training", "sync", "other"], float] = {
            "rollout": self.rollout,
            "training": self.training,
            "sync": self.sync,
            "other": self.other,
        }
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True)
class Overlap:
    """What ran in each step and in all of them; `steps[i]` is the share of the step numbered `numbers[i]`."""

    numbers: Sequence[int]
    steps: Sequence[Share]
    total: Share

    @property
    def efficiency(self) -> float:
        """Overlap efficiency of all steps together: the longer of the two sides' sums over the sum of step times."""
        return self.total.efficiency


@dataclass(frozen=True)
class Reason:
    """Why a rank was idle, and when."""

    why: str
    blocked: str
    """By what, in the longest of such waits; empty where nobody said."""
    when: Intervals

    @property
    def seconds(self) -> float:
        """How long in all."""
        return seconds(self.when)


@dataclass(frozen=True)
class Idleness:
    """A rank's time in the steps: busy, and idle for these reasons, the longest first."""

    mesh: str
    rank: int
    busy: float
    idle: float
    reasons: Sequence[Reason]


class Timeline:
    """The events of a run as sets of moments."""

    def __init__(self, events: Iterable[Event]) -> None:
        events = list(events)
        self.spans = [event for event in events if isinstance(event, Span)]
        self.waits = [event for event in events if isinstance(event, Wait)]
        self.steps = sorted((event for event in events if isinstance(event, Step)), key=lambda step: step.began)
        self.starving = union([(wait.began, wait.ended) for wait in self.waits if _waits_for_a_batch(wait)])
        # A stream says when the trainer waits for it; a script without one awaits its rollouts itself.
        self.streams = len(self.starving) > 0 or any(isinstance(event, Delivery) for event in events)
        self._calls = [event for event in events if isinstance(event, Call)]
        self._swaps = [event for event in events if isinstance(event, Swap)]

    def ran(self, wanted: Side) -> Intervals:
        """The moments in which a rank ran something of this side: of the calls, where no rank's spans are there."""
        pairs = [(each.began, each.ended) for each in self.spans or self._calls if side(each.endpoint) == wanted]
        if wanted == "sync":
            pairs += [(swap.began, swap.ended) for swap in self._swaps]
            pairs += [(wait.began, wait.ended) for wait in self.waits if wait.who == "publish"]
        return union(pairs)

    @cached_property
    def window(self) -> Intervals:
        """All moments of steps; without a step, from the first event to the last: [1 or more, 2], or [0, 2]."""
        if self.steps:
            return union([(step.began, step.ended) for step in self.steps])
        parts = [union([(each.began, each.ended) for each in kind]) for kind in (self.spans, self._calls, self.waits)]
        ends = np.concatenate(parts)
        return union([(ends.min(), ends.max())]) if len(ends) else union([])


def overlap(events: Iterable[Event], first: int = 0) -> Overlap:
    """What ran in each step and in all: R, T, what was exposed, and the overlap efficiency.

    `first`: the number of the first step that counts, so that a benchmark can leave out the filling of a pipeline.
    Without steps among the events, the whole of them counts as step 0.
    """
    timeline = Timeline(events)
    steps = [step for step in timeline.steps if step.step >= first]
    if timeline.steps:
        numbers = [step.step for step in steps]
        windows = np.array([(step.began, step.ended) for step in steps], np.float64).reshape(-1, 2)
    else:
        windows = timeline.window
        numbers = list(range(len(windows)))
    training, rollout, sync = (timeline.ran(each) for each in ("training", "rollout", "sync"))
    free = subtract(timeline.window, training)
    # Weights that go to the sampler while the trainer waits for rollouts, which are on their way, delay nobody.
    exposed = subtract(intersect(free, sync), intersect(timeline.starving, rollout))
    alone = subtract(intersect(free, timeline.starving if timeline.streams else rollout), exposed)
    both = intersect(training, rollout)
    sets = (rollout, training, both, alone, subtract(training, rollout), exposed)
    length = windows[:, 1] - windows[:, 0]
    columns = np.stack([length, *(seconds_in(each, windows) for each in sets)])
    return Overlap(numbers, [_share(column) for column in columns.T], _share(columns.sum(axis=1)))


def idleness(events: Iterable[Event]) -> list[Idleness]:
    """Each rank's busy and idle seconds within the steps, by mesh and rank, and why it was idle.

    An idle moment has the first reason that holds: a wait that was declared (a sampler's rank: one before prompts are
    drawn; any other: one of the script), new weights on their way, an endpoint that runs on other ranks, the script's
    own work.
    """
    timeline = Timeline(events)
    window = timeline.window
    pairs: dict[tuple[str, int], list[Span]] = defaultdict(list)
    for span in timeline.spans:
        pairs[span.mesh, span.rank].append(span)
    elsewhere = _by_endpoint(timeline.spans)
    waits = _by_who(timeline.waits)
    sync = timeline.ran("sync")
    found: list[Idleness] = []
    for (mesh, rank), spans in sorted(pairs.items()):
        endpoints = {span.endpoint for span in spans}
        # Of ranks that do both, the script says what runs.
        own: Side = "rollout" if endpoints & ROLLOUT and "update" not in endpoints else "training"
        candidates = [reason for kept, reason in waits if kept == own]
        candidates.append(Reason("new weights are on their way to a sampler", "", sync))
        # Its own mesh first: there the cause is that rows were uneven.
        for (other, name), when in sorted(elsewhere.items(), key=lambda item: (item[0][0] != mesh, item[0])):
            if own == "training" and timeline.streams and side(name.rpartition(".")[2]) == "rollout":
                continue  # the script did not wait for it: it would have said so
            where = f"other ranks of {mesh} still run {name}" if other == mesh else f"{name} runs on {other}"
            candidates.append(Reason(where, "", when))
        candidates.append(Reason(SCRIPTS_OWN, "", window))
        busy = intersect(window, union([(span.began, span.ended) for span in spans]))
        idle = subtract(window, busy)
        reasons = _first_that_holds(idle, candidates)
        found.append(Idleness(mesh, rank, seconds(busy), seconds(idle), reasons))
    return found


def _share(column: Sequence[float]) -> Share:
    length, rollout, training, both, alone, training_alone, exposed = (float(value) for value in column)
    other = max(0.0, length - both - alone - training_alone - exposed)
    return Share(length, rollout, training, both, alone, training_alone, exposed, other)


def _waits_for_a_batch(wait: Wait) -> bool:
    return wait.who in SCRIPT and "batch" in wait.what


def _by_endpoint(spans: Sequence[Span]) -> dict[tuple[str, str], Intervals]:
    found: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for span in spans:
        if side(span.endpoint) != "sync":
            found[span.mesh, f"{span.actor}.{span.endpoint}"].append((span.began, span.ended))
    return {key: union(pairs) for key, pairs in found.items()}


def _by_who(waits: Sequence[Wait]) -> list[tuple[Side, Reason]]:
    """Of each kind of wait: the side that it keeps idle, and the wait as a reason; the longest first."""
    kinds: dict[tuple[str, str], list[Wait]] = defaultdict(list)
    for wait in waits:
        kinds[wait.who, wait.what].append(wait)
    found: list[tuple[Side, Reason]] = []
    for (who, what), same in kinds.items():
        if who not in SCRIPT | DRAWS:
            continue
        longest = max(same, key=lambda wait: wait.ended - wait.began)
        when = union([(wait.began, wait.ended) for wait in same])
        found.append(("training" if who in SCRIPT else "rollout", Reason(f"{who} waits for {what}", longest.on, when)))
    return sorted(found, key=lambda each: -each[1].seconds)


def _first_that_holds(idle: Intervals, candidates: Sequence[Reason]) -> list[Reason]:
    found: list[Reason] = []
    for reason in candidates:
        if len(when := intersect(idle, reason.when)):
            found.append(Reason(reason.why, reason.blocked, when))
            idle = subtract(idle, when)
    return sorted(found, key=lambda reason: -reason.seconds)
