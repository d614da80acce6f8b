"""The comparison of groups of runs: settings, results, and whether chance explains how results differ."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, cast

import msgspec
import numpy as np

from meshrl.events import Step
from meshrl.observe.analysis import PARTS, duration, overlap
from meshrl.observe.groups import LEAST, Group, differing_settings, lineage_text, make_groups
from meshrl.observe.metric_info import FRONT, metric_info
from meshrl.observe.page import NO_CURVES, STYLES, static_page
from meshrl.observe.run_files import TOKENS, Line, Record
from meshrl.observe.run_statistics import Curve, Item, Values, ValuesOfRuns, bootstrap, curve_of, digits, finite
from meshrl.observe.samples import IMAGES, MOST_IMAGES, MOST_TOKENS, shortened
from meshrl.observe.timeline import rounded

_POINTS: Final = 200
"""Points of a line at most."""
_SMOOTH: Final = 80
"""With more steps, each point is a mean over a twentieth of the line."""
_PROMPTS: Final = 60
"""Prompts at most whose completions are shown side by side."""
_HELD_OUT: Final = {"greedy": "held-out reward, greedy", "sampled": "held-out reward, sampled"}
_SCRIPTS: Final = ("draw.js", "axes.js", "charts.js", "tokens.js", "compare.js", "whole.js")


@dataclass(frozen=True)
class ShownRun:
    """A run, and the time split of its steps."""

    name: str
    group: int
    seed: str
    status: str
    steps: int
    step_s: float | None
    """Mean seconds per step."""
    lineage: str
    forked_at: int | None
    split: Mapping[str, float] | None
    """Mean seconds per step by part, as in `StepTime`. None without events."""


@dataclass(frozen=True)
class Measure:
    """A summary number of each group: the mean of its seeds, and each run's value."""

    name: str
    values: list[float | None]
    runs: list[list[float]]


@dataclass(frozen=True)
class Difference:
    """A group's measure minus that of the first group, with the 95 percent interval."""

    measure: str
    base: str
    """The name of the first group."""
    other: str
    values: tuple[float, float]
    """Value of the first group, then of the other."""
    value: float
    low: float
    high: float
    over: str
    """What was resampled, such as `512 prompts`."""
    seeds: tuple[int, int]
    """Number of different seeds that were compared in each group."""

    @property
    def is_seen(self) -> bool:
        """True if the interval excludes 0."""
        return self.low > 0 or self.high < 0

    @property
    def sentence(self) -> str:
        """The result as text."""
        first, second = self.values
        if self.value == self.low == self.high == 0:
            return f"{self.measure}: the same in {self.other} and in {self.base}, {first:.3g}"
        seeds = "variation between seeds is not included"
        if min(self.seeds) > 1:
            seeds = f"{self.seeds[0]} and {self.seeds[1]} seeds are in it"
        direction = "higher" if self.value > 0 else "lower"
        result = f"{self.measure}: {abs(self.value):.3g} {direction} in {self.other} than in {self.base}"
        if self.low == self.high:
            return (
                f"{result} ({second:.3g} and {first:.3g}), the same for each of {self.over}: nothing varies, so there "
                f"is no interval; {seeds}"
            )
        explains = "more than chance over {} explains" if self.is_seen else "chance over {} explains as much"
        return (
            f"{result} ({second:.3g} and {first:.3g}; 95% from {self.low:+.3g} to {self.high:+.3g}); "
            f"{explains.format(self.over)}, {seeds}"
        )


@dataclass(frozen=True)
class GroupLine:
    """A number of a group over steps: the mean of its seeds, and lowest and highest if there are several runs."""

    group: int
    x: list[int]
    mean: list[float]
    low: list[float] | None
    high: list[float] | None


@dataclass(frozen=True)
class Chart:
    """A number over steps for all groups."""

    name: str
    unit: str
    lines: list[GroupLine]


@dataclass(frozen=True)
class Completion:
    """A group's completion of a prompt."""

    text: str
    reward: float | None
    step: int | None
    """None for a held-out prompt after the last step."""
    tokens: msgspec.Raw | None = None
    """The columns of its tokens, of a row that was trained and kept with them."""


@dataclass(frozen=True)
class Sample:
    """A prompt with each group's newest completion. None if a group has none."""

    prompt: str
    held_out: bool
    completions: list[Completion | None]
    images: list[str]
    """The prompt's small images, as data URLs."""


@dataclass(frozen=True)
class Comparison:
    """The content of a comparison page. Other groups are compared with the first one."""

    groups: list[str]
    runs: list[ShownRun]
    notes: list[str]
    settings: dict[str, list[str | None]]
    """Settings that differ, one value per group."""
    measures: list[Measure]
    differences: list[Difference]
    sentences: list[str]
    """The differences as text."""
    charts: list[Chart]
    front: int
    """Number of charts at the top."""
    samples: list[Sample]


def render_comparison(comparison: Comparison) -> str:
    """Render the page of a comparison."""
    return static_page(" · ".join(comparison.groups), comparison, (*STYLES, "compare.css"), _SCRIPTS)


def compare(runs: Sequence[Record], seed: int = 0) -> Comparison:
    """Compare runs: how their settings and results differ. The group of the first run is the base.

    `seed`: seed of the resampling. Raises ConfigError if the runs cannot be compared, like `make_groups`.
    """
    groups = make_groups(runs)
    notes = [f"{run.folder}: {note}" for run in runs for note in run.notes]
    notes += [note for group in groups for note in _uneven(group)]
    held_out = [_held_out(group, notes) for group in groups]
    differences: list[Difference] = []
    for other, theirs in zip(groups[1:], held_out[1:], strict=True):
        differences += _held_out_differences((groups[0], other), (held_out[0], theirs), seed, notes)
        differences += _last_differences((groups[0], other), seed, notes)
    if len(groups) == 1:
        notes.append("All runs differ only in their seed: there is no difference to test.")
    charts = _charts(groups)
    front = sorted((each for each in charts if each.name in FRONT), key=lambda each: FRONT.index(each.name))
    return Comparison(
        groups=[group.name for group in groups],
        runs=[_shown(run, number, seed) for number, group in enumerate(groups) for run, seed in group.seeded],
        notes=notes,
        settings=differing_settings(groups),
        measures=_measures(groups, held_out),
        differences=differences,
        sentences=[each.sentence for each in differences],
        charts=[*front, *(each for each in charts if each not in front)],
        front=len(front),
        samples=_samples(groups),
    )


def _uneven(group: Group) -> list[str]:
    notes: list[str] = []
    for seed in sorted({own for _, own in group.seeded}):
        same = [run.name for run, own in group.seeded if own == seed]
        if len(same) > 1:
            notes.append(f"{', '.join(same)} have the same settings and the same seed: they count as one seed.")
    ends = {run.name: int(rewards.steps[-1]) for run in group.runs if (rewards := curve_of(run.metrics, "reward"))}
    if len(set(ends.values())) > 1:
        steps = ", ".join(f"{name} at {end}" for name, end in ends.items())
        notes.append(f"Runs of a group end at different steps ({steps}): only steps that all of them have count.")
    return notes


def _shown(run: Record, group: int, seed: str) -> ShownRun:
    times, step = curve_of(run.metrics, "step_s"), run.lineage.get("step")
    steps = sum(isinstance(event, Step) for event in run.events)
    total = overlap(run.events).total if steps else None
    return ShownRun(
        name=run.name,
        group=group,
        seed=seed,
        status=str(run.summary.get("status", "not ended")),
        steps=len(run.metrics),
        step_s=rounded(float(times.values.mean())) if times else None,
        lineage=lineage_text(run.lineage),
        forked_at=step if isinstance(step, int) else None,
        split={name: rounded(getattr(total, name) / steps) for name in (*PARTS, "seconds")} if total else None,
    )


def _held_out(group: Group, notes: list[str]) -> Mapping[str, ValuesOfRuns[str]]:
    """Final rewards of held-out prompts by kind, of the runs with the prompts of the first run that has any.

    Prompts without a reward in one of these runs are left out.
    """
    prompts_of = [[str(line.get("prompt")) for line in run.held_out] for run in group.runs]
    prompts = next(filter(None, prompts_of), None)
    if prompts is None:
        return {}
    kept: list[tuple[Record, str]] = []
    for (run, seed), own in zip(group.seeded, prompts_of, strict=True):
        if own == prompts:
            kept.append((run, seed))
        else:
            why = "held out different prompts than the first run of its group" if own else "has no held_out.jsonl"
            notes.append(f"{run.folder} {why}: its held-out rewards are left out.")
    by_kind: dict[str, ValuesOfRuns[str]] = {}
    for kind, name in _HELD_OUT.items():
        # None becomes nan.
        rewards = np.array([[finite(line.get(kind)) for line in run.held_out] for run, _ in kept], np.float64)
        complete = np.flatnonzero(np.isfinite(rewards).all(axis=0))
        if len(complete) < len(prompts):
            missing = f"{len(prompts) - len(complete)} of the {len(prompts)} held-out prompts"
            notes.append(f"{missing} of {group.name} have no {name}, and are left out of it.")
        by_kind[kind] = ValuesOfRuns(
            [prompts[at] for at in complete.tolist()], rewards[:, complete], [seed for _, seed in kept]
        )
    return by_kind


def _held_out_differences(
    groups: tuple[Group, Group],
    held_out: tuple[Mapping[str, ValuesOfRuns[str]], Mapping[str, ValuesOfRuns[str]]],
    seed: int,
    notes: list[str],
) -> list[Difference]:
    names = f"{groups[0].name} and {groups[1].name}"
    if without := [group.name for group, own in zip(groups, held_out, strict=True) if not own]:
        have = "has" if len(without) == 1 else "have"
        notes.append(f"{' and '.join(without)} {have} no held_out.jsonl, so held-out prompts are not tested.")
        return []
    differences: list[Difference] = []
    for kind, name in _HELD_OUT.items():
        first, second = (each[kind] for each in held_out)
        known = set(second.items)
        both = [prompt for prompt in dict.fromkeys(first.items) if prompt in known]
        if len(both) >= LEAST:
            values = first.of(both), second.of(both)
            differences.append(_difference(name, groups, values, seed, f"{len(both)} prompts", paired=True))
        elif both or not (first.items and second.items):
            notes.append(f"{name}: {names} have {len(both)} prompts in common, and the test needs at least {LEAST}.")
        else:
            notes.append(f"{name}: {names} held out different prompts, which are not compared.")
    return differences


def _last_differences(groups: tuple[Group, Group], seed: int, notes: list[str]) -> list[Difference]:
    rewards, theirs = (group.last_rewards for group in groups)
    steps, others = rewards.items, theirs.items
    if min(len(steps), len(others)) < LEAST:
        short = f"{len(steps)} of {groups[0].name} and {len(others)} of {groups[1].name}"
        notes.append(f"Rewards of steps are not tested: there are {short}, and the test needs at least {LEAST}.")
        return []
    same = steps == others
    if not same:
        ends = f"{groups[0].name} at {steps[-1]}, {groups[1].name} at {others[-1]}"
        notes.append(f"Groups end at different steps ({ends}): each is compared by its own last steps.")
    over = f"the batches of {' and '.join(str(each) for each in sorted({len(steps), len(others)}))} steps"
    name = f"reward in the last {len(steps)} steps" if same else "reward in the last steps of each"
    return [_difference(name, groups, (rewards, theirs), seed, over, paired=same)]


def _difference(
    name: str,
    groups: tuple[Group, Group],
    runs: tuple[ValuesOfRuns[Item], ValuesOfRuns[Item]],
    seed: int,
    over: str,
    *,
    paired: bool,
) -> Difference:
    base, other = runs[0].by_seed, runs[1].by_seed
    interval = bootstrap(base, other, seed, paired=paired)
    means, seeds = (float(base.mean()), float(other.mean())), (len(base), len(other))
    return Difference(name, groups[0].name, groups[1].name, means, *interval, over, seeds)


def _measures(groups: Sequence[Group], held_out: Sequence[Mapping[str, ValuesOfRuns[str]]]) -> list[Measure]:
    """Summarize the numbers that at least one group has."""
    every: dict[str, Sequence[ValuesOfRuns[int] | ValuesOfRuns[str]]] = {}
    every["reward, last steps"] = [group.last_rewards for group in groups]
    for kind, name in _HELD_OUT.items():
        every[name] = [each[kind] if each else ValuesOfRuns[str]() for each in held_out]
    every["seconds a step"] = [group.common("step_s") for group in groups]
    # The reward that each run had when the run that took the shortest time ended.
    times = (curve_of(run.metrics, "seconds") for group in groups for run in group.runs)
    if ends := [float(curve.values[-1]) for curve in times if curve]:
        every[f"reward after {duration(min(ends))}"] = [_rewards_after(group, min(ends)) for group in groups]
    measures = [_measure(name, values) for name, values in every.items()]
    return [each for each in measures if any(value is not None for value in each.values)]


def _rewards_after(group: Group, limit: float) -> ValuesOfRuns[str]:
    """The mean reward of the last tenth of the steps that ended within `limit` seconds, of the runs with such steps."""
    means: list[list[float]] = []
    seeds: list[str] = []
    for run, seed in group.seeded:
        every = ((finite(line.get("seconds")), finite(line.get("reward"))) for line in run.metrics)
        rewards = [reward for end, reward in every if end is not None and end <= limit and reward is not None]
        if rewards:
            means.append([float(np.mean(rewards[-max(LEAST, len(rewards) // 10) :]))])
            seeds.append(seed)
    return ValuesOfRuns(["reward"], np.array(means), seeds)


def _measure(name: str, groups: Sequence[ValuesOfRuns[int] | ValuesOfRuns[str]]) -> Measure:
    runs = [_digits(each.values.mean(1)) if each.values.size else [] for each in groups]
    return Measure(name, [digits(each.by_seed.mean()) if each.values.size else None for each in groups], runs)


def _digits(values: Values) -> list[float]:
    return [digits(value) for value in values.tolist()]


def _charts(groups: Sequence[Group]) -> list[Chart]:
    lines = [line for group in groups for run in group.runs for line in (*run.metrics, *run.evaluations)]
    charts: list[Chart] = []
    for name in dict.fromkeys(name for line in lines for name in line if name not in NO_CURVES):
        of_groups = [line for number, group in enumerate(groups) if (line := _line(group, number, name))]
        values = {value for line in of_groups for value in (*line.mean, *(line.low or ()), *(line.high or ()))}
        if len(values) > 1:
            charts.append(Chart(name, metric_info(name).unit, of_groups))
    return charts


def _line(group: Group, number: int, name: str) -> GroupLine | None:
    runs = group.common(name)
    if not runs.items:
        return None
    steps = np.array(runs.items)
    if len(steps) > _SMOOTH:
        runs = replace(runs, values=np.stack([Curve(steps, own).smooth(20) for own in runs.values]))
    values = runs.values
    kept = np.unique(np.linspace(0, len(steps) - 1, min(_POINTS, len(steps))).astype(np.int64))
    mean, low, high = (_digits(each[kept]) for each in (runs.by_seed.mean(0), values.min(0), values.max(0)))
    x: list[int] = steps[kept].tolist()
    return GroupLine(number, x, mean, *((low, high) if len(values) > 1 else (None, None)))


def _samples(groups: Sequence[Group]) -> list[Sample]:
    """Prompts with completions of several groups.

    Held-out prompts come first, sorted by how much their rewards differ. Others follow, the newest step first.
    """
    by_prompt: dict[tuple[bool, str], list[Completion | None]] = {}
    images: dict[str, list[str]] = {}
    for number, group in enumerate(groups):
        for run in group.runs:
            for is_held_out, lines in ((True, run.held_out), (False, run.samples)):
                for line in lines:
                    if not is_held_out and line.get("held_out") is True:  # of an evaluation during the run
                        continue
                    key = is_held_out, str(line.get("prompt", ""))
                    images[key[1]] = cast("list[str]", line.get(IMAGES) or images.get(key[1], []))
                    completions = by_prompt.setdefault(key, [None] * len(groups))
                    new, old = _completion(line, "greedy" if is_held_out else "reward"), completions[number]
                    if old is None or (new.step is not None and new.step > (old.step or 0)):
                        completions[number] = new
    shared = [
        Sample(shortened(prompt), is_held_out, completions, images[prompt])
        for (is_held_out, prompt), completions in by_prompt.items()
        if sum(map(bool, completions)) > 1
    ]
    held_out = sorted((each for each in shared if each.held_out), key=_range, reverse=True)[: _PROMPTS // 2]
    trained = sorted((each for each in shared if not each.held_out), key=_newest, reverse=True)
    return _fitted([*held_out, *trained[: _PROMPTS - len(held_out)]])


def _fitted(samples: Sequence[Sample]) -> list[Sample]:
    """Leave out tokens and images that find no room in the page."""
    left, room = MOST_TOKENS, MOST_IMAGES

    def fitted(each: Completion | None) -> Completion | None:
        nonlocal left
        size = len(bytes(each.tokens)) if each and each.tokens is not None else 0
        if each and size > left:
            return replace(each, tokens=None)
        left -= size
        return each

    def seen(each: str) -> bool:
        nonlocal room
        room -= len(each)
        return room >= 0

    return [
        replace(each, completions=[*map(fitted, each.completions)], images=[*filter(seen, each.images)])
        for each in samples
    ]


def _completion(line: Line, reward: str) -> Completion:
    text, step = str(line.get("completion", "")), line.get("step")
    tokens = line.get(TOKENS)
    return Completion(
        shortened(text),
        finite(line.get(reward)),
        step if isinstance(step, int) else None,
        tokens if isinstance(tokens, msgspec.Raw) else None,
    )


def _range(sample: Sample) -> float:
    rewards = [each.reward for each in sample.completions if each and each.reward is not None]
    return max(rewards) - min(rewards) if rewards else 0.0


def _newest(sample: Sample) -> int:
    return max((each.step or 0 for each in sample.completions if each), default=0)
