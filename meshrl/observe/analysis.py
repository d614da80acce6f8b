"""Where a run spent its time: the overlap of rollout and training, and why ranks were idle. Also as text.

An endpoint belongs to one of four sides: `generate` is rollout, `score` is scoring, `weights`, `load` and `abort` are
weight sync, and all others are training. If k calls run at once on a rank, each has 1/k of its time.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from meshrl.events import Call, Delivery, Event, Request, Span, Step, Swap, Wait
from meshrl.observe.run_files import Record

Intervals: TypeAlias = npt.NDArray[np.float64]
"""A set of moments, as sorted, disjoint beginnings and ends in seconds: float64[intervals, 2]."""
Values: TypeAlias = npt.NDArray[np.float64]
Side: TypeAlias = Literal["rollout", "training", "scoring", "sync"]
Bound: TypeAlias = Side | Literal["other"]

PARTS: Final = {
    "both": "both at once",
    "rollout_alone": "rollout alone",
    "training_alone": "training alone",
    "scoring_alone": "scoring",
    "sync": "new weights",
    "other": "other",
}
"""The parts of a step's time, as fields of `StepTime`, and their names on the page."""
_SIDES: Final[tuple[Side, ...]] = ("rollout", "training", "scoring", "sync")
_BOUNDS: Final[tuple[Bound, ...]] = (*_SIDES, "other")
_ENDPOINTS: Final[Mapping[str, Side]] = {
    "generate": "rollout",
    "score": "scoring",
    "weights": "sync",
    "load": "sync",
    "abort": "sync",
}
SCRIPT: Final = frozenset({"trainer", "script", "publish"})
"""Waiters in the script, which keep trainers idle. Other names are parts of the stream of rollouts."""
_DRAWS: Final = "rollout"
"""The waiter before prompts go to samplers, which keeps samplers idle."""
_RANKS: Final = 16
"""Ranks at most whose idle time is reported."""
BOUND: Final = {"sync": "new weights"}
"""Names of bottlenecks that differ from the names of a step's parts."""

IdleLine: TypeAlias = tuple[str, int, float, Mapping[str, float]]
"""A rank's mesh and number, idle seconds per step, and these by reason, the longest first."""


def side(endpoint: str) -> Side:
    """The side of an endpoint."""
    return _ENDPOINTS.get(endpoint, "training")


def union(pairs: Iterable[tuple[float, float]] | Intervals) -> Intervals:
    """The moments in any of the pairs (began, ended), in seconds, which may overlap and be in any order."""
    given = np.asarray(pairs if isinstance(pairs, np.ndarray) else list(pairs), np.float64).reshape(-1, 2)
    given = given[given[:, 1] > given[:, 0]]
    if not len(given):
        return given
    given = given[np.argsort(given[:, 0], kind="stable")]
    reached = np.maximum.accumulate(given[:, 1])
    first = np.concatenate([[True], given[1:, 0] > reached[:-1]])
    last = np.concatenate([first[1:], [True]])
    return np.stack([given[first, 0], reached[last]], axis=1)


def intersect(one: Intervals, other: Intervals) -> Intervals:
    """The moments in both."""
    pieces, middles = _pieces(one, other)
    return union(pieces[within(one, middles) & within(other, middles)])


def subtract(one: Intervals, other: Intervals) -> Intervals:
    """The moments of `one` that are not in `other`."""
    pieces, middles = _pieces(one, other)
    return union(pieces[within(one, middles) & ~within(other, middles)])


def _pieces(one: Intervals, other: Intervals) -> tuple[Intervals, Values]:
    """The pieces between all ends of both sets, and their middles."""
    edges = np.unique(np.concatenate([one.ravel(), other.ravel()]))
    return np.stack([edges[:-1], edges[1:]], axis=1), (edges[:-1] + edges[1:]) / 2


def within(one: Intervals, moments: Values) -> npt.NDArray[np.bool_]:
    """Whether each moment is in the set: bool[n]."""
    if not len(one):
        return np.zeros(len(moments), np.bool_)
    nearest = np.searchsorted(one[:, 0], moments, "right") - 1
    inside: npt.NDArray[np.bool_] = (nearest >= 0) & (moments < one[nearest, 1])
    return inside


def seconds(one: Intervals) -> float:
    """Total duration."""
    return float((one[:, 1] - one[:, 0]).sum())


def seconds_in(one: Intervals, windows: Intervals) -> Values:
    """Duration in each of the windows, [n, 2], which may touch or overlap: float64[n]."""
    inside = np.arange(max(0, one.size - 1)) % 2 == 0
    return _integrals(inside.astype(np.float64), one.ravel(), windows)


def alone(pairs: Intervals) -> Values:
    """Seconds that each pair would last without sharing its rank, float64[n]. Each of k concurrent pairs has 1/k."""
    edges = np.unique(pairs)
    count = _running(pairs, edges)
    share = np.divide(np.diff(edges), count, out=np.zeros(len(count)), where=count > 0)
    served = np.append(0.0, np.cumsum(share))
    began, ended = (served[np.searchsorted(edges, ends)] for ends in pairs.T)
    lasted: Values = ended - began
    return lasted


def _running(pairs: Intervals, edges: Values) -> npt.NDArray[np.int64]:
    """Number of pairs that run between each two edges: int64[len(edges) - 1]. All their ends must be edges."""
    began, ended = (np.bincount(np.searchsorted(edges, ends), minlength=len(edges)) for ends in pairs.T)
    count: npt.NDArray[np.int64] = np.cumsum(began - ended)[:-1]
    return count


def _integrals(values: Values, edges: Values, windows: Intervals) -> Values:
    """The integral over each window of a function with these values between the edges, and 0 outside."""
    if not len(values):
        return np.zeros(len(windows))
    passed = np.append(0.0, np.cumsum(values * np.diff(edges)))
    before: Values = np.interp(windows, edges, passed)
    return before[:, 1] - before[:, 0]


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step or of all steps, and what ran in them. The `PARTS` add up to `seconds`."""

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
    def bound(self) -> Bound:
        """The bottleneck: the longest side, or `other` if that is longer."""
        return max(_BOUNDS, key=lambda name: float(getattr(self, name)))


@dataclass(frozen=True)
class Overlap:
    """The time in each step and in all of them. `steps[i]` belongs to the step with number `numbers[i]`."""

    numbers: Sequence[int]
    steps: Sequence[StepTime]
    total: StepTime
    busy: Mapping[Side, float]
    """For each side, the mean share of time over the ranks that ran it, in all steps."""

    @property
    def efficiency(self) -> float:
        """Overlap efficiency of all steps: the longest side's sum over the sum of step times."""
        return self.total.efficiency


@dataclass(frozen=True)
class IdleReason:
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
    reasons: Sequence[IdleReason]


class _Moments:
    """The events of a run as sets of moments."""

    def __init__(self, events: Iterable[Event]) -> None:
        events = list(events)
        self.spans: list[Span] = [event for event in events if isinstance(event, Span)]
        self.waits: list[Wait] = [event for event in events if isinstance(event, Wait)]
        self.steps: list[Step] = sorted((e for e in events if isinstance(e, Step)), key=lambda step: step.began)
        self._calls = [event for event in events if isinstance(event, Call)]
        self._swaps = [event for event in events if isinstance(event, Swap)]
        self.starving: Intervals = _of(wait for wait in self.waits if wait.who in SCRIPT and "batch" in wait.what)
        # A stream reports when the trainer waits for it. A script without one awaits its rollouts itself.
        self.streams: bool = len(self.starving) > 0 or any(isinstance(event, Delivery) for event in events)

    @cached_property
    def sync(self) -> Intervals:
        """Moments in which new weights were on their way. Without spans of ranks, the calls count."""
        calls = (each for each in self.spans or self._calls if side(each.endpoint) == "sync")
        return _of([*calls, *self._swaps, *(wait for wait in self.waits if wait.who == "publish")])

    @cached_property
    def _on_ranks(self) -> Mapping[tuple[str, int], Mapping[Side, Intervals]]:
        """What each rank ran by side: pairs that may overlap. Without spans, each call counts as one rank."""
        ranks: dict[tuple[str, int], dict[Side, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
        for span in self.spans:
            ranks[span.mesh, span.rank][side(span.endpoint)].append((span.began, max(span.began, span.ended)))
        if not self.spans:
            for number, call in enumerate(self._calls):
                ranks["", number][side(call.endpoint)].append((call.began, max(call.began, call.ended)))
        return {rank: {of: np.array(own) for of, own in sides.items()} for rank, sides in ranks.items()}

    @cached_property
    def edges(self) -> Values:
        """All moments in which anything begins or ends."""
        pairs = [self.window, self.starving, self.sync]
        pairs += [own for sides in self._on_ranks.values() for own in sides.values()]
        return np.unique(np.concatenate([each.ravel() for each in pairs]))

    def shares(self) -> tuple[Mapping[Side, Values], Mapping[Side, Values]]:
        """The share of a rank's time for each side between the edges: the largest of all ranks, and their mean.

        Float64[len(edges) - 1], from 0 to 1. Only sides that ranks ran have a mean.
        """
        pieces = max(0, len(self.edges) - 1)
        largest: dict[Side, Values] = {of: np.zeros(pieces) for of in _SIDES}
        total: dict[Side, Values] = {of: np.zeros(pieces) for of in _SIDES}
        ranks: dict[Side, int] = dict.fromkeys(_SIDES, 0)
        for sides in self._on_ranks.values():
            own = np.unique(np.concatenate(list(sides.values())))
            counts: dict[Side, npt.NDArray[np.int64]] = {of: _running(pairs, own) for of, pairs in sides.items()}
            everything = np.maximum(1, sum(counts.values()))
            places = np.searchsorted(self.edges, own)
            span = slice(places[0], places[-1])
            for of, count in counts.items():
                share = np.repeat(count / everything, np.diff(places))
                largest[of][span] = np.maximum(largest[of][span], share)
                total[of][span] += share
                ranks[of] += 1
        return largest, {of: total[of] / count for of, count in ranks.items() if count and self.spans}

    @cached_property
    def window(self) -> Intervals:
        """Moments of all steps. Without steps, from the first to the last event: [1 or more, 2], or [0, 2]."""
        if self.steps:
            return _of(self.steps)
        ends = np.concatenate([_of(kind) for kind in (self.spans, self._calls, self.waits)])
        return union([(ends.min(), ends.max())]) if len(ends) else union([])


def _of(events: Iterable[Span | Call | Wait | Step | Swap]) -> Intervals:
    return union((each.began, each.ended) for each in events)


def overlap(events: Iterable[Event], first: int = 0) -> Overlap:
    """The time in each step and in all of them: R, T, C, exposed weight sync, and the overlap efficiency.

    `first`: the number of the first step that counts, so that a benchmark can leave out the filling of a pipeline.
    Without steps, all events count as step 0.
    """
    moments = _Moments(events)
    steps = [step for step in moments.steps if step.step >= first]
    windows = moments.window
    if moments.steps:
        windows = np.array([(step.began, step.ended) for step in steps], np.float64).reshape(-1, 2)
    largest, mean = moments.shares()
    sides = [largest["rollout"], largest["training"], largest["scoring"]]
    shares = (_integrals(each, moments.edges, windows) for each in (*sides, *_parts(moments, largest)))
    columns = np.stack([windows[:, 1] - windows[:, 0], *shares])
    total = _step_time(columns.sum(axis=1))
    busy: dict[Side, float] = {
        of: float(_integrals(each, moments.edges, windows).sum()) / (total.seconds or 1.0) for of, each in mean.items()
    }
    numbers = [step.step for step in steps] if moments.steps else list(range(len(windows)))
    return Overlap(numbers, [_step_time(column) for column in columns.T], total, busy)


def _parts(moments: _Moments, largest: Mapping[Side, Values]) -> tuple[Values, ...]:
    """Shares of time between two edges: both, rollout alone, training alone, scoring alone, exposed weight sync."""
    rollout, training, scoring = largest["rollout"], largest["training"], largest["scoring"]
    middles = (moments.edges[:-1] + moments.edges[1:]) / 2
    sync, starving = (within(each, middles) for each in (moments.sync, moments.starving))
    both = np.maximum(0.0, rollout + training - 1.0)
    free = 1.0 - training
    # If training shares its ranks, other sides have the rest of the time.
    beside = rollout - both, np.minimum(scoring, np.maximum(0.0, free - rollout))
    # Weights that are sent while the trainer waits for a batch in progress delay nothing.
    exposed = sync & ~(starving & (rollout + scoring > 0))
    waited = starving if moments.streams else rollout > 0
    for_rollouts = np.where(waited, np.maximum(rollout, 1.0 - scoring), 0.0)
    for_rewards = np.where(scoring > 0, 1.0 - for_rollouts, 0.0)
    trains = training > 0
    rollout_alone = np.where(trains, beside[0], np.where(exposed, 0.0, for_rollouts))
    scoring_alone = np.where(trains, beside[1], np.where(exposed, 0.0, for_rewards))
    rest = free - rollout_alone - scoring_alone
    return both, rollout_alone, training - both, scoring_alone, np.where(exposed, rest, 0.0)


def _step_time(column: Values) -> StepTime:
    length, rollout, training, scoring, both, alone, training_alone, scoring_alone, sync = map(float, column)
    other = max(0.0, length - both - alone - training_alone - scoring_alone - sync)
    return StepTime(length, rollout, training, scoring, both, alone, training_alone, scoring_alone, sync, other)


def idleness(events: Iterable[Event]) -> list[Idleness]:
    """Each rank's busy and idle seconds within the steps, by mesh and rank, and why it was idle.

    An idle moment has the first reason that applies: a declared wait (for a sampler's rank, one before prompts are
    drawn; for others, one of the script), weight sync, an endpoint that runs on other ranks, or the script's own work.
    """
    moments = _Moments(events)
    ranks: dict[tuple[str, int], list[Span]] = defaultdict(list)
    elsewhere: dict[tuple[str, str], list[Span]] = defaultdict(list)
    for span in moments.spans:
        ranks[span.mesh, span.rank].append(span)
        if side(span.endpoint) != "sync":
            elsewhere[span.mesh, f"{span.actor}.{span.endpoint}"].append(span)
    by_endpoint = [(key, _of(spans)) for key, spans in sorted(elsewhere.items(), key=lambda item: item[0])]
    waits = _wait_reasons(moments.waits)
    idle_ranks: list[Idleness] = []
    for (mesh, rank), spans in sorted(ranks.items()):
        endpoints = {span.endpoint for span in spans}
        # If ranks do both, the script's waits apply.
        trains = "generate" not in endpoints or bool(endpoints & {"update", "forward_backward"})
        own: Side = "training" if trains else "rollout"
        candidates = [reason for kept_idle, reason in waits if kept_idle == own]
        candidates.append(IdleReason("new weights are on their way to a sampler", "", moments.sync))
        # The rank's own mesh comes first: there, the cause is uneven rows.
        for (other, name), when in sorted(by_endpoint, key=lambda item: item[0][0] != mesh):
            if own == "training" and moments.streams and side(name.rpartition(".")[2]) == "rollout":
                continue  # the script did not wait for it, or there would be a wait
            where = f"other ranks of {mesh} still run {name}" if other == mesh else f"{name} runs on {other}"
            candidates.append(IdleReason(where, "", when))
        candidates.append(IdleReason("between calls: the script's own work", "", moments.window))
        busy = intersect(moments.window, _of(spans))
        idle = subtract(moments.window, busy)
        idle_ranks.append(Idleness(mesh, rank, seconds(busy), seconds(idle), _first_that_holds(idle, candidates)))
    return idle_ranks


def _wait_reasons(waits: Sequence[Wait]) -> list[tuple[Side, IdleReason]]:
    """Each kind of wait as a reason, with the side that it keeps idle, the longest first."""
    kinds: dict[tuple[str, str], list[Wait]] = defaultdict(list)
    for wait in waits:
        if wait.who in SCRIPT or wait.who == _DRAWS:
            kinds[wait.who, wait.what].append(wait)
    reasons: list[tuple[Side, IdleReason]] = []
    for (who, what), same in kinds.items():
        longest = max(same, key=lambda wait: wait.ended - wait.began)
        idles: Side = "rollout" if who == _DRAWS else "training"
        reasons.append((idles, IdleReason(f"{who} waits for {what}", longest.on, _of(same))))
    return sorted(reasons, key=lambda each: -each[1].seconds)


def _first_that_holds(idle: Intervals, candidates: Sequence[IdleReason]) -> list[IdleReason]:
    reasons: list[IdleReason] = []
    for reason in candidates:
        if len(when := intersect(idle, reason.when)):
            reasons.append(IdleReason(reason.why, reason.blocked, when))
            idle = subtract(idle, when)
    return sorted(reasons, key=lambda reason: -reason.seconds)


def request_lines(requests: Sequence[Request]) -> list[tuple[str, str]]:
    """What clients asked of a server, as names with values. Empty without requests."""
    if not requests:
        return []
    models, tenants = {each.model for each in requests}, {each.tenant for each in requests}
    failed = sum(each.error is not None for each in requests)
    verbs = Counter(each.verb for each in requests)
    rows, tokens = sum(each.rows or 0 for each in requests), sum(each.tokens or 0 for each in requests)
    waited = float(np.median([each.began - each.received for each in requests]))
    return [
        ("requests", f"{len(requests):,} of {len(models):,} models and {len(tenants):,} tenants, {failed:,} failed"),
        ("of them", _listed({verb: f"{count:,}" for verb, count in verbs.most_common()})),
        ("rows and tokens", f"{rows:,} and {tokens:,}"),
        ("until its turn, median", duration(waited)),
        ("in its turn, median", duration(float(np.median([each.ended - each.began for each in requests])))),
    ]


def run_lines(record: Record) -> list[tuple[str, str]]:
    """A run's bottlenecks, staleness and idle ranks, as names with values.

    Empty if the events contain no steps. The names are those that `meshrl simulate` prints.
    """
    lengths = [event.ended - event.began for event in record.events if isinstance(event, Step)]
    if not lengths:
        return request_lines([event for event in record.events if isinstance(event, Request)])
    count, shares, idle = len(lengths), overlap(record.events), idleness(record.events)
    total, bound = shares.total, Counter(step.bound for step in shares.steps)
    staleness, dropped = deliveries_of(event for event in record.events if isinstance(event, Delivery))
    ranks = [
        (rank.mesh, rank.rank, rank.idle / count, {reason.why: reason.seconds / count for reason in rank.reasons})
        for rank in idle[:_RANKS]
    ]
    parts = {text: f"{getattr(total, name) / (total.seconds or 1.0):.0%}" for name, text in PARTS.items()}
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
    return ", ".join(f"{name}: {value}" for name, value in values.items()) or "none"
