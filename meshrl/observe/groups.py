"""Groups of runs that differ only in their seed: the settings in which they differ, and the values of their runs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, cast

import msgspec
import numpy as np

from meshrl.errors import ConfigError
from meshrl.observe.run_files import Line, Record
from meshrl.observe.run_statistics import ValuesOfRuns, curve_of

LEAST: Final = 5
"""Lowest number of steps whose rewards are resampled. Otherwise a tenth of all steps."""
_SEED: Final = "run.seed"
_FORKED: Final = "forked from"
"""Name of a fork's origin among the settings."""
_OF_A_RUN: Final = (
    *("name", "folder", "resume", "restarts", "restart_wait", "checkpoint_every", "checkpoints_kept"),
    *("checkpoint_async", "log", "project", "samples_every", "samples_rows", "samples_tokens", "slow_after"),
    *("deterministic", "replay", "otlp", "metrics_port"),
)
"""Keys of [run] that affect how a run is kept and reported, not what it computes."""
_TASK: Final = ("task.source", "task.options")
"""Keys that determine the task."""


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed."""

    runs: Sequence[Record]
    settings: Mapping[str, str]
    """Settings by dotted key."""

    @property
    def name(self) -> str:
        """Name of the first run."""
        return self.runs[0].name

    @cached_property
    def seeded(self) -> Sequence[tuple[Record, str]]:
        """Its runs with their seeds."""
        return [(run, settings_of(run.table).get(_SEED, "")) for run in self.runs]

    def common(self, name: str) -> ValuesOfRuns[int]:
        """Values of the runs that have this number, at the steps that all of them have."""
        every = [(curve_of(run.metrics, name) or curve_of(run.evaluations, name), seed) for run, seed in self.seeded]
        curves = [(curve, seed) for curve, seed in every if curve]
        if not curves:
            return ValuesOfRuns()
        # If a fork or an interruption wrote a step twice, the last value counts.
        last = [dict(zip(curve.steps.tolist(), curve.values.tolist(), strict=True)) for curve, _ in curves]
        steps: list[int] = sorted(set[int].intersection(*map(set, last)))
        values = np.array([[own[step] for step in steps] for own in last], np.float64)
        return ValuesOfRuns(steps, values, [seed for _, seed in curves])

    @property
    def last_rewards(self) -> ValuesOfRuns[int]:
        """Rewards of the last steps."""
        rewards = self.common("reward")
        return rewards.of(rewards.items[-max(LEAST, len(rewards.items) // 10) :])


def make_groups(runs: Sequence[Record]) -> Sequence[Group]:
    """Group the runs by their settings, in the given order.

    Raises ConfigError unless there are two runs with steps and a configuration, of the same task.
    """
    _check_files(runs)
    settings = [settings_of(run.table) for run in runs]
    for run, own in zip(runs[1:], settings[1:], strict=True):
        for key in _TASK:
            if settings[0].get(key) != own.get(key):
                raise ConfigError(
                    f"{runs[0].folder} and {run.folder} are of different tasks: {key} is "
                    f"{settings[0].get(key, 'not set')} there and {own.get(key, 'not set')} here. Compare runs that "
                    "learn from the same rows"
                )
    groups: dict[frozenset[tuple[str, str]], tuple[list[Record], Mapping[str, str]]] = {}
    for run, every in zip(runs, settings, strict=True):
        own = {key: value for key, value in every.items() if key != _SEED} | _forked(run.lineage)
        # Forks with several seeds form a group if they have the same step, whichever run they come from.
        alike = {key: value.rpartition(", ")[2] if key == _FORKED else value for key, value in own.items()}
        groups.setdefault(frozenset(alike.items()), ([], own))[0].append(run)
    return [Group(same, own) for same, own in groups.values()]


def _check_files(runs: Sequence[Record]) -> None:
    for run in runs:
        if not run.metrics:
            raise ConfigError(
                f"{run.folder} has no step in its metrics.jsonl: leave it out, or wait for its first step"
            )
        if not run.table:
            raise ConfigError(f"{run.folder} has no readable config.toml, which is needed to compare settings")
    folders = [run.folder.resolve() for run in runs]
    if again := [str(run.folder) for run in runs if folders.count(run.folder.resolve()) > 1]:
        raise ConfigError(f"{again[0]} is given twice: name each run once")
    if len(runs) < 2:
        alone = (
            f"{runs[0].folder} is one: name another, or see it alone by `meshrl report`" if runs else "none is given"
        )
        raise ConfigError(f"a comparison needs at least two runs, and {alone}")


def differing_settings(groups: Sequence[Group]) -> dict[str, list[str | None]]:
    """Settings that differ between groups: one value per group by key, None if it is not set."""
    keys = dict.fromkeys(key for group in groups for key in group.settings)
    every = {key: [group.settings.get(key) for group in groups] for key in sorted(keys, key=lambda key: key != _FORKED)}
    return {key: values for key, values in every.items() if len(set(values)) > 1}


def lineage_text(lineage: Line) -> str:
    """Origin and changes of a fork as text. Empty if the run is not a fork."""
    if not lineage:
        return ""
    changed = cast("Sequence[object]", lineage.get("changed") or ())
    other = f", with {' '.join(map(str, changed))}" if changed else ", without changes"
    return f"{_forked(lineage)[_FORKED]}{other}"


def _forked(lineage: Line) -> dict[str, str]:
    return {_FORKED: f"{str(lineage.get('run')).rpartition('/')[2]}, step {lineage.get('step')}"} if lineage else {}


def settings_of(table: Mapping[str, object]) -> Mapping[str, str]:
    """The settings that affect results, as text by dotted key. Seeds that roles take from the run are left out."""
    settings = {".".join(path): value for path, value in _flat(table) if path[0] != "run" or path[1] not in _OF_A_RUN}
    of_roles = {f"{key}.seed" for key, value in table.items() if isinstance(value, Mapping) and "backend" in value}
    return {key: value for key, value in settings.items() if key not in of_roles or value != settings.get(_SEED)}


def _flat(table: Mapping[str, object], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    for key, value in table.items():
        path = (*above, key)
        if isinstance(value, Mapping) and path != ("task", "options"):
            yield from _flat(cast("Mapping[str, object]", value), path)
        else:
            yield path, value if isinstance(value, str) else msgspec.json.encode(value, order="sorted").decode()
