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
from meshrl.planning.memory import Room
from meshrl.planning.rehearsal import Rehearsal
from meshrl.planning.search import Demand, Found, lower_bound, search
from meshrl.planning.space import Candidate, Devices, Space
from meshrl.run import Job, RunConfig, find_config, load_job
from meshrl.simulation import WARM_UP, Fit, Forecast, Pace, Record, ahead_of, fit, fit_ends, forecast_of, sources

Load: TypeAlias = Callable[[Sequence[str]], Job[RunConfig]]
"""The job of the configuration with further overrides."""

_COUNTED: Final = 12
"""Steps of a simulation that count, while many candidates are compared."""
_FINAL: Final = 60
"""And of those that are told."""
_CHOSEN: Final = ("sampler.mesh", "reward.mesh", "policy.axes", "sampler.axes")
_NOTHING: Final = Demand(0.0, 0.0)
_GAIN: Final = 0.99
"""One that is further ahead than another like it is told where its step is no longer than this part of that one's."""


@dataclass(frozen=True)
class Wanted:
    """The options of a plan, in addition to a configuration."""

    devices: Devices
    records: Sequence[Path] = ()
    """Folders of runs, whose calls tell what calls take."""
    rollout: float | None = None
    """Or a guess: seconds of one rank's rollouts of a step."""
    train: float | None = None
    """And: seconds of one rank's update on them."""
    memory: float | None = None
    """GiB of each GPU; of the machine, where cores compute."""
    price: float | None = None
    """Of a GPU, or a core, an hour."""
    aheads: Sequence[int] = (0, 1, 2)
    """How far ahead rollouts may be, of meshes apart, where no override says it."""
    best: int = 5
    """How many are told."""
    seed: int = 0


class Proposal(msgspec.Struct, frozen=True):
    """A proposed setting, and the estimate for its steps."""

    name: str
    overrides: list[str]
    """To paste behind `meshrl run CONFIG`."""
    steps_per_minute: float
    low: float
    high: float
    """Between these, if what is guessed is as bad or as good as may be, and by how far the records are missed."""
    step_seconds: float
    efficiency: float
    """Overlap efficiency, as in a forecast."""
    bound_by: str
    """Rollout, training, scoring, sync or other: what makes most of the steps as long as they are."""
    staleness: float
    """Versions that a trained row is behind, in the mean."""
    needed_gib: float | None
    """What the fullest GPU holds, or with cores the machine; None where nothing is told."""
    cost: float | None
    """Of a step, in the unit of the price."""
    guessed: list[str]
    """What no record tells of it, and was taken for granted."""


class Plan(msgspec.Struct, frozen=True):
    """The result of a plan: the best settings."""

    config: str
    given: list[str]
    """The overrides that were given."""
    devices: str
    candidates: int
    """Layouts: `simulated`, `pruned` and `refused` together."""
    simulated: int
    pruned: int
    refused: int
    """Did not fit into memory, or the backend refused the axes."""
    proposals: list[Proposal]
    """The best first."""
    records: dict[str, float]
    """Of each recorded run: its median step as predicted, over the measured one."""
    unknown: list[str]
    """What of memory is not known, and was taken to fit."""
    seconds: float
    """That it took."""

    def command(self, proposal: Proposal) -> str:
        """Return the command that runs a proposal."""
        return shlex.join(["meshrl", "run", self.config, *self.given, *proposal.overrides])


def make_plan(config: str, given: Sequence[str], wanted: Wanted) -> Plan:
    """The best settings of a configuration, by its name or path, under the overrides that are given.

    ConfigError where nothing tells what calls take, where no setting fits into memory, for numbers that cannot be, and
    for an algorithm without a policy or a sampler; DataError where a record lacks what the script asks for.
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
    """ConfigError where what is given is a plan's to choose."""
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
    """Without those that are further ahead than one with the same ranks, and gain nothing by it."""
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
    """What tells the search of a candidate."""

    wanted: Wanted
    load: Load
    job: Job[RunConfig]
    records: Sequence[Record]
    candidates: Sequence[Candidate]
    room: Room
    rehearsal: Rehearsal
    began: float
    ratios: list[float] = field(default_factory=list)
    """Of each record, predicted over measured."""
    demand: Demand = _NOTHING

    @classmethod
    def of(cls, config: str, given: Sequence[str], wanted: Wanted, folder: Path) -> "Planner":
        """`folder`: for what simulations read. ConfigError where nothing tells what calls take."""
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
        """What calls cost in a configuration."""
        return fit(self.records, table, self.wanted.devices.cores)

    def fit(self, candidate: Candidate, variant: int) -> Fit:
        """What calls cost there."""
        return self.fitted(candidate.table(self.job.resolved, variant))

    def bound(self, candidate: Candidate) -> float:
        """As `search` asks for it. The smallest budgets leave the smallest bubble in a pipeline."""
        pace = self.fit(candidate, len(candidate.variants) - 1).pace
        shares = (candidate.trainer.rows, candidate.sampler.rows)
        return lower_bound(pace, self.demand, shares, ahead=candidate.ahead, shared=candidate.shared, steps=_COUNTED)

    def seconds(self, candidate: Candidate, variant: int) -> float:
        """The mean step."""
        return self.forecast(candidate, variant, _COUNTED, self.fit(candidate, variant).pace).step_seconds

    def forecast(self, candidate: Candidate, variant: int, steps: int, pace: Pace) -> Forecast:
        """What the simulator says."""
        job = self.rehearsal.light(self.load(candidate.overrides(variant)), _steps(steps, candidate.ahead))
        return forecast_of(job, pace, seed=self.wanted.seed, quiet=True)

    def proposal(self, found: Found[Candidate]) -> Proposal:
        """What is told of one of the best."""
        it, variant, wanted = found.candidate, found.variant, self.wanted
        fitted = self.fit(it, variant)
        forecast = self.forecast(it, variant, _FINAL, fitted.pace)
        # Of as many steps as the search counted, so that the guess alone is what differs.
        table = it.table(self.job.resolved, variant)
        ends = fit_ends(self.records, table, wanted.devices.cores) if fitted.guessed else ()
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
            guessed=list(fitted.guessed) or ([] if wanted.records else ["rollout and train"]),
        )


def _steps(counted: int, ahead: int) -> int:
    """With those that fill the pipeline, and the last one, which do not count."""
    return counted + ahead + WARM_UP + 1
