"""The numbers that a comparison page shows of each group, and the values that they are made of."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Final

import numpy as np
from numpy.typing import NDArray

from meshrl.observe.curves import Curve, Curves, finite
from meshrl.observe.difference import Values, ValuesOfRuns
from meshrl.observe.groups import Group
from meshrl.observe.reading import Record
from meshrl.observe.text import duration

LEAST: Final = 5
"""Lowest number of steps whose rewards are resampled. Otherwise a tenth of all steps."""


@dataclass(frozen=True)
class Measure:
    """A summary number of a group: the mean of its seeds, and each run's value."""

    name: str
    values: list[float | None]
    runs: list[list[float]]


def measures(groups: Sequence[Group], held_out: Mapping[str, Sequence[ValuesOfRuns]]) -> list[Measure]:
    """Return the numbers that at least one group has. `held_out`: by name, the rewards of each group's prompts."""
    found = [Measure("reward, last steps", *_summed([last_rewards(group)[1] for group in groups]))]
    found += [Measure(name, *_summed(every)) for name, every in held_out.items()]
    found.append(Measure("seconds a step", *_summed([common(group, "step_s")[1] for group in groups])))
    found += _at_the_same_time(groups)
    return [each for each in found if any(value is not None for value in each.values)]


def _at_the_same_time(groups: Sequence[Group]) -> list[Measure]:
    """The reward that each run had when the run that took the shortest time ended."""
    ends = [times.values[-1] for group in groups for run in group.runs if (times := Curves(run.metrics).get("seconds"))]
    if not ends:
        return []
    limit = float(min(ends))
    every = [[(reward, seed) for run, seed in seeded(group) if (reward := _after(run, limit))] for group in groups]
    values = [ValuesOfRuns(np.array([[reward] for reward, _ in own]), [seed for _, seed in own]) for own in every]
    return [Measure(f"reward after {duration(limit)}", *_summed(values))]


def _after(run: Record, limit: float) -> float | None:
    """The mean reward of the last tenth of the steps that ended within `limit` seconds. None without such steps."""
    rewards = [
        float(reward)
        for line in run.metrics
        if (seconds := finite(line.get("seconds"))) is not None
        and seconds <= limit
        and (reward := finite(line.get("reward"))) is not None
    ]
    return float(np.mean(rewards[-max(LEAST, len(rewards) // 10) :])) if rewards else None


def _summed(groups: Sequence[ValuesOfRuns]) -> tuple[list[float | None], list[list[float]]]:
    runs = [digits(each.values.mean(1)) if each.values.size else [] for each in groups]
    means = [float(f"{each.by_seed.mean():.6g}") if each.values.size else None for each in groups]
    return means, runs


def seeded(group: Group) -> list[tuple[Record, str]]:
    """Return the runs with their seeds."""
    return list(zip(group.runs, group.seeds, strict=True))


def digits(values: Values) -> list[float]:
    """Round to six digits."""
    return [float(f"{value:.6g}") for value in values]


def common(group: Group, name: str) -> tuple[NDArray[np.int64], ValuesOfRuns]:
    """Values of the runs that have this number, at the steps that all of them have: int64[steps], [runs, steps]."""
    every = [(Curves(run.metrics).get(name) or Curves(run.evaluations).get(name), seed) for run, seed in seeded(group)]
    curves = [(curve, seed) for curve, seed in every if curve]
    if not curves:
        return np.zeros(0, np.int64), ValuesOfRuns()
    # If a fork or an interruption wrote a step twice, the last value counts.
    steps = reduce(np.intersect1d, (np.unique(curve.steps) for curve, _ in curves))
    return steps, ValuesOfRuns(np.stack([_at(curve, steps) for curve, _ in curves]), [seed for _, seed in curves])


def _at(curve: Curve, steps: NDArray[np.int64]) -> Values:
    last = dict(zip(curve.steps.tolist(), curve.values.tolist(), strict=True))
    return np.array([last[step] for step in steps.tolist()])


def last_rewards(group: Group) -> tuple[NDArray[np.int64], ValuesOfRuns]:
    """Rewards of the last steps: int64[steps], [runs, steps]."""
    steps, rewards = common(group, "reward")
    last = max(LEAST, len(steps) // 10)
    return steps[-last:], ValuesOfRuns(rewards.values[:, -last:], rewards.seeds)
