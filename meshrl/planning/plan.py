"""`meshrl plan`: search the settings of a configuration for those with the shortest steps."""

import shlex
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from meshrl.errors import ConfigError
from meshrl.planning.forecast import Forecast, ahead_of, forecast_of, sources
from meshrl.planning.memory import Room
from meshrl.planning.pace import Pace
from meshrl.planning.records import WARM_UP, Fit, Record, fit, fit_ends
from meshrl.planning.rehearsal import Rehearsal
from meshrl.planning.search import Demand, Found, lower_bound, search
from meshrl.planning.space import Candidate, Devices, Space
from meshrl.run import Job, RunConfig, find_config, load_job

Load: TypeAlias = Callable[[Sequence[str]], Job[RunConfig]]
"""Loads the configuration's job with further overrides."""

_COUNTED: Final = 12
"""Steps that count in a simulation while candidates are compared."""
_FINAL: Final = 60
"""Steps that count in a simulation of a reported candidate."""
_CHOSEN: Final = ("sampler.mesh", "reward.mesh", "policy.axes", "sampler.axes")
_NOTHING: Final = Demand(0.0, 0.0)
_GAIN: Final = 0.99
"""A larger `ahead` is reported only if its step takes at most this share of the same layout's with a smaller one."""


@dataclass(frozen=True)
class Wanted:
    """The options of a plan, in addition to a configuration."""

    devices: Devices
    records: Sequence[Path] = ()
    """Folders of recorded runs, which give the duration of calls."""
    rollout: float | None = None
    """Without records: seconds that one rank needs for a step's rollouts."""
    train: float | None = None
    """Without records: seconds that one rank needs for the update on them."""
    memory: float | None = None
    """GiB of each GPU, or of the machine if it computes on cores."""
    price: float | None = None
    """Price of a GPU or core per hour."""
    aheads: Sequence[int] = (0, 1, 2)
    """Values of `ahead` to try on separate meshes, unless an override sets it."""
    best: int = 5
    """Number of proposals."""
    seed: int = 0


class Proposal(msgspec.Struct, frozen=True):
    """A proposed setting, and the estimate for its steps."""

    name: str
    overrides: list[str]
    """Overrides to append to `meshrl run CONFIG`."""
    steps_per_minute: float
    low: float
    high: float
    """`low` and `high` bound the steps per minute, for the worst and best guesses and the errors on the records."""
    step_seconds: float
    efficiency: float
    """Overlap efficiency, as in a forecast."""
    bound_by: str
    """The bottleneck of most steps: rollout, training, scoring, sync or other."""
    staleness: float
    """Mean number of versions that a trained row is behind."""
    needed_gib: float | None
    """GiB on the fullest GPU, or with cores on the machine. None if unknown."""
    cost: float | None
    """Cost of a step, in the unit of the price."""
    guessed: list[str]
    """Assumptions that no record covers."""


class Plan(msgspec.Struct, frozen=True):
    """The result of a plan: the best settings."""

    config: str
    given: list[str]
    """The given overrides."""
    devices: str
    candidates: int
    """Number of layouts: `simulated`, `pruned` and `refused` together."""
    simulated: int
    pruned: int
    refused: int
    """Layouts that do not fit into memory, or whose axes the backend refuses."""
    proposals: list[Proposal]
    """Proposals, the best first."""
    records: dict[str, float]
    """Predicted over measured median step of each recorded run."""
    unknown: list[str]
    """Unknown memory, which was assumed to fit."""
    seconds: float
    """Seconds that the planning took."""

    def command(self, proposal: Proposal) -> str:
        """Return the command that runs a proposal."""
        return shlex.join(["meshrl", "run", self.config, *self.given, *proposal.overrides])


def make_plan(config: str, given: Sequence[str], wanted: Wanted) -> Plan:
    """Find the best settings of a configuration, by its name or path, under the given overrides.

    Raises ConfigError if nothing gives the duration of calls, if no setting fits into memory, for impossible numbers,
    and for an algorithm without a policy or a sampler. Raises DataError if a record lacks calls of the script.
    """
    if wanted.memory is not None and not 0 < wanted.memory < inf:
        raise ConfigError(
            f"--memory is {wanted.memory:g} GiB: give the memory of each GPU, or of the machine with --cpus"
        )
    if wanted.rollout == wanted.train == 0:
        raise ConfigError(
            "--rollout and --train are both 0: every setting would take 0 s a step, and none is the best. Give the "
            "seconds that one rank takes"
        )
    with tempfile.TemporaryDirectory(prefix="meshrl-") as folder:
        return _made(config, given, wanted, Planner.of(config, given, wanted, Path(folder)))


def _made(config: str, given: Sequence[str], wanted: Wanted, planner: "Planner") -> Plan:
    found = search(
        planner.candidates, planner.bound, planner.room.fits, planner.seconds, len(wanted.aheads) * wanted.best
    )
    if not found.best:
        raise ConfigError(f"{config}: {planner.room.why_nothing_fits()}")
    chosen = _worth_telling(found.best)[: wanted.best]
    proposals = sorted(map(planner.proposal, chosen), key=lambda each: each.step_seconds)
    return Plan(
        config=config,
        given=list(given),
        devices=f"{wanted.devices.count} {wanted.devices.kind}",
        candidates=len(planner.candidates),
        simulated=found.simulated,
        pruned=found.pruned,
        refused=found.refused,
        proposals=proposals,
        records={str(record.folder): ratio for record, ratio in zip(planner.records, planner.ratios, strict=False)},
        unknown=planner.room.unknown,
        seconds=time.perf_counter() - planner.began,
    )


def _loading(config: str, given: Sequence[str]) -> Load:
    """Raises ConfigError if an override sets a key that the plan chooses."""
    for key in map(_key, given):
        if key in _CHOSEN or key.startswith("run.meshes"):
            raise ConfigError(
                f"{key}: the plan chooses this key: leave it out, or try the value with `meshrl simulate`"
            )
    source = find_config(config)
    return lambda further: load_job(source, [*given, *further], RunConfig)


def _key(override: str) -> str:
    return override.partition("=")[0].strip()


def _worth_telling(best: Sequence[Found[Candidate]]) -> list[Found[Candidate]]:
    """Leave out candidates that run further ahead than another with the same ranks and gain nothing by it."""
    told: list[Found[Candidate]] = []
    for each in sorted(best, key=lambda found: (found.candidate.ahead, found.seconds)):
        like = [other for other in told if _ranks(other.candidate) == _ranks(each.candidate)]
        if not like or each.seconds < _GAIN * min(other.seconds for other in like):
            told.append(each)
    return sorted(told)


def _ranks(candidate: Candidate) -> tuple[str, str, bool]:
    return str(candidate.trainer), str(candidate.sampler), candidate.shared


@dataclass
class Planner:
    """Answers the questions of the search about candidates."""

    wanted: Wanted
    load: Load
    job: Job[RunConfig]
    records: Sequence[Record]
    candidates: Sequence[Candidate]
    room: Room
    rehearsal: Rehearsal
    began: float
    ratios: list[float] = field(default_factory=list)
    """Predicted over measured step of each record."""
    demand: Demand = _NOTHING

    @classmethod
    def of(cls, config: str, given: Sequence[str], wanted: Wanted, folder: Path) -> "Planner":
        """`folder`: for the simulations' input. Raises ConfigError if nothing gives the duration of calls."""
        began = time.perf_counter()
        load = _loading(config, given)
        job = load([])
        records = sources(job.config, wanted.records, wanted.rollout, wanted.train)
        room = Room.of(load, wanted.devices, wanted.memory)
        aheads = [ahead_of(job.config)] if any(_key(each) == "ahead" for each in given) else wanted.aheads
        candidates = [*Space.of(job, wanted.devices, aheads, budgets=room.is_asked)]
        if not candidates:
            raise ConfigError(f"{job.source}: its backends cannot be divided over {wanted.devices.count} devices")
        planner = cls(wanted, load, job, records, candidates, room, Rehearsal(job, folder), began)
        for record in records if wanted.records else ():
            own = load_job(record.folder / "config.toml", [], RunConfig)
            light = planner.rehearsal.light(own, _steps(max(_FINAL, record.pace.steps), ahead_of(own.config)))
            pace = planner.fitted(own.resolved).pace
            predicted = forecast_of(light, pace, seed=wanted.seed, quiet=True).step_seconds_median
            planner.ratios.append(predicted / record.measured)
        first = candidates[0]
        forecast = planner.forecast(first, 0, _COUNTED, planner.fit(first, 0).pace)
        planner.demand = Demand(forecast.drawn, forecast.trained)
        return planner

    def fitted(self, table: dict[str, object]) -> Fit:
        """The costs of calls in a configuration."""
        return fit(self.records, table, self.wanted.devices.cores)

    def fit(self, candidate: Candidate, variant: int) -> Fit:
        """The costs of a candidate's calls."""
        return self.fitted(candidate.table(self.job.resolved, variant))

    def bound(self, candidate: Candidate) -> float:
        """The lower bound for `search`. The smallest budgets leave the smallest bubble in a pipeline."""
        pace = self.fit(candidate, len(candidate.variants) - 1).pace
        shares = (candidate.trainer.rows, candidate.sampler.rows)
        return lower_bound(pace, self.demand, shares, ahead=candidate.ahead, shared=candidate.shared, steps=_COUNTED)

    def seconds(self, candidate: Candidate, variant: int) -> float:
        """The mean step in seconds."""
        return self.forecast(candidate, variant, _COUNTED, self.fit(candidate, variant).pace).step_seconds

    def forecast(self, candidate: Candidate, variant: int, steps: int, pace: Pace) -> Forecast:
        """Simulate a candidate."""
        job = self.rehearsal.light(self.load(candidate.overrides(variant)), _steps(steps, candidate.ahead))
        return forecast_of(job, pace, seed=self.wanted.seed, quiet=True)

    def proposal(self, found: Found[Candidate]) -> Proposal:
        """Estimate one of the best candidates in detail."""
        it, variant, wanted = found.candidate, found.variant, self.wanted
        fitted = self.fit(it, variant)
        forecast = self.forecast(it, variant, _FINAL, fitted.pace)
        guessed = [*fitted.guessed, *forecast.guessed]
        # With as many steps as in the search, so that only the guesses differ.
        table = it.table(self.job.resolved, variant)
        ends = fit_ends(self.records, table, wanted.devices.cores) if guessed else ()
        longer = [1.0, *(self.forecast(it, variant, _COUNTED, end).step_seconds / found.seconds for end in ends)]
        missed = max((max(ratio, 1 / ratio) for ratio in self.ratios), default=1.0)
        rows = sum(forecast.staleness)
        return Proposal(
            name=it.name,
            overrides=it.overrides(variant),
            steps_per_minute=60 / forecast.step_seconds,
            low=60 / (forecast.step_seconds * max(longer) * missed),
            high=60 / (forecast.step_seconds * min(longer) / missed),
            step_seconds=forecast.step_seconds,
            efficiency=forecast.efficiency,
            bound_by=next(iter(forecast.bound)),
            staleness=sum(age * count for age, count in enumerate(forecast.staleness)) / rows if rows else 0.0,
            needed_gib=self.room.needed(it, variant),
            cost=wanted.price * wanted.devices.count * forecast.step_seconds / 3600 if wanted.price else None,
            guessed=guessed or ([] if wanted.records else ["rollout and train"]),
        )


def _steps(counted: int, ahead: int) -> int:
    """Add the steps that do not count: those that fill the pipeline, and the last one."""
    return counted + ahead + WARM_UP + 1
