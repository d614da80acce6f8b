"""The duration of calls in a simulated run: as in a recorded run, or as guessed."""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from types import MappingProxyType
from typing import Self, TypeAlias

import numpy as np

from meshrl.errors import DataError
from meshrl.events import Call, Delivery, Event, Span, Step, Wait
from meshrl.observe import Intervals, alone, seconds_in, subtract, union

ROLES = ("Policy", "Reference", "Critic", "Sampler", "Reward")
"""The simulated roles. A recorded call belongs to the role with which its actor's class name ends."""

Endpoint: TypeAlias = tuple[str, str]
"""Role and endpoint."""

_OPTIONAL = frozenset({"save", "abort", "replay", "encode", "step"})
"""Endpoints that take no time if the record has no calls of them."""
_STRETCH = 32
"""Lowest number of steps that are drawn together, if the record has that many."""
_ALIKE = 0.1
"""Numbers of rows that differ by less, in logarithms, count as the same."""
_SCRIPT = frozenset({"trainer", "publish"})
"""Waiters in the script."""


@dataclass(frozen=True)
class CallCost:
    """The cost of a recorded call."""

    seconds: Sequence[float]
    """Seconds of each rank if it had worked on nothing else."""
    rows: float | None = None
    """Rows per rank. None if the cost does not depend on rows."""
    step: int = 0
    """The recorded step in which it began."""


@dataclass(frozen=True)
class Pace:
    """The costs of each endpoint's calls, and the other costs of steps, in recorded order."""

    works: Mapping[Endpoint, Sequence[CallCost]]
    own: Sequence[CallCost] = ()
    """The script's own work in a step: between calls, communication with ranks, and recording."""
    latency: Sequence[CallCost] = ()
    """Time from the end of a `generate` call to the script's batch, during which no rank works."""
    steps: int = 1
    """Number of recorded steps."""
    strict: bool = False
    """True if the costs are recorded. Then a missing endpoint is an error, else it takes no time."""
    beyond: tuple[float, float] = (0.0, 0.0)
    """Exponents for calls with fewer and with more rows than recorded ones.

    A call with k times the nearest recorded rows takes k to this power times as long as on the line.
    """
    guessed: Sequence[str] = ()
    """Assumptions that no record covers."""

    @classmethod
    def recorded(
        cls, events: Iterable[Event], n: int, first: int = 0, splits: Mapping[str, int] = MappingProxyType({})
    ) -> Self:
        """The costs of a run's calls. If there are calls within its steps from `first` on, only these count.

        `n`: completions per prompt. `splits`: for each role, the number of ranks that share the same rows. Raises
        DataError if the run has fewer than two such steps.
        """
        events = list(events)
        windows = step_windows(events, first)
        within = union(windows)
        calls = {each.id: each for each in events if isinstance(each, Call) and each.error is None}
        spans = [each for each in events if isinstance(each, Span) and each.call in calls]
        costs = _costs(spans)
        costs_of: dict[int, list[tuple[int, float]]] = defaultdict(list)
        for span, cost in zip(spans, costs, strict=True):
            costs_of[span.call].append((span.rank, cost))
        everywhere: dict[Endpoint, list[CallCost]] = defaultdict(list)
        inside: dict[Endpoint, list[CallCost]] = defaultdict(list)
        for number, parts in sorted(costs_of.items(), key=lambda item: calls[item[0]].began):
            call = calls[number]
            role = next((role for role in ROLES if call.actor.endswith(role)), None)
            if role is None:
                continue
            shares = max(1, len(parts) // splits.get(role, 1))
            rows = None if call.rows is None else call.rows * (n if call.endpoint == "generate" else 1) / shares
            step = max(0, int(np.searchsorted(windows[:, 0], call.began, "right")) - 1)
            work = CallCost([cost for _, cost in sorted(parts)], rows, step)
            everywhere[role, call.endpoint].append(work)
            if within[0, 0] <= call.began <= within[-1, 1]:
                inside[role, call.endpoint].append(work)
        own, latency = _gaps(events, spans, windows)
        return cls(everywhere | inside, own, latency, len(windows), strict=True)

    def works_of(self, role: str, endpoint: str) -> Sequence[CallCost]:
        """The costs of an endpoint's calls. Raises DataError if the record should contain some and does not."""
        works = self.works.get((role, endpoint), ())
        if not works and self.strict and endpoint not in _OPTIONAL:
            has = ", ".join(sorted(f"{role}.{name}" for role, name in self.works)) or "none at all"
            raise DataError(
                f"the recorded run has no call of {role}.{endpoint}; it has calls of {has}: record a run of this "
                "configuration, or leave --from out and give --rollout and --train"
            )
        return works

    @property
    def training(self) -> str:
        """The endpoint whose calls train the policy: `update`, or `forward_backward` if the record has that instead."""
        halves = "forward_backward"
        return halves if (("Policy", halves) in self.works and ("Policy", "update") not in self.works) else "update"


class StepSequence:
    """Chooses the recorded step that a simulated step follows: stretches of steps, in an order set by the seed.

    Calls that were slow together are slow together again. Each turn follows every stretch once.
    """

    def __init__(self, steps: int, seed: int) -> None:
        """`steps`: number of recorded steps."""
        self.seed = seed
        self.step = 0
        """The simulated step."""
        self._steps = steps
        self._length = steps // max(1, steps // _STRETCH)
        self._turn = -1
        self._starts: Sequence[int] = ()

    @property
    def place(self) -> int:
        """The recorded step."""
        stretch, passed = divmod(self.step, self._length)
        turn, number = divmod(stretch, self._steps // self._length)
        if turn != self._turn:
            random = Random(f"{self.seed} {turn}")
            shift, count = int(random.random() * self._steps), self._steps // self._length
            self._starts = [shift + each * self._length for each in random.sample(range(count), count)]
            self._turn = turn
        return (self._starts[number] + passed) % self._steps


class CallDurations:
    """The durations of an endpoint's calls on one rank, from the tape's place in the record."""

    def __init__(
        self, works: Sequence[CallCost], rank: int, tape: StepSequence, beyond: tuple[float, float] = (0.0, 0.0)
    ) -> None:
        """`works`: in recorded order. `beyond`: as in `Pace`."""
        self._works = works
        self._beyond = beyond
        self._sizes = [work.rows for work in works if work.rows]
        self.guessed: set[int] = set()
        """Drawn numbers of rows beyond the recorded ones."""
        self._rank = rank
        self._tape = tape
        self._step = 0
        self._drawn = 0
        """Number drawn in this step."""
        self._near: dict[int, Sequence[CallCost]] = {}
        self._fixed, self._slope = _line(works)

    def next(self, rows: int | None) -> float:
        """Seconds of a call with `rows` rows, scaled from a recorded call with a similar number."""
        if not self._works or rows == 0:
            return 0.0
        key = rows or 0
        if key not in self._near:
            self._near[key] = self._similar(rows)
            if abs(math.log(self._excess(rows))) > _ALIKE and any(sum(work.seconds) for work in self._works):
                self.guessed.add(key)
        some = self._near[key]
        if self._tape.step != self._step:
            self._step, self._drawn = self._tape.step, 0
        work = some[(bisect_left(some, self._tape.place, key=lambda each: each.step) + self._drawn) % len(some)]
        self._drawn += 1
        seconds = work.seconds[self._rank % len(work.seconds)]
        if not rows or not work.rows:
            return seconds
        times = self._excess(rows)
        return seconds * self._cost(rows) / self._cost(work.rows) * math.pow(times, self._beyond[times > 1])

    def _excess(self, rows: int | None) -> float:
        """`rows` over the nearest recorded number. 1 within the recorded range."""
        if not rows or not self._sizes:
            return 1.0
        return rows / min(max(rows, min(self._sizes)), max(self._sizes))

    def _cost(self, rows: float) -> float:
        return self._fixed + self._slope * rows

    def _similar(self, rows: int | None) -> Sequence[CallCost]:
        """The works whose number of rows is nearest to `rows`, or almost."""
        if rows is None or not all(work.rows for work in self._works):
            return self._works
        apart = [abs(math.log(work.rows / rows)) for work in self._works if work.rows]
        return [work for work, distance in zip(self._works, apart, strict=True) if distance <= min(apart) + 0.2]


def lowest_cost(works: Sequence[CallCost], rows: float) -> float:
    """A lower bound for the seconds of a call with `rows` rows, or of several calls with this sum."""
    fixed, slope = _line(works)
    costs = (
        min(work.seconds) * ((fixed + slope * rows) / (fixed + slope * work.rows) if work.rows else 1.0)
        for work in works
    )
    return min(costs, default=0.0)


def typical_cost(works: Sequence[CallCost], rows: float, others: Sequence[CallCost]) -> float:
    """Seconds of the median call, scaled to `rows` rows.

    Scaled by the line of these works. If they all have one number of rows, by the line of `others`, else in proportion.
    """
    several = len({work.rows for work in works}) > 1
    fixed, slope = _line(works if several else others)
    costs = [
        (sum(work.seconds) / len(work.seconds))
        * ((fixed + slope * rows) / (fixed + slope * work.rows) if rows and work.rows else 1.0)
        for work in works
    ]
    return float(np.median(costs))


def _line(works: Sequence[CallCost]) -> tuple[float, float]:
    """Fixed cost and cost per row of a call, up to a common factor. By least squares, neither below 0."""
    sized = np.array([(work.rows, sum(work.seconds) / len(work.seconds)) for work in works if work.rows])
    if len(sized) == 0 or np.ptp(sized[:, 0]) == 0:
        return 0.0, 1.0
    rows, seconds = sized.T
    slope = float(np.cov(rows, seconds, ddof=0)[0, 1] / rows.var())
    if slope <= 0:
        return 1.0, 0.0
    return max(0.0, float(seconds.mean() - slope * rows.mean())), slope


def step_windows(events: Iterable[Event], first: int = 0) -> Intervals:
    """Windows from each step's beginning to the next one's, float64[steps, 2], without the first steps and the last.

    Raises DataError if none is left.
    """
    began = sorted(each.began for each in events if isinstance(each, Step))[first:]
    if len(began) < 2:
        raise DataError(
            f"the run has {len(began) + first} steps, and its first {first}, in which its pipeline fills, and its last "
            "do not count: record a longer one"
        )
    return np.stack([began[:-1], began[1:]], axis=1)


def _costs(spans: Sequence[Span]) -> list[float]:
    """Seconds of each span if it had its rank alone: each of k concurrent calls runs at 1/k of the speed."""
    costs = [0.0] * len(spans)
    of_rank: dict[tuple[str, int], list[int]] = defaultdict(list)
    for index, span in enumerate(spans):
        of_rank[span.mesh, span.rank].append(index)
    for indices in of_rank.values():
        ends = np.array([(spans[index].began, spans[index].ended) for index in indices])
        for index, cost in zip(indices, alone(ends).tolist(), strict=True):
            costs[index] = cost
    return costs


def _gaps(events: Sequence[Event], spans: Sequence[Span], windows: Intervals) -> tuple[list[CallCost], list[CallCost]]:
    """For each step, the time without waits or calls of the script, and the time of waits in which nothing ran."""
    waits = union([(each.began, each.ended) for each in events if isinstance(each, Wait) and each.who in _SCRIPT])
    everything = union([(span.began, span.ended) for span in spans])
    streams = any(isinstance(each, Delivery) for each in events)
    # Without a stream, the script itself waits for `generate`.
    called = [(span.began, span.ended) for span in spans if not (streams and span.endpoint == "generate")]
    busy = union([*called, *map(tuple, waits.tolist())])
    own = windows[:, 1] - windows[:, 0] - seconds_in(busy, windows)
    latency = seconds_in(subtract(waits, everything), windows)
    works = ([CallCost([each], step=step) for step, each in enumerate(some.tolist())] for some in (own, latency))
    return next(works), next(works)
