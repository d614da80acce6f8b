"""Where a run spent its time: the overlap of rollout and training, and why ranks were idle.

An endpoint lies on one of four sides: `generate` is rollout; `score` is scoring; `weights`, `load` and `abort` bring
new weights to a sampler; all else is training. Calls that run at once on a rank share it: each of k has 1/k
of its time.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from meshrl.events import Call, Delivery, Event, Span, Step, Swap, Wait
from meshrl.report.intervals import Intervals, intersect, running, seconds, subtract, union, within

Side: TypeAlias = Literal["rollout", "training", "scoring", "sync"]
Values: TypeAlias = npt.NDArray[np.float64]

ROLLOUT = frozenset({"generate"})
SCORING = frozenset({"score"})
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
    if endpoint in SCORING:
        return "scoring"
    return "sync" if endpoint in SYNC else "training"


@dataclass(frozen=True)
class Share:
    """Some seconds of a run, a step or all steps, and what ran in them.

    `both`, `rollout_alone`, `training_alone`, `scoring_alone`, `sync` and `other` add up to `seconds`.
    """

    seconds: float
    rollout: float
    """R: at least one rank was generating. Where ranks did so beside other calls, the largest share of one's time."""
    training: float
    """T: the same of the training side."""
    scoring: float
    """C: the same of scoring."""
    both: float
    """Of R and T: at the same time. Calls that share a rank take turns."""
    rollout_alone: float
    """The trainer waited for rollouts. Of a script without a stream: R without T."""
    training_alone: float
    """No sampler was generating."""
    scoring_alone: float
    """The trainer waited for rewards: nobody trained, and no rollout was waited for or none was being generated."""
    sync: float
    """New weights kept the trainer from going on: what of publishing was exposed."""
    other: float
    """Nobody trained, and the trainer waited for nothing: the script's own work, and the way to the ranks and back."""

    @property
    def efficiency(self) -> float:
        """Overlap efficiency: max(R, T) / seconds, or C / seconds where C is longer; 0 to 1, 1 where no time passed."""
        return max(self.rollout, self.training, self.scoring) / self.seconds if self.seconds > 0 else 1.0

    @property
    def bound(self) -> Side | Literal["other"]:
        """What made it as long as it was: the longest side, or what no side ran for, where that is longer."""
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
    """What ran in each step and in all of them; `steps[i]` is the share of the step numbered `numbers[i]`."""

    numbers: Sequence[int]
    steps: Sequence[Share]
    total: Share
    busy: Mapping[Side, float]
    """Of each side that ranks ran: the mean share of these ranks that ran it, over all steps."""

    @property
    def efficiency(self) -> float:
        """Overlap efficiency of all steps together: the longest of the sides' sums over the sum of step times."""
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
        self.spans: list[Span] = [event for event in events if isinstance(event, Span)]
        self.waits: list[Wait] = [event for event in events if isinstance(event, Wait)]
        steps = (event for event in events if isinstance(event, Step))
        self.steps: list[Step] = sorted(steps, key=lambda step: step.began)
        self.starving: Intervals = union([(wait.began, wait.ended) for wait in self.waits if _waits_for_a_batch(wait)])
        # A stream says when the trainer waits for it; a script without one awaits its rollouts itself.
        self.streams: bool = len(self.starving) > 0 or any(isinstance(event, Delivery) for event in events)
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
    def _on_ranks(self) -> Mapping[tuple[str, int], Mapping[Side, Intervals]]:
        """What each rank ran of each side: pairs that may overlap. A call without spans has the ranks for itself."""
        found: dict[tuple[str, int], dict[Side, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
        for span in self.spans:
            found[span.mesh, span.rank][side(span.endpoint)].append((span.began, max(span.began, span.ended)))
        if not self.spans:
            for number, call in enumerate(self._calls):
                found["", number][side(call.endpoint)].append((call.began, max(call.began, call.ended)))
        return {rank: {of: np.array(own) for of, own in sides.items()} for rank, sides in found.items()}

    @property
    def moments(self) -> list[Intervals]:
        """All in which something begins or ends, but for steps."""
        return [self.starving, self.ran("sync"), *(each for own in self._on_ranks.values() for each in own.values())]

    def shares(self, edges: Values) -> tuple[Mapping[Side, Values], Mapping[Side, Values]]:
        """Which share of its time a rank gives to each side between the edges: the largest, and the mean of its ranks.

        Float64[len(edges) - 1], from 0 to 1. `edges` have all `moments`. The mean only of sides that ranks ran.
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
        """All moments of steps; without a step, from the first event to the last: [1 or more, 2], or [0, 2]."""
        if self.steps:
            return union([(step.began, step.ended) for step in self.steps])
        parts = [union([(each.began, each.ended) for each in kind]) for kind in (self.spans, self._calls, self.waits)]
        ends = np.concatenate(parts)
        return union([(ends.min(), ends.max())]) if len(ends) else union([])


def overlap(events: Iterable[Event], first: int = 0) -> Overlap:
    """What ran in each step and in all: R, T, C, what was exposed, and the overlap efficiency.

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


def _parts(timeline: Timeline, edges: Values, largest: Mapping[Side, Values]) -> tuple[Values, ...]:
    """Both, rollout alone, training alone, scoring alone, new weights: which share of the time between two edges."""
    rollout, training, scoring = largest["rollout"], largest["training"], largest["scoring"]
    middles = (edges[:-1] + edges[1:]) / 2
    sync, starving = (within(each, middles) for each in (timeline.ran("sync"), timeline.starving))
    both = np.maximum(0.0, rollout + training - 1.0)
    free = 1.0 - training
    # Where training shares its ranks, what they share with has the rest.
    beside = rollout - both, np.minimum(scoring, np.maximum(0.0, free - rollout))
    # Weights that go to the sampler while the trainer waits for a batch, which is on its way, delay nobody.
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
    """The integral over each window of what has these values between the edges."""
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
