"""`meshrl simulate`: run an algorithm's script in virtual time, and predict how long its steps take.

job = load_job(find_config("grpo/quickstart"), ["ahead=2"])
forecast = simulate_job(job, record=Path("runs/quickstart"))
forecast.step_seconds, forecast.ratio
"""

import asyncio
import gc
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from math import inf
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from meshrl import log
from meshrl.config import Config, Table
from meshrl.data import Batch, Metrics
from meshrl.errors import ConfigError
from meshrl.events import Call, Delivery, Event
from meshrl.observe import deliveries_of, duration, idleness, overlap, read_events, settings_of, time_lines
from meshrl.planning.backend import SimEngine
from meshrl.planning.pace import CallDurations, Pace, StepSequence, step_windows
from meshrl.planning.records import WARM_UP, RecordedRun, fit
from meshrl.roles import RoleConfig, Sampling
from meshrl.run import Job, Run
from meshrl.testing import simulate

_UNTIMED: Final = ("steps", "run.engine", "run.seed", "run.trackers")
"""Settings that do not affect a simulated step."""


class RankTime(msgspec.Struct, frozen=True):
    """One rank, in seconds per step."""

    mesh: str
    rank: int
    busy: float
    idle: float
    why: dict[str, float]
    """Idle seconds by reason, the longest first."""


class Forecast(msgspec.Struct, frozen=True):
    """The forecast of a configuration's steps. The first `ahead + 2` steps, which fill the pipeline, do not count.

    Times are in seconds.
    """

    config: str
    steps: int
    step_seconds: float
    """Mean step time."""
    step_seconds_median: float
    steps_per_hour: float
    efficiency: float
    """Overlap efficiency: max(R, T, C) / step time."""
    bound: dict[str, float]
    """Share of the steps by their bottleneck: rollout, training, scoring, sync (new weights) or other (the script
    itself)."""
    staleness: list[int]
    """Number of rows that were 0, 1, 2, ... publications behind."""
    dropped: dict[str, int]
    """Dropped groups by reason."""
    idle: list[RankTime]
    drawn: float
    """Rows per step that the script received."""
    trained: float
    """Rows per step in the policy's updates."""
    simulated_in: float
    """Real seconds that the simulation took."""
    recorded: str | None = None
    """Folder of the recorded run."""
    measured: float | None = None
    """Median step of that run."""
    guessed: list[str] = []
    """Assumptions about these ranks and their rows that the record does not cover (`meshrl plan`)."""
    ratio: float | None = None
    """The prediction, `step_seconds_median`, over `measured`."""
    same_settings: bool = True
    """True if that run had this configuration. Otherwise `ratio` compares two settings, and is not an error."""

    def lines(self) -> list[tuple[str, str]]:
        """The printed lines, as names with values."""
        lines = [
            ("step time, mean", duration(self.step_seconds)),
            ("step time, median", duration(self.step_seconds_median)),
            ("steps an hour", f"{self.steps_per_hour:,.0f}"),
            *time_lines(
                self.efficiency,
                self.bound,
                self.staleness,
                self.dropped,
                [(each.mesh, each.rank, each.idle, each.why) for each in self.idle],
            ),
        ]
        if self.measured is not None and self.ratio is not None:
            what = "predicted / measured" if self.same_settings else "this setting / recorded setting"
            lines.append((f"measured in {self.recorded}", f"{duration(self.measured)}, {what} {self.ratio:.3f}"))
        lines += [("guessed", guess) for guess in self.guessed]
        return [*lines, (f"simulated {self.steps:,} steps in", f"{self.simulated_in:.1f} s")]


def simulate_job(
    job: Job,
    *,
    record: Path | None = None,
    rollout: float | None = None,
    train: float | None = None,
    seed: int = 0,
    folder: Path | None = None,
) -> Forecast:
    """Run a job's script in virtual time, with the roles of the backend `sim` on meshes of the configured shape.

    `record`: the folder of a run, which gives the duration of calls. Otherwise `rollout` and `train`: the seconds of
    `generate` and of `Policy.update` for a step's batch. `folder`: keeps the simulated run's folder there. Raises
    ConfigError if neither is given, and DataError if the record lacks calls of the script.
    """
    (source,) = sources(job.config, [record] if record else [], rollout, train)
    forecast = forecast_of(job, fit([source], job.resolved), seed=seed, folder=folder)
    if record is None:
        return forecast
    return msgspec.structs.replace(
        forecast,
        recorded=str(record),
        measured=source.measured,
        ratio=forecast.step_seconds_median / source.measured,
        same_settings=_timed(job.resolved) == _timed(source.table),
    )


def forecast_of(job: Job, pace: Pace, *, seed: int = 0, folder: Path | None = None, quiet: bool = False) -> Forecast:
    """Like `simulate_job`, with known costs of calls. `quiet`: log nothing."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="meshrl-") as temporary:
        alone = {"engine": "local", "checkpoint_every": None, "resume": False}
        config = job.run.model_copy(update={**alone, "folder": str(folder or temporary)})
        engine = SimEngine(pace, seed)

        async def main() -> Path:
            async with _SimRun(config, job.resolved, engine) as run:
                run.tape, run.own, run.writes = engine.tape, CallDurations(pace.own, 0, engine.tape), folder is not None
                run.recorder.shows_progress = not quiet
                await job.script.function(run, _simulated(job.config))
                return run.folder

        with _rare_collections(), log.silenced() if quiet else nullcontext():
            events = read_events(simulate(main) / "events.jsonl", [])
    forecast = _forecast(str(job.source), events, ahead_of(job.config))
    guessed = [*pace.guessed, *engine.guessed()]
    return msgspec.structs.replace(forecast, simulated_in=time.perf_counter() - began, guessed=guessed)


@contextmanager
def _rare_collections() -> Generator[None]:
    """Collect garbage rarely: a step makes many objects and few cycles."""
    before = gc.get_threshold()
    gc.set_threshold(100_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


class _SimRun(Run):
    """A run whose script takes virtual time itself."""

    own: CallDurations
    """Seconds per step."""
    tape: StepSequence
    writes: bool
    """True if the numbers of steps are recorded, because the folder is kept."""

    async def _turn(self, loop: int, first: int, count: int, step: int | None) -> None:
        await super()._turn(loop, first, count, step)
        if step is not None:
            self.tape.step = step

    async def record(self, metrics: Metrics, batch: Batch | None = None, **numbers: float) -> None:
        await asyncio.sleep(self.own.next(None))
        if self.writes:
            await super().record(metrics, batch, **numbers)
        else:
            await super().record(Metrics({}))


def _simulated(config: Config) -> Config:
    """The configuration with the backend `sim` for each role."""
    changed: dict[str, object] = {name: _simulated(value) for name, value in config if isinstance(value, Config)}
    if isinstance(config, RoleConfig):
        changed["backend"] = "sim"
    return config.model_copy(update=changed)


def sources(config: Config, folders: Sequence[Path], rollout: float | None, train: float | None) -> list[RecordedRun]:
    """The sources for the duration of calls: recorded runs by their folders, or a guess.

    Raises ConfigError if neither is given, or both, or a guess below 0. Raises DataError if a folder has too few steps.
    """
    if folders:
        if rollout is not None or train is not None:
            raise ConfigError("--from already gives the durations of calls: remove --rollout and --train")
        return [RecordedRun.read(folder) for folder in folders]
    if rollout is None or train is None:
        raise ConfigError(
            "the durations of calls are unknown: give --from RUN, the folder of a run of this configuration, or "
            "estimates with --rollout SECONDS and --train SECONDS, for the batch of a step"
        )
    for name, seconds in (("--rollout", rollout), ("--train", train)):
        if not 0 <= seconds < inf:
            raise ConfigError(
                f"{name} is {seconds:g} s: a call takes at least 0 s. Give the seconds for a step's batch"
            )
    return [RecordedRun.guessed(rollout, train, _rows(config))]


def _rows(config: Config) -> int | None:
    """Rows of a step's batch, if the configuration determines them."""
    prompts, rows = getattr(config, "prompts", None), getattr(config, "rows", None)
    sampling = getattr(config, "sampling", None)
    if isinstance(prompts, int) and isinstance(sampling, Sampling):
        return prompts * sampling.n
    return rows if isinstance(rows, int) else None


def _timed(table: Table) -> Mapping[str, str]:
    """The settings that may affect the time of a step."""
    return {key: value for key, value in settings_of(table).items() if key not in _UNTIMED and value != "null"}


def ahead_of(config: Config) -> int:
    """The configured `ahead`, 0 if the script has none."""
    ahead = getattr(config, "ahead", 0)
    return ahead if isinstance(ahead, int) else 0


def _forecast(config: str, events: Sequence[Event], ahead: int) -> Forecast:
    first = ahead + WARM_UP
    windows = step_windows(events, first)
    lengths = windows[:, 1] - windows[:, 0]
    shares = overlap(events, first)
    bound = Counter(share.bound for share in shares.steps)
    staleness, dropped = deliveries_of(event for event in events if isinstance(event, Delivery))
    steps = len(lengths) + first + 1
    calls = (each for each in events if isinstance(each, Call) and each.endpoint in ("update", "forward_backward"))
    updates = [each.rows or 0 for each in calls if each.actor.endswith("Policy")]
    drawn = [each.rows for each in events if isinstance(each, Delivery)]
    return Forecast(
        config=config,
        steps=steps,
        step_seconds=float(lengths.mean()),
        step_seconds_median=float(np.median(lengths)),
        steps_per_hour=float(3600 / lengths.mean()) if lengths.mean() else inf,
        efficiency=shares.efficiency,
        bound={name: count / bound.total() for name, count in bound.most_common()},
        staleness=staleness,
        dropped=dropped,
        drawn=sum(drawn) / steps,
        trained=sum(updates) / steps,
        idle=[
            RankTime(
                rank.mesh,
                rank.rank,
                rank.busy / steps,
                rank.idle / steps,
                {reason.why: reason.seconds / steps for reason in rank.reasons},
            )
            for rank in idleness(events)
        ],
        simulated_in=0.0,
    )
