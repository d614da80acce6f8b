"""The content of a comparison page, as a plain value for its JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from meshrl.events import Step
from meshrl.observe.analysis import overlap
from meshrl.observe.content import TEXT
from meshrl.observe.curves import Curve, Curves, finite
from meshrl.observe.difference import Difference, ValuesOfRuns, resampled
from meshrl.observe.groups import Group, differing, make_groups, told_lineage
from meshrl.observe.lanes import rounded
from meshrl.observe.measures import LEAST, Measure, common, digits, last_rewards, measures, seeded
from meshrl.observe.quantities import FRONT, quantity
from meshrl.observe.reading import Line, Record

POINTS: Final = 200
"""Points of a line at most."""
_SMOOTH: Final = 80
"""With more steps, each point is a mean over a twentieth of the line."""
_PROMPTS: Final = 60
"""Prompts at most whose completions are shown side by side."""
_HELD_OUT: Final = {"greedy": "held-out reward, greedy", "sampled": "held-out reward, sampled"}
_NO_CURVES: Final = ("step", "seconds")


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
    """Mean seconds per step by part, as in `Share`. None without events."""


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


@dataclass(frozen=True)
class Sample:
    """A prompt with each group's newest completion. None if a group has none."""

    prompt: str
    held_out: bool
    completions: list[Completion | None]


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


def compare(runs: Sequence[Record], seed: int = 0) -> Comparison:
    """Compare runs: how their settings and results differ. The group of the first run is the base.

    `seed`: seed of the resampling. Raises ConfigError if the runs cannot be compared, like `make_groups`.
    """
    groups = make_groups(runs)
    notes = [f"{run.folder}: {note}" for run in runs for note in run.notes]
    notes += [note for group in groups for note in _uneven(group)]
    held_out = [_held_out(group, notes) for group in groups]
    found: list[Difference] = []
    for other, theirs in zip(groups[1:], held_out[1:], strict=True):
        found += _of_held_out((groups[0], other), (held_out[0], theirs), seed, notes)
        found += _of_the_end((groups[0], other), seed, notes)
    if len(groups) == 1:
        notes.append("All runs differ only in their seed: there is no difference to test.")
    charts = _charts(groups)
    front = sorted((each for each in charts if each.name in FRONT), key=lambda each: FRONT.index(each.name))
    return Comparison(
        groups=[group.name for group in groups],
        runs=[_shown(run, number, seed) for number, group in enumerate(groups) for run, seed in seeded(group)],
        notes=notes,
        settings={key: list(values) for key, values in differing(groups).items()},
        measures=measures(
            groups,
            {
                name: [each[kind].rewards if each else ValuesOfRuns() for each in held_out]
                for kind, name in _HELD_OUT.items()
            },
        ),
        differences=found,
        sentences=[each.sentence for each in found],
        charts=[*front, *(each for each in charts if each not in front)],
        front=len(front),
        samples=_samples(groups),
    )


def _uneven(group: Group) -> list[str]:
    """Describe problems between the runs of a group."""
    notes: list[str] = []
    for seed in sorted(set(group.seeds)):
        same = [run.name for run, own in seeded(group) if own == seed]
        if len(same) > 1:
            notes.append(f"{', '.join(same)} have the same settings and the same seed: they count as one seed.")
    ends = {run.name: int(rewards.steps[-1]) for run in group.runs if (rewards := Curves(run.metrics).get("reward"))}
    if len(set(ends.values())) > 1:
        told = ", ".join(f"{name} at {end}" for name, end in ends.items())
        notes.append(f"Runs of a group end at different steps ({told}): only steps that all of them have count.")
    return notes


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
    """A chart for each number that varies."""
    lines = [line for group in groups for run in group.runs for line in (*run.metrics, *run.evaluations)]
    names = dict.fromkeys(name for line in lines for name in line if name not in _NO_CURVES)
    found = ((name, [_line(group, number, name) for number, group in enumerate(groups)]) for name in names)
    charts = [Chart(name, quantity(name).unit, [line for line in drawn if line]) for name, drawn in found]
    return [each for each in charts if len({value for line in each.lines for value in _extent(line)}) > 1]


def _extent(line: GroupLine) -> list[float]:
    return [*line.mean, *(line.low or ()), *(line.high or ())]


def _line(group: Group, number: int, name: str) -> GroupLine | None:
    steps, runs = common(group, name)
    if not len(steps):
        return None
    if len(steps) > _SMOOTH:
        runs = ValuesOfRuns(np.stack([Curve(steps, own).smooth(20) for own in runs.values]), runs.seeds)
    values = runs.values
    kept = np.unique(np.linspace(0, len(steps) - 1, min(POINTS, len(steps))).astype(np.int64))
    mean, low, high = (digits(each[kept]) for each in (runs.by_seed.mean(0), values.min(0), values.max(0)))
    x: list[int] = steps[kept].tolist()
    return GroupLine(number, x, mean, *((low, high) if len(values) > 1 else (None, None)))


@dataclass(frozen=True)
class _HeldOut:
    """Final rewards of a group's held-out prompts."""

    places: Mapping[str, int]
    """Column of each prompt that has a reward in every run."""
    rewards: ValuesOfRuns
    """Of each run and prompt."""

    def of(self, prompts: Sequence[str]) -> ValuesOfRuns:
        """Rewards of these prompts."""
        return ValuesOfRuns(self.rewards.values[:, [self.places[each] for each in prompts]], self.rewards.seeds)


def _held_out(group: Group, notes: list[str]) -> Mapping[str, _HeldOut]:
    """Held-out rewards by kind, of the runs whose prompts equal those of the first run that has any."""
    kept = [(run, [str(line.get("prompt")) for line in run.held_out]) for run in group.runs]
    prompts = next((own for _, own in kept if own), None)
    if prompts is None:
        return {}
    for run, own in kept:
        if own != prompts:
            why = "held out different prompts than the first run of its group" if own else "has no held_out.jsonl"
            notes.append(f"{run.folder} {why}: its held-out rewards are left out.")
    seeds = [seed for seed, (_, own) in zip(group.seeds, kept, strict=True) if own == prompts]
    found: dict[str, _HeldOut] = {}
    for kind, name in _HELD_OUT.items():
        every = [[finite(line.get(kind)) for line in run.held_out] for run, own in kept if own == prompts]
        rewards = np.array(every, np.float64)  # None becomes nan
        there = np.flatnonzero(np.isfinite(rewards).all(axis=0))
        if len(there) < len(prompts):
            missing = f"{len(prompts) - len(there)} of the {len(prompts)} held-out prompts"
            notes.append(f"{missing} of {group.name} have no {name}, and are left out of it.")
        names = [prompts[at] for at in there.tolist()]
        places = {prompt: place for place, prompt in enumerate(names)}
        found[kind] = _HeldOut(places, ValuesOfRuns(rewards[:, there], seeds))
    return found


def _of_held_out(
    groups: tuple[Group, Group],
    kept: tuple[Mapping[str, _HeldOut], Mapping[str, _HeldOut]],
    seed: int,
    notes: list[str],
) -> list[Difference]:
    """Compare the prompts that both groups held out."""
    found: list[Difference] = []
    names = f"{groups[0].name} and {groups[1].name}"
    if without := [group.name for group, own in zip(groups, kept, strict=True) if not own]:
        have = "has" if len(without) == 1 else "have"
        notes.append(f"{' and '.join(without)} {have} no held_out.jsonl, so held-out prompts are not tested.")
        return found
    for kind, name in _HELD_OUT.items():
        first, second = (each[kind] for each in kept)
        both = [prompt for prompt in first.places if prompt in second.places]
        if len(both) >= LEAST:
            values = first.of(both), second.of(both)
            found.append(_difference(name, groups, values, seed, f"{len(both)} prompts", paired=True))
        elif both or not (first.places and second.places):
            notes.append(f"{name}: {names} have {len(both)} prompts in common, and the test needs at least {LEAST}.")
        else:
            notes.append(f"{name}: {names} held out different prompts, which are not compared.")
    return found


def _of_the_end(groups: tuple[Group, Group], seed: int, notes: list[str]) -> list[Difference]:
    """Compare the last steps."""
    (steps, rewards), (others, theirs) = (last_rewards(group) for group in groups)
    if min(len(steps), len(others)) < LEAST:
        short = " and ".join(
            f"{len(each)} of {group.name}" for each, group in zip((steps, others), groups, strict=True)
        )
        notes.append(f"Rewards of steps are not tested: there are {short}, and the test needs at least {LEAST}.")
        return []
    same = np.array_equal(steps, others)
    if not same:
        ends = f"{groups[0].name} at {steps[-1]}, {groups[1].name} at {others[-1]}"
        notes.append(f"Groups end at different steps ({ends}): each is compared by its own last steps.")
    over = f"the batches of {' and '.join(str(each) for each in sorted({len(steps), len(others)}))} steps"
    name = f"reward in the last {len(steps)} steps" if same else "reward in the last steps of each"
    return [_difference(name, groups, (rewards, theirs), seed, over, paired=same)]


def _difference(
    name: str,
    groups: tuple[Group, Group],
    runs: tuple[ValuesOfRuns, ValuesOfRuns],
    seed: int,
    over: str,
    *,
    paired: bool,
) -> Difference:
    base, other = runs[0].by_seed, runs[1].by_seed
    found = resampled(base, other, seed, paired=paired)
    means, seeds = (float(base.mean()), float(other.mean())), (len(base), len(other))
    return Difference(name, groups[0].name, groups[1].name, means, *found, over, seeds)


def _samples(groups: Sequence[Group]) -> list[Sample]:
    """Prompts with completions of several groups.

    Held-out prompts come first, sorted by how much their rewards differ. Others follow, the newest step first.
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
    """The range of the rewards."""
    rewards = [each.reward for each in sample.completions if each and each.reward is not None]
    return max(rewards) - min(rewards) if rewards else 0.0


def _newest(sample: Sample) -> int:
    return max((each.step or 0 for each in sample.completions if each), default=0)


def _cut(text: str) -> str:
    return f"{text[:TEXT]} … ({len(text):,} characters)" if len(text) > TEXT else text


def _completion(line: Line, reward: str) -> Completion:
    text, step = str(line.get("completion", "")), line.get("step")
    return Completion(_cut(text), finite(line.get(reward)), step if isinstance(step, int) else None)
