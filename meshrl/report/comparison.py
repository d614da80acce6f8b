"""What the page of a comparison shows, as one plain value that becomes its JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from meshrl.events import Step
from meshrl.report.analysis import overlap
from meshrl.report.content import TEXT
from meshrl.report.curves import Curve, Curves
from meshrl.report.difference import Difference, Values, resampled
from meshrl.report.groups import Group, differing, make_groups, told_lineage
from meshrl.report.lanes import rounded
from meshrl.report.quantities import FRONT, quantity
from meshrl.report.reading import Line, Record

POINTS: Final = 200
"""The most points of a line."""
_SMOOTH: Final = 80
"""Of more steps a line is the mean of a twentieth of them around each."""
_PROMPTS: Final = 60
"""The most prompts whose completions stand side by side."""
_LEAST: Final = 5
"""Steps whose rewards are resampled, at least; a tenth of all where that is more."""
_HELD_OUT: Final = {"greedy": "held-out reward, greedy", "sampled": "held-out reward, sampled"}
_NO_CURVES: Final = ("step", "seconds")


@dataclass(frozen=True)
class ShownRun:
    """A run, and where the time of its steps went."""

    name: str
    group: int
    seed: str
    status: str
    steps: int
    step_s: float | None
    """Seconds a step, mean."""
    lineage: str
    forked_at: int | None
    split: Mapping[str, float] | None
    """Seconds of a step, mean, by what ran, as in `Share`; None where no events are left."""


@dataclass(frozen=True)
class GroupLine:
    """A number of a group over steps: the mean of its runs, and the lowest and highest where they are several."""

    group: int
    x: list[int]
    mean: list[float]
    low: list[float] | None
    high: list[float] | None


@dataclass(frozen=True)
class Chart:
    """A number over steps, of all groups."""

    name: str
    unit: str
    lines: list[GroupLine]


@dataclass(frozen=True)
class Measure:
    """A number that sums a group up: the mean of its runs, and the value of each."""

    name: str
    values: list[float | None]
    runs: list[list[float]]


@dataclass(frozen=True)
class Completion:
    """What a group made of a prompt."""

    text: str
    reward: float | None
    step: int | None
    """None where it was made in the end, of a held-out prompt."""


@dataclass(frozen=True)
class Sample:
    """A prompt, with the newest completion of each group; None where a group has none."""

    prompt: str
    held_out: bool
    completions: list[Completion | None]


@dataclass(frozen=True)
class Comparison:
    """All that the page shows; the first group is what others are compared with."""

    groups: list[str]
    runs: list[ShownRun]
    notes: list[str]
    settings: dict[str, list[str | None]]
    """Those that differ, a value a group."""
    measures: list[Measure]
    differences: list[Difference]
    sentences: list[str]
    """Of the differences."""
    charts: list[Chart]
    front: int
    """How many charts stand in front."""
    samples: list[Sample]


def compare(runs: Sequence[Record], seed: int = 0) -> Comparison:
    """What is different between runs, and by how much; the first one's group is the base.

    `seed`: of what is resampled. ConfigError where they cannot be compared, as `make_groups` says.
    """
    groups = make_groups(runs)
    notes = [f"{run.folder}: {note}" for run in runs for note in run.notes]
    found = [each for other in groups[1:] for each in _differences(groups[0], other, seed, notes)]
    if len(groups) == 1:
        notes.append("All runs differ only in their seed: there is no difference to test.")
    charts = _charts(groups)
    front = sorted((each for each in charts if each.name in FRONT), key=lambda each: FRONT.index(each.name))
    return Comparison(
        groups=[group.name for group in groups],
        runs=[_shown(run, number, seed) for number, group in enumerate(groups) for run, seed in _seeded(group)],
        notes=notes,
        settings={key: list(values) for key, values in differing(groups).items()},
        measures=_measures(groups),
        differences=found,
        sentences=[each.sentence for each in found],
        charts=[*front, *(each for each in charts if each not in front)],
        front=len(front),
        samples=_samples(groups),
    )


def _seeded(group: Group) -> list[tuple[Record, str]]:
    return list(zip(group.runs, group.seeds, strict=True))


def _shown(run: Record, group: int, seed: str) -> ShownRun:
    times = Curves(run.metrics).get("step_s")
    step = run.lineage.get("step")
    return ShownRun(
        name=run.name,
        group=group,
        seed=seed,
        status=str(run.summary.get("status", "not ended")),
        steps=len(run.metrics),
        step_s=rounded(float(times.values.mean())) if times else None,
        lineage=told_lineage(run.lineage),
        forked_at=step if isinstance(step, int) else None,
        split=_split(run),
    )


def _split(run: Record) -> Mapping[str, float] | None:
    steps = sum(isinstance(event, Step) for event in run.events)
    if not steps:
        return None
    total = overlap(run.events).total
    names = ("both", "rollout_alone", "training_alone", "scoring_alone", "sync", "other", "seconds")
    return {name: rounded(getattr(total, name) / steps) for name in names}


def _charts(groups: Sequence[Group]) -> list[Chart]:
    """A chart for each number that is not one and the same in all runs."""
    lines = [line for group in groups for run in group.runs for line in (*run.metrics, *run.evaluations)]
    names = dict.fromkeys(name for line in lines for name in line if name not in _NO_CURVES)
    found = ((name, [_line(group, number, name) for number, group in enumerate(groups)]) for name in names)
    charts = [Chart(name, quantity(name).unit, [line for line in drawn if line]) for name, drawn in found]
    return [each for each in charts if len({value for line in each.lines for value in _extent(line)}) > 1]


def _extent(line: GroupLine) -> list[float]:
    return [*line.mean, *(line.low or ()), *(line.high or ())]


def _line(group: Group, number: int, name: str) -> GroupLine | None:
    steps, values = _common(group, name)
    if not len(steps):
        return None
    if len(steps) > _SMOOTH:
        values = np.stack([Curve(steps, own).smooth(20) for own in values])
    kept = np.unique(np.linspace(0, len(steps) - 1, min(POINTS, len(steps))).astype(np.int64))
    mean, low, high = (_told(each[kept]) for each in (values.mean(0), values.min(0), values.max(0)))
    x: list[int] = steps[kept].tolist()
    return GroupLine(number, x, mean, *((low, high) if len(values) > 1 else (None, None)))


def _told(values: Values) -> list[float]:
    return [float(f"{value:.6g}") for value in values]


def _common(group: Group, name: str) -> tuple[np.typing.NDArray[np.int64], Values]:
    """A number of those runs of a group that have it, at the steps that all of these have: [steps], [runs, steps]."""
    every = [Curves(run.metrics).get(name) or Curves(run.evaluations).get(name) for run in group.runs]
    curves = [curve for curve in every if curve]
    if not curves:
        return np.zeros(0, np.int64), np.zeros((0, 0))
    steps = curves[0].steps
    for curve in curves[1:]:
        steps = np.intersect1d(steps, curve.steps)
    # A step that a fork or an interruption wrote twice counts as it was last.
    return np.unique(steps), np.stack([_at(curve, np.unique(steps)) for curve in curves])


def _at(curve: Curve, steps: np.typing.NDArray[np.int64]) -> Values:
    last = dict(zip(curve.steps.tolist(), curve.values.tolist(), strict=True))
    return np.array([last[step] for step in steps.tolist()])


def _end(group: Group) -> tuple[np.typing.NDArray[np.int64], Values]:
    """The rewards of the last steps: [steps], [runs, steps]."""
    steps, rewards = _common(group, "reward")
    last = max(_LEAST, len(steps) // 10)
    return steps[-last:], rewards[:, -last:]


def _held_out(group: Group, kind: str) -> tuple[Mapping[str, int], Values] | None:
    """The held-out prompts by place, and their rewards, float64[runs, prompts], of runs that kept the same ones."""
    runs = [run.held_out for run in group.runs if run.held_out]
    if not runs:
        return None
    prompts = [str(line.get("prompt")) for line in runs[0]]
    alike = [lines for lines in runs if [str(line.get("prompt")) for line in lines] == prompts]
    rewards = np.array([[_reward(line.get(kind)) for line in lines] for lines in alike], np.float64)
    return {prompt: place for place, prompt in enumerate(prompts)}, rewards


def _of(held_out: tuple[Mapping[str, int], Values], prompts: Sequence[str]) -> Values:
    """The rewards of these prompts."""
    places, rewards = held_out
    return rewards[:, [places[prompt] for prompt in prompts]]


def _reward(value: object) -> float:
    return float(value) if isinstance(value, int | float) else np.nan


def _measures(groups: Sequence[Group]) -> list[Measure]:
    found = [Measure("reward, last steps", *_summed([_end(group)[1] for group in groups]))]
    for kind, name in _HELD_OUT.items():
        every = [_held_out(group, kind) for group in groups]
        found.append(Measure(name, *_summed([each[1] if each else np.zeros((0, 0)) for each in every])))
    times = [_common(group, "step_s")[1] for group in groups]
    found.append(Measure("seconds a step", *_summed(times)))
    return [each for each in found if any(value is not None for value in each.values)]


def _summed(groups: Sequence[Values]) -> tuple[list[float | None], list[list[float]]]:
    runs = [_told(values.mean(1)) if values.size else [] for values in groups]
    return [float(f"{np.mean(each):.6g}") if each else None for each in runs], runs


def _differences(base: Group, other: Group, seed: int, notes: list[str]) -> list[Difference]:
    found: list[Difference] = []
    for kind, name in _HELD_OUT.items():
        first, second = _held_out(base, kind), _held_out(other, kind)
        if first is None or second is None:
            continue
        both = [prompt for prompt in first[0] if prompt in second[0]]
        if len(both) < _LEAST:
            notes.append(f"{base.name} and {other.name} held out other prompts, which are not compared.")
            break
        values = _of(first, both), _of(second, both)
        if all(np.isfinite(each).all() for each in values):
            over = f"{len(both)} prompts"
            found.append(_difference(name, (base, other), values, seed, over, paired=True))
    (steps, rewards), (others, theirs) = _end(base), _end(other)
    if min(rewards.shape[1], theirs.shape[1]) >= _LEAST:
        same = np.array_equal(steps, others)
        over = f"the batches of {' and '.join(str(each) for each in sorted({len(steps), len(others)}))} steps"
        name = f"reward in the last {len(steps)} steps" if same else "reward in the last steps of each"
        found.append(_difference(name, (base, other), (rewards, theirs), seed, over, paired=same))
    if not any(run.held_out for group in (base, other) for run in group.runs):
        notes.append(f"{base.name} and {other.name} have no held_out.jsonl, so held-out prompts are not tested.")
    return found


def _difference(
    name: str, groups: tuple[Group, Group], values: tuple[Values, Values], seed: int, over: str, *, paired: bool
) -> Difference:
    found = resampled(*values, seed, paired=paired)
    means = float(values[0].mean()), float(values[1].mean())
    return Difference(name, groups[0].name, groups[1].name, means, *found, over, (len(values[0]), len(values[1])))


def _samples(groups: Sequence[Group]) -> list[Sample]:
    """Prompts of which more than one group has a completion.

    Held-out ones come first, those whose rewards differ most before others, then by step, the newest first.
    """
    found: dict[tuple[bool, str], list[Completion | None]] = {}
    for number, group in enumerate(groups):
        for run in group.runs:
            for is_held_out, line in [(True, each) for each in run.held_out] + [(False, each) for each in run.samples]:
                key = is_held_out, str(line.get("prompt", ""))
                of = found.setdefault(key, [None] * len(groups))
                made = _completion(line, "greedy" if is_held_out else "reward")
                before = of[number]
                if before is None or (made.step is not None and made.step > (before.step or 0)):
                    of[number] = made
    shared = [Sample(_cut(prompt), held, made) for (held, prompt), made in found.items() if sum(map(bool, made)) > 1]
    held_out = sorted((each for each in shared if each.held_out), key=_apart, reverse=True)[: _PROMPTS // 2]
    trained = sorted((each for each in shared if not each.held_out), key=_newest, reverse=True)
    return [*held_out, *trained[: _PROMPTS - len(held_out)]]


def _apart(sample: Sample) -> float:
    """How far apart the rewards are."""
    rewards = [each.reward for each in sample.completions if each and each.reward is not None]
    return max(rewards) - min(rewards) if rewards else 0.0


def _newest(sample: Sample) -> int:
    return max((each.step or 0 for each in sample.completions if each), default=0)


def _cut(text: str) -> str:
    return f"{text[:TEXT]} … ({len(text):,} characters)" if len(text) > TEXT else text


def _completion(line: Line, reward: str) -> Completion:
    text, step, value = str(line.get("completion", "")), line.get("step"), line.get(reward)
    return Completion(
        _cut(text),
        float(value) if isinstance(value, int | float) else None,
        step if isinstance(step, int) else None,
    )
