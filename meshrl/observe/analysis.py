"""Where a run spent its time: the overlap of rollout and training, and why ranks were idle.

An endpoint belongs to one of four sides: `generate` is rollout, `score` is scoring, `weights`, `load` and `abort` are
weight sync, and all others are training. If k calls run at once on a rank, each has 1/k of its time.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from meshrl.events import Call, Delivery, Event, Span, Step, Swap, Wait
from meshrl.observe.intervals import Intervals, intersect, running, seconds, subtract, union, within

Side: TypeAlias = Literal["rollout", "training", "scoring", "sync"]
Values: TypeAlias = npt.NDArray[np.float64]

ROLLOUT = frozenset({"generate"})
SCORING = frozenset({"score"})
SYNC = frozenset({"weights", "load", "abort"})
SCRIPT = frozenset({"trainer", "script", "publish"})
"""Waiters in the script, which keep trainers idle. Other names are parts of the stream of rollouts."""
DRAWS = frozenset({"rollout"})
"""Waiters before prompts go to samplers, which keep samplers idle."""
SCRIPTS_OWN = "between calls: the script's own work"


def side(endpoint: str) -> Side:
    """The side of an endpoint."""
    if endpoint in ROLLOUT:
        return "rollout"
    if endpoint in SCORING:
        return "scoring"
    return "sync" if endpoint in SYNC else "training"


@dataclass(frozen=True)
class Share:
    """Seconds of a step or of all steps, and what ran in them.

    `both`, `rollout_alone`, `training_alone`, `scoring_alone`, `sync` and `other` add up to `seconds`.
    """

    seconds: float
    rollout: float
    """R: a rank was generating. If calls shared a rank, its largest share for generating counts."""
    training: float
    """T: the same for training."""
    scoring: float
    """C: the same for scoring."""
    both: float
    """Overlap of R and T. Calls that share a rank take turns."""
    rollout_alone: float
    """The trainer waited for rollouts. In a script without a stream: R without T."""
    training_alone: float
    """Training while no sampler was generating."""
    scoring_alone: float
    """The trainer waited for rewards: nothing trained, and it waited for no rollouts or none were being generated."""
    sync: float
    """Exposed weight sync: new weights delayed the trainer."""
    other: float
    """Nothing trained, and the trainer did not wait: the script's own work, and communication with ranks."""

    @property
    def efficiency(self) -> float:
        """Overlap efficiency: max(R, T, C) / seconds, from 0 to 1. It is 1 if no time passed."""
        return max(self.rollout, self.training, self.scoring) / self.seconds if self.seconds > 0 else 1.0

    @property
    def bound(self) -> Side | Literal["other"]:
        """The bottleneck: the longest side, or `other` if that is longer."""
        parts: dict[Side | Literal["other"], float] = {
            "rollout": self.rollout,
            "training": self.training,
            "scoring": self.scoring,
            "sync": self.sync,
            "other": self.other,
        }
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True)
class Overlap:
    """The time in each step and in all of them. `steps[i]` belongs to the step with number `numbers[i]`."""

    numbers: Sequence[int]
    steps: Sequence[Share]
    total: Share
    busy: Mapping[Side, float]
    """For each side, the mean share of time over the ranks that ran it, in all steps."""

    @property
    def efficiency(self) -> float:
        """Overlap efficiency of all steps: the longest side's sum over the sum of step times."""
        return self.total.efficiency


@dataclass(frozen=True)
class Reason:
    """Why and when a rank was idle."""

    why: str
    blocked: str
    """What blocked the longest of these waits. Empty if unknown."""
    when: Intervals

    @property
    def seconds(self) -> float:
        """Total duration."""
        return seconds(self.when)


@dataclass(frozen=True)
class Idleness:
    """A rank's busy and idle time in the steps, with reasons, the longest first."""

    mesh: str
    rank: int
    busy: float
    idle: float
    reasons: Sequence[Reason]


class Timeline:
    """The events of a run as sets of moments."""

    def __init__(self, events: Iterable[Event]) -> None:
        events = list(events)
        self.spans: list[Span] = [event for event in events if isinstance(event, Span)]
        self.waits: list[Wait] = [event for event in events if isinstance(event, Wait)]
        steps = (event for event in events if isinstance(event, Step))
        self.steps: list[Step] = sorted(steps, key=lambda step: step.began)
        self.starving: Intervals = union([(wait.began, wait.ended) for wait in self.waits if _waits_for_a_batch(wait)])
        # A stream reports when the trainer waits for it. A script without one awaits its rollouts itself.
        self.streams: bool = len(self.starving) > 0 or any(isinstance(event, Delivery) for event in events)
        self._calls = [event for event in events if isinstance(event, Call)]
        self._swaps = [event for event in events if isinstance(event, Swap)]

    def ran(self, wanted: Side) -> Intervals:
        """Moments in which a rank ran calls of this side. Without spans of ranks, the calls count."""
        pairs = [(each.began, each.ended) for each in self.spans or self._calls if side(each.endpoint) == wanted]
        if wanted == "sync":
            pairs += [(swap.began, swap.ended) for swap in self._swaps]
            pairs += [(wait.began, wait.ended) for wait in self.waits if wait.who == "publish"]
        return union(pairs)

    @cached_property
    def _on_ranks(self) -> Mapping[tuple[str, int], Mapping[Side, Intervals]]:
        """What each rank ran by side: pairs that may overlap. Without spans, each call counts as one rank."""
        found: dict[tuple[str, int], dict[Side, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
        for span in self.spans:
            found[span.mesh, span.rank][side(span.endpoint)].append((span.began, max(span.began, span.ended)))
        if not self.spans:
            for number, call in enumerate(self._calls):
                found["", number][side(call.endpoint)].append((call.began, max(call.began, call.ended)))
        return {rank: {of: np.array(own) for of, own in sides.items()} for rank, sides in found.items()}

    @property
    def moments(self) -> list[Intervals]:
        """Moments in which anything begins or ends, except steps."""
        return [self.starving, self.ran("sync"), *(each for own in self._on_ranks.values() for each in own.values())]

    def shares(self, edges: Values) -> tuple[Mapping[Side, Values], Mapping[Side, Values]]:
        """The share of a rank's time for each side between the edges: the largest of all ranks, and their mean.

        Float64[len(edges) - 1], from 0 to 1. `edges` must contain all `moments`. Only sides that ranks ran have a mean.
        """
        every: tuple[Side, ...] = ("rollout", "training", "scoring", "sync")
        largest: dict[Side, Values] = {of: np.zeros(max(0, len(edges) - 1)) for of in every}
        total: dict[Side, Values] = {of: np.zeros(max(0, len(edges) - 1)) for of in every}
        ranks: dict[Side, int] = dict.fromkeys(every, 0)
        for sides in self._on_ranks.values():
            own = np.unique(np.concatenate(list(sides.values())))
            counts: dict[Side, npt.NDArray[np.int64]] = {of: running(pairs, own) for of, pairs in sides.items()}
            everything = np.maximum(1, sum(counts.values()))
            places = np.searchsorted(edges, own)
            here = slice(places[0], places[-1])
            for of, count in counts.items():
                share = np.repeat(count / everything, np.diff(places))
                largest[of][here] = np.maximum(largest[of][here], share)
                total[of][here] += share
                ranks[of] += 1
        return largest, {of: total[of] / count for of, count in ranks.items() if count and self.spans}

    @cached_property
    def window(self) -> Intervals:
        """Moments of all steps. Without steps, from the first to the last event: [1 or more, 2], or [0, 2]."""
        if self.steps:
            return union([(step.began, step.ended) for step in self.steps])
        parts = [union([(each.began, each.ended) for each in kind]) for kind in (self.spans, self._calls, self.waits)]
        ends = np.concatenate(parts)
        return union([(ends.min(), ends.max())]) if len(ends) else union([])


def overlap(events: Iterable[Event], first: int = 0) -> Overlap:
    """The time in each step and in all of them: R, T, C, exposed weight sync, and the overlap efficiency.

    `first`: the number of the first step that counts, so that a benchmark can leave out the filling of a pipeline.
    Without steps, all events count as step 0.
    """
    timeline = Timeline(events)
    steps = [step for step in timeline.steps if step.step >= first]
    if timeline.steps:
        numbers = [step.step for step in steps]
        windows = np.array([(step.began, step.ended) for step in steps], np.float64).reshape(-1, 2)
    else:
        windows = timeline.window
        numbers = list(range(len(windows)))
    edges = np.unique(np.concatenate([timeline.window.ravel(), *(each.ravel() for each in timeline.moments)]))
    largest, mean = timeline.shares(edges)
    parts = _parts(timeline, edges, largest)
    length = windows[:, 1] - windows[:, 0]
    sides = [largest["rollout"], largest["training"], largest["scoring"]]
    columns = np.stack([length, *(_sums(each, edges, windows) for each in (*sides, *parts))])
    total = _share(columns.sum(axis=1))
    busy: dict[Side, float] = {
        of: float(_sums(each, edges, windows).sum()) / (total.seconds or 1.0) for of, each in mean.items()
    }
    return Overlap(numbers, [_share(column) for column in columns.T], total, busy)


def idleness(events: Iterable[Event]) -> list[Idleness]:
    """Each rank's busy and idle seconds within the steps, by mesh and rank, and why it was idle.

    An idle moment has the first reason that applies: a declared wait (for a sampler's rank, one before prompts are
    drawn; for others, one of the script), weight sync, an endpoint that runs on other ranks, or the script's own work.
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
        # If ranks do both, the script's waits apply.
        own: Side = "rollout" if endpoints & ROLLOUT and "update" not in endpoints else "training"
        candidates = [reason for kept, reason in waits if kept == own]
        candidates.append(Reason("new weights are on their way to a sampler", "", sync))
        # The rank's own mesh comes first: there, the cause is uneven rows.
        for (other, name), when in sorted(elsewhere.items(), key=lambda item: (item[0][0] != mesh, item[0])):
            if own == "training" and timeline.streams and side(name.rpartition(".")[2]) == "rollout":
                continue  # the script did not wait for it, or there would be a wait
            where = f"other ranks of {mesh} still run {name}" if other == mesh else f"{name} runs on {other}"
            candidates.append(Reason(where, "", when))
        candidates.append(Reason(SCRIPTS_OWN, "", window))
        busy = intersect(window, union([(span.began, span.ended) for span in spans]))
        idle = subtract(window, busy)
        reasons = _first_that_holds(idle, candidates)
        found.append(Idleness(mesh, rank, seconds(busy), seconds(idle), reasons))
    return found


def _parts(timeline: Timeline, edges: Values, largest: Mapping[Side, Values]) -> tuple[Values, ...]:
    """Shares of time between two edges: both, rollout alone, training alone, scoring alone, exposed weight sync."""
    rollout, training, scoring = largest["rollout"], largest["training"], largest["scoring"]
    middles = (edges[:-1] + edges[1:]) / 2
    sync, starving = (within(each, middles) for each in (timeline.ran("sync"), timeline.starving))
    both = np.maximum(0.0, rollout + training - 1.0)
    free = 1.0 - training
    # If training shares its ranks, other sides have the rest of the time.
    beside = rollout - both, np.minimum(scoring, np.maximum(0.0, free - rollout))
    # Weights that are sent while the trainer waits for a batch in progress delay nothing.
    exposed = sync & ~(starving & (rollout + scoring > 0))
    waited = starving if timeline.streams else rollout > 0
    for_rollouts = np.where(waited, np.maximum(rollout, 1.0 - scoring), 0.0)
    for_rewards = np.where(scoring > 0, 1.0 - for_rollouts, 0.0)
    trains = training > 0
    alone = np.where(trains, beside[0], np.where(exposed, 0.0, for_rollouts))
    scoring_alone = np.where(trains, beside[1], np.where(exposed, 0.0, for_rewards))
    rest = free - alone - scoring_alone
    return both, alone, training - both, scoring_alone, np.where(exposed, rest, 0.0)


def _sums(values: Values, edges: Values, windows: Intervals) -> Values:
    """The integral of the values between the edges over each window."""
    if not len(values):
        return np.zeros(len(windows))
    passed = np.append(0.0, np.cumsum(values * np.diff(edges)))
    before: Values = np.interp(windows, edges, passed)
    return before[:, 1] - before[:, 0]


def _share(column: Sequence[float]) -> Share:
    length, rollout, training, scoring, both, alone, training_alone, scoring_alone, sync = map(float, column)
    other = max(0.0, length - both - alone - training_alone - scoring_alone - sync)
    return Share(length, rollout, training, scoring, both, alone, training_alone, scoring_alone, sync, other)


def _waits_for_a_batch(wait: Wait) -> bool:
    return wait.who in SCRIPT and "batch" in wait.what


def _by_endpoint(spans: Sequence[Span]) -> dict[tuple[str, str], Intervals]:
    found: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for span in spans:
        if side(span.endpoint) != "sync":
            found[span.mesh, f"{span.actor}.{span.endpoint}"].append((span.began, span.ended))
    return {key: union(pairs) for key, pairs in found.items()}


def _by_who(waits: Sequence[Wait]) -> list[tuple[Side, Reason]]:
    """Each kind of wait as a reason, with the side that it keeps idle, the longest first."""
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
