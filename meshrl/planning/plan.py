"""`meshrl plan`: search the settings of a configuration for those with the shortest steps."""

import math
import shlex
import tempfile
import time
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Generic, NamedTuple, TypeVar

import msgspec

from meshrl.errors import ConfigError
from meshrl.planning.forecast import Forecast, ahead_of, forecast_of, sources
from meshrl.planning.pace import Pace, lowest_cost
from meshrl.planning.records import WARM_UP, RecordedRun, fit, fit_ends
from meshrl.planning.space import Candidate, Devices, Load, MemoryLimit, Space
from meshrl.run import Job, find_config, load_job
from meshrl.tasks import Task, TaskConfig

C = TypeVar("C")

_COUNTED: Final = 12
"""Steps that count in a simulation while candidates are compared."""
_FINAL: Final = 60
"""Steps that count in a simulation of a reported candidate."""
_CHOSEN: Final = ("sampler.mesh", "reward.mesh", "policy.axes", "sampler.axes")
"""Keys that a plan sets."""
_PROMPTS: Final = 64
"""Prompts of a simulation, which are repeated as needed. The duration of simulated calls does not depend on them."""
_SLACK: Final = 1e-9
"""Tolerance for rounding."""
_GAIN: Final = 0.99
"""A larger `ahead` is reported only if its step takes at most this share of the same layout's with a smaller one."""


@dataclass(frozen=True)
class PlanOptions:
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


def make_plan(config: str, given: Sequence[str], options: PlanOptions) -> Plan:
    """Find the best settings of a configuration, by its name or path, under the given overrides.

    Raises ConfigError if nothing gives the duration of calls, if no setting fits into memory, for impossible numbers,
    and for an algorithm without a policy or a sampler. Raises DataError if a record lacks calls of the script.
    """
    began = time.perf_counter()
    if options.memory is not None and not 0 < options.memory < math.inf:
        raise ConfigError(
            f"--memory is {options.memory:g} GiB: give the memory of each GPU, or of the machine with --cpus"
        )
    if options.rollout == options.train == 0:
        raise ConfigError(
            "--rollout and --train are both 0: every setting would take 0 s a step, and none is the best. Give the "
            "seconds that one rank takes"
        )
    with tempfile.TemporaryDirectory(prefix="meshrl-") as folder:
        planner = Planner(config, given, options, Path(folder))
        memory, keep = planner.memory, len(options.aheads) * options.best
        result = search(planner.candidates, planner.bound, memory.fits, planner.seconds, keep)
        if not result.best:
            raise ConfigError(f"{config}: {memory.why_nothing_fits()}")
        proposals = [planner.proposal(each) for each in _worth_reporting(result.best)[: options.best]]
    return Plan(
        config=config,
        given=list(given),
        devices=f"{options.devices.count} {options.devices.kind}",
        candidates=len(planner.candidates),
        simulated=result.simulated,
        pruned=result.pruned,
        refused=result.refused,
        proposals=sorted(proposals, key=lambda each: each.step_seconds),
        records={str(record.folder): ratio for record, ratio in zip(planner.records, planner.ratios, strict=False)},
        unknown=memory.unknown,
        seconds=time.perf_counter() - began,
    )


class RankedCandidate(NamedTuple, Generic[C]):
    """A simulated candidate, and its seconds per step."""

    seconds: float
    order: int
    candidate: C


@dataclass
class SearchResult(Generic[C]):
    """The result of a search."""

    best: Sequence[RankedCandidate[C]]
    """The fastest candidates, in order."""
    simulated: int = 0
    pruned: int = 0
    """Number left out because their lower bound exceeds the steps of the best."""
    refused: int = 0
    """Number that do not fit into memory, or are not possible."""


def search(
    candidates: Iterable[C],
    bound: Callable[[C], float],
    fits: Callable[[C], C | None],
    simulated: Callable[[C], float],
    keep: int,
) -> SearchResult[C]:
    """Find the `keep` candidates with the shortest steps. The result is the same as if all were simulated.

    `bound`: a lower bound for the candidate's steps, in seconds. `fits`: the candidate as it fits, None if it does not;
    called for few candidates. `simulated`: the seconds of its steps.
    """
    ordered = sorted(((bound(each), order, each) for order, each in enumerate(candidates)), key=lambda each: each[:2])
    best: list[RankedCandidate[C]] = []
    result = SearchResult[C](best)
    for at, (least, order, candidate) in enumerate(ordered):
        if len(best) == keep and least > best[-1].seconds + _SLACK:
            result.pruned = len(ordered) - at
            break
        if (fitting := fits(candidate)) is None:
            result.refused += 1
            continue
        result.simulated += 1
        insort(best, RankedCandidate(simulated(fitting), order, fitting))
        del best[keep:]
    return result


def _worth_reporting(best: Sequence[RankedCandidate[Candidate]]) -> list[RankedCandidate[Candidate]]:
    """Leave out candidates that run further ahead than another with the same ranks and gain nothing by it."""
    reported: list[RankedCandidate[Candidate]] = []
    for each in sorted(best, key=lambda simulated: (simulated.candidate.ahead, simulated.seconds)):
        same = [other.seconds for other in reported if _ranks(other.candidate) == _ranks(each.candidate)]
        if not same or each.seconds < _GAIN * min(same):
            reported.append(each)
    return sorted(reported)


def _ranks(candidate: Candidate) -> tuple[str, str, bool]:
    return str(candidate.trainer), str(candidate.sampler), candidate.shared


class Planner:
    """Answers the questions of the search about candidates."""

    def __init__(self, config: str, given: Sequence[str], options: PlanOptions, folder: Path) -> None:
        """`folder`: for the simulations' input. Raises ConfigError if nothing gives the duration of calls."""
        self.options = options
        self._load = _loading(config, given)
        self._job = self._load([])
        self.records: list[RecordedRun] = sources(self._job.config, options.records, options.rollout, options.train)
        self.memory: MemoryLimit = MemoryLimit(self._load, options.devices, options.memory)
        aheads = [ahead_of(self._job.config)] if any(_key(each) == "ahead" for each in given) else options.aheads
        self.candidates: list[Candidate] = [*Space(self._job, options.devices, aheads, budgets=self.memory.applies)]
        if not self.candidates:
            raise ConfigError(
                f"{self._job.source}: its backends cannot be divided over {options.devices.count} devices"
            )
        self._rehearsal = _rehearsal(self._job, folder)
        self.ratios: list[float] = []
        """Predicted over measured step of each record."""
        for record in self.records if options.records else ():
            own = load_job(record.folder / "config.toml", [])
            pace = self._fitted(own.resolved)
            forecast = self._simulated(own, max(_FINAL, record.pace.steps), ahead_of(own.config), pace)
            self.ratios.append(forecast.step_seconds_median / record.measured)
        forecast = self._forecast(self.candidates[0], _COUNTED)
        self._drawn, self._trained = forecast.drawn, forecast.trained

    def bound(self, candidate: Candidate) -> float:
        """A lower bound for the mean simulated step, in seconds.

        Each step trains its rows, and the script does its own work. An update lasts until the fullest rank is done. All
        batches except `ahead + 1` are drawn within these steps: concurrently if rollouts run ahead, else before
        training. The smallest budgets leave the smallest bubble in a pipeline.
        """
        pace = self._fitted(candidate.varied(-1).table(self._job.resolved))
        share = self._trained / candidate.trainer.axes["dp"]
        if self._trained.is_integer():  # else the number of rows varies between steps, and this is the mean
            share = math.ceil(share)
        train = lowest_cost(pace.works_of("Policy", pace.training), share)
        draw = lowest_cost(pace.works_of("Sampler", "generate"), self._drawn / candidate.sampler.axes["dp"])
        own = min((work.seconds[0] for work in pace.own), default=0.0)
        if not candidate.ahead:
            return train + draw + own
        drawn = draw * max(0, _COUNTED - candidate.ahead - 1) / _COUNTED
        return train + drawn if candidate.shared else max(train + own, drawn)

    def seconds(self, candidate: Candidate) -> float:
        """The mean step in seconds."""
        return self._forecast(candidate, _COUNTED).step_seconds

    def proposal(self, simulated: RankedCandidate[Candidate]) -> Proposal:
        """Estimate one of the best candidates in detail."""
        candidate, options = simulated.candidate, self.options
        forecast = self._forecast(candidate, _FINAL)
        # With as many steps as in the search, so that only the guesses differ.
        table = candidate.table(self._job.resolved)
        ends = fit_ends(self.records, table, options.devices.cores) if forecast.guessed else ()
        seconds = [self._forecast(candidate, _COUNTED, end).step_seconds for end in ends]
        longer = [1.0, *(each / simulated.seconds for each in seconds)]
        missed = max((max(ratio, 1 / ratio) for ratio in self.ratios), default=1.0)
        rows = sum(forecast.staleness)
        return Proposal(
            name=candidate.name,
            overrides=candidate.overrides,
            steps_per_minute=60 / forecast.step_seconds,
            low=60 / (forecast.step_seconds * max(longer) * missed),
            high=60 / (forecast.step_seconds * min(longer) / missed),
            step_seconds=forecast.step_seconds,
            efficiency=forecast.efficiency,
            bound_by=next(iter(forecast.bound)),
            staleness=sum(age * count for age, count in enumerate(forecast.staleness)) / rows if rows else 0.0,
            needed_gib=self.memory.needed(candidate),
            cost=options.price * options.devices.count * forecast.step_seconds / 3600 if options.price else None,
            guessed=forecast.guessed or ([] if options.records else ["rollout and train"]),
        )

    def _fitted(self, table: dict[str, object]) -> Pace:
        return fit(self.records, table, self.options.devices.cores)

    def _forecast(self, candidate: Candidate, steps: int, pace: Pace | None = None) -> Forecast:
        pace = pace or self._fitted(candidate.table(self._job.resolved))
        return self._simulated(self._load(candidate.overrides), steps, candidate.ahead, pace)

    def _simulated(self, job: Job, counted: int, ahead: int, pace: Pace) -> Forecast:
        """Simulate a job with few prompts, as many counted steps, those that fill the pipeline, and the last one."""
        resolved = {key: value for key, value in job.resolved.items() if key != "evaluation"}
        config = job.config.model_copy(update={**self._rehearsal, "steps": counted + ahead + WARM_UP + 1})
        light = replace(job, config=config, run=job.run.model_copy(update={"log": []}), resolved=resolved)
        return forecast_of(light, pace, seed=self.options.seed, quiet=True)


def _rehearsal(job: Job, folder: Path) -> dict[str, object]:
    """Settings that make hundreds of simulations light: few prompts, written to a folder, and no evaluation."""
    settings: dict[str, object] = {}
    task = getattr(job.config, "task", None)
    if isinstance(task, TaskConfig):
        rows = Task.load(task).train.objects("row")[:_PROMPTS]
        file = folder / "prompts.jsonl"
        file.write_bytes(msgspec.json.Encoder(enc_hook=str).encode_lines(list(rows)))
        few: dict[str, object] = {"source": str(file), "options": {}, "max_prompt_tokens": None, "held_out": 0}
        settings["task"] = task.model_copy(update=few)
    if "evaluation" in type(job.config).model_fields:
        settings["evaluation"] = None
    return settings


def _loading(config: str, given: Sequence[str]) -> Load:
    """Raises ConfigError if an override sets a key that the plan chooses."""
    for key in map(_key, given):
        if key in _CHOSEN or key.startswith("run.meshes"):
            raise ConfigError(
                f"{key}: the plan chooses this key: leave it out, or try the value with `meshrl simulate`"
            )
    source = find_config(config)
    return lambda further: load_job(source, [*given, *further])


def _key(override: str) -> str:
    return override.removeprefix("~").partition("=")[0].strip()
