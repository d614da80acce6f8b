"""The overlap of rollout and training: overlap efficiency = max(R, T) / step time, and the speed-up over ahead=0.

    python bench/overlap.py --json F [--rounds N] [--parts even,lengths,model] [--engine processes|local|ray]

even     Fakes that sleep, R = T = 1 s per step of 64 prompts x 4, on the local engine (two threads), in two processes
         of this machine and in two of Ray. This shows the cost of the pipeline itself.
lengths  Rows of lognormal length (sigma 1) on 64 slots, as in a sampler with continuous batching. Rollouts per second
         of each way to take new weights, against slots / mean seconds of a row. Training takes no time.
model    40 steps of grpo/quickstart from the model of sft/quickstart, by `meshrl run` with `run.engine` as in
         `--engine`, R and T from its events: one mesh on both cores, and two meshes of one core each, ahead = 0, 1, 2.
         With ahead = 1 also streamed_grpo/quickstart, which trains on a batch in parts.

All in real time and in turns. The first steps of a turn fill the pipeline and do not count. About 6 minutes.
"""

import asyncio
import heapq
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from bench.grpo import warmed_up_model
from bench.harness import ALLOCATOR, ROOT, Figure, arguments, at_least, figure, median, report, start_ray, take_turns
from meshrl import (
    Batch,
    ClippedLoss,
    LocalEngine,
    Mesh,
    Metrics,
    PolicyConfig,
    Ragged,
    Resources,
    RewardConfig,
    SamplerConfig,
    Sampling,
    Weights,
    group_advantages,
    publish,
    rollouts,
    stop,
)
from meshrl.algo import Loss
from meshrl.engines import make_engine
from meshrl.engines.local import RankLoop
from meshrl.mesh import Engine
from meshrl.observe.analysis import overlap
from meshrl.observe.run_files import read_events
from meshrl.overlap.stream_state import SwapMode
from meshrl.testing import FakePolicy, FakeReward, FakeSampler

PROMPTS: Final = 64
COMPLETIONS: Final = 4
ROWS: Final = PROMPTS * COMPLETIONS
TOKENS: Final = 8
"""Tokens of a prompt, and of a completion."""


@dataclass(frozen=True)
class Load:
    """The durations of the fakes."""

    slots: int
    mean: float
    """Mean seconds of a row."""
    sigma: float
    """Standard deviation of their logarithm."""
    grain: float
    """Seconds during which finished rows are collected before they are yielded together."""
    train: float
    """Seconds of an update."""

    @property
    def rollout(self) -> float:
        """R: seconds of a step's rows if no slot is ever empty."""
        return ROWS * self.mean / self.slots


EVEN: Final = Load(slots=64, mean=64 / ROWS, sigma=0.0, grain=0.0, train=1.0)
LENGTHS: Final = Load(slots=64, mean=0.08, sigma=1.0, grain=0.02, train=0.0)
# The longest row of a step takes about 10 times the mean, 2.5 steps here. A smaller bound would let it block the rest.
WAYS: Final[Sequence[tuple[int, SwapMode]]] = (
    (0, "in_flight"),
    (1, "drain"),
    (1, "in_flight"),
    (2, "in_flight"),
    (4, "in_flight"),
)
APART: Final = (
    *("sampler.mesh=rollout", "run.meshes.main.cpus=1", "run.meshes.rollout.cpus=1"),
    *("reward.mesh=reward", "run.meshes.reward.cpus=0"),
)
RUNS: Final = {
    "ahead=0, one mesh of 2 threads": ("grpo", "ahead=0"),
    "ahead=0, two meshes of 1 thread": ("grpo", "ahead=0", *APART),
    "ahead=1, two meshes of 1 thread": ("grpo", "ahead=1", *APART),
    "ahead=1, in parts, two meshes of 1 thread": ("streamed_grpo", "ahead=1", *APART),
    "ahead=2, two meshes of 1 thread": ("grpo", "ahead=2", *APART),
}
"""The algorithm of each run, and its settings."""
JUDGED: Final = "ahead=1, in parts, two meshes of 1 thread"
"""The setting with targets, if the meshes are processes."""
STEPS: Final = 40
FILLING: Final = 6
"""Steps of a run that do not count."""


class SlowPolicy(FakePolicy):
    """A policy whose updates take time."""

    def __init__(self, config: PolicyConfig, load: Load) -> None:
        super().__init__(config)
        self._seconds = load.train

    async def update(self, batch: Batch, loss: Loss) -> Metrics:
        """Sleep, then learn."""
        await asyncio.sleep(self._seconds)
        return await super().update(batch, loss)


class SlotSampler(FakeSampler):
    """Continuous batching: rows of all calls share the slots, first come first served."""

    def __init__(self, config: SamplerConfig, load: Load) -> None:
        super().__init__(config)
        self._load = load
        self._free = [0.0] * load.slots
        """When each slot becomes free, as a heap."""
        self._random = np.random.default_rng(config.seed)
        self._loads: list[tuple[float, int]] = [(-math.inf, 0)]
        """Times and versions of new weights."""

    async def generate(self, prompts: Batch, sampling: Sampling) -> AsyncIterator[Batch]:
        """Yield rows as they end, those within `grain` seconds together."""
        rows = prompts.repeat(sampling.n)
        loop = asyncio.get_running_loop()
        begins, ends = self._places(len(rows), loop.time())
        order = np.argsort(ends, kind="stable")
        done = 0
        async with self.generate_calls.begin() as call:
            while done < len(rows) and await call.step():
                await asyncio.sleep(float(ends[order[done]]) + self._load.grain - loop.time())
                ended = max(done + 1, int(np.searchsorted(ends[order], loop.time(), side="right")))
                some = order[done:ended]
                yield self._completed(rows.select(some), begins[some])
                done = ended

    async def load(self, weights: Weights) -> Batch:
        """Give this version to rows that begin from now on."""
        self._loads.append((asyncio.get_running_loop().time(), weights.version))
        return await super().load(weights)

    def _places(self, rows: int, now: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The begin and the end of each row."""
        normal = self._random.standard_normal(rows)
        seconds = self._load.mean * np.exp(self._load.sigma * normal - self._load.sigma**2 / 2)
        begins = np.empty(rows)
        for row, each in enumerate(seconds.tolist()):
            begins[row] = max(now, self._free[0])
            heapq.heapreplace(self._free, begins[row] + each)
        return begins, begins + seconds

    def _completed(self, rows: Batch, begins: NDArray[np.float64]) -> Batch:
        times, versions = zip(*self._loads, strict=True)
        oldest = np.array(versions, np.int32)[np.searchsorted(times, begins, side="right") - 1]
        offsets = np.arange(len(rows) + 1) * 2 * TOKENS
        mask = np.tile(np.arange(2 * TOKENS) >= TOKENS, len(rows))
        right = self._random.random(len(rows)) < 0.5
        return rows.assign(
            completion=["right" if each else "wrong" for each in right],
            tokens=Ragged(np.zeros(len(mask), np.int32), offsets),
            loss_mask=Ragged(mask, offsets),
            sampler_logprobs=Ragged(np.zeros(len(mask), np.float32), offsets),
            versions=Ragged(np.where(mask, np.repeat(oldest, 2 * TOKENS), -1).astype(np.int32), offsets),
            oldest_version=oldest,
            temperature=np.ones(len(rows), np.float32),
            truncated=np.zeros(len(rows), np.bool_),
            aborted=np.zeros(len(rows), np.bool_),
        )


@dataclass(frozen=True)
class Pipeline:
    """The script, on existing meshes."""

    main: Mesh
    rollout: Mesh
    load: Load
    ahead: int
    steps: int
    swap: SwapMode = "in_flight"

    async def run(self) -> list[float]:
        """Seconds of each step, except those that fill the pipeline."""
        policy = await self.main.spawn(SlowPolicy, PolicyConfig(model=""), self.load)
        reward = await self.main.spawn(FakeReward, RewardConfig(function="exact_match"))
        sampler = await self.rollout.spawn(SlotSampler, SamplerConfig(model=""), self.load)
        await publish(policy, sampler)
        ends: list[float] = []
        warm_up = 2 + 2 * self.ahead
        sampling = Sampling(n=COMPLETIONS)
        stream = rollouts(sampler, prompts(), sampling, ahead=self.ahead, score=reward.score, swap=self.swap)
        async with stream:
            for _ in range(warm_up + self.steps):
                batch = await (await anext(stream)).load("rewards", "groups")
                advantages = group_advantages(batch.rewards, batch.groups)
                await policy.update(batch.assign(advantages=advantages), ClippedLoss(clip=0.2))
                await publish(policy, stream)
                ends.append(time.perf_counter())
        for role in (policy, reward, sampler):
            await stop(role)
        return np.diff(ends[warm_up - 1 :]).tolist()


def prompts() -> Iterator[Batch]:
    """Yield batches of prompts endlessly."""
    for step in count():
        groups = np.arange(PROMPTS) + step * PROMPTS
        yield Batch.of(prompt=["asked"] * PROMPTS, answer=["right"] * PROMPTS, groups=groups)


def main() -> None:
    parser = arguments(__doc__, rounds=2)
    parser.add_argument("--parts", default="even,lengths,model", help="which parts (default: all)")
    parser.add_argument(
        "--engine",
        choices=("processes", "local", "ray"),
        default="processes",
        help="where the model's ranks run (default: processes)",
    )
    options = parser.parse_args()
    parts = options.parts.split(",")
    figures: list[Figure] = []
    with asyncio.Runner(loop_factory=RankLoop) as runner:
        if "even" in parts:
            figures += even(runner, "local", LocalEngine(), 1, options.rounds)
            figures += even(runner, "processes", make_engine("processes"), 0, options.rounds)
            start_ray()
            figures += even(runner, "Ray", make_engine("ray"), 0, options.rounds)
        if "lengths" in parts:
            figures += lengths(runner, options.rounds)
    if "model" in parts:
        with tempfile.TemporaryDirectory() as folder:
            figures += model_runs(Path(folder), options.engine, options.rounds)
    report("overlap", figures, options.json)


def even(runner: asyncio.Runner, name: str, engine: Engine, cpus: int, rounds: int) -> list[Figure]:
    """Measure R = T."""
    main, rollout = (runner.run(Mesh.reserve(engine, 1, Resources(cpus=cpus))) for _ in range(2))
    one_by_one = Pipeline(main, rollout, EVEN, ahead=0, steps=4)
    overlapped = Pipeline(main, rollout, EVEN, ahead=1, steps=8)
    turns = {str(each.ahead): partial(turn, runner, each) for each in (one_by_one, overlapped)}
    steps = {ahead: median(list(chain(*values))) for ahead, values in take_turns(turns, rounds).items()}
    runner.run(engine.close())
    seconds = max(EVEN.rollout, EVEN.train)
    return [
        at_least(f"max(R, T) over a step of ahead=1, {name}", seconds, "s", steps["1"], 0.97),
        figure(f"max(R, T) over a step of ahead=0, {name}", seconds, "s", steps["0"]),
        at_least(f"speed-up of ahead=1 over ahead=0, {name}", 1 / steps["1"], "steps/s", 1 / steps["0"], 1.9),
    ]


def lengths(runner: asyncio.Runner, rounds: int) -> list[Figure]:
    """Measure rows of different lengths."""
    engine = LocalEngine()
    main, rollout = (runner.run(Mesh.reserve(engine, 1, Resources(cpus=1))) for _ in range(2))
    turns = {
        f"ahead={ahead}, {swap}": partial(turn, runner, Pipeline(main, rollout, LENGTHS, ahead, steps=15, swap=swap))
        for ahead, swap in WAYS
    }
    bound = LENGTHS.slots / LENGTHS.mean
    rates = {name: ROWS / float(np.mean(values)) for name, values in take_turns(turns, rounds).items()}
    runner.run(engine.close())
    best = rates.popitem()
    figures = [figure(f"rollouts, {name}", rate, "rows/s", bound) for name, rate in rates.items()]
    return [*figures, at_least(f"rollouts, {best[0]}", best[1], "rows/s", bound, 0.9)]


def turn(runner: asyncio.Runner, pipeline: Pipeline) -> list[float]:
    """Seconds of each step of a turn."""
    return runner.run(pipeline.run())


@dataclass(frozen=True)
class Spent:
    """Seconds per step of a run, as in `StepTime`."""

    step: float
    rollout: float
    training: float
    rollout_alone: float
    training_alone: float
    sync: float
    other: float

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The mean step of a run."""
        notes: list[str] = []
        found = overlap(read_events(folder / "events.jsonl", notes), FILLING)
        assert not notes, notes
        it = found.total
        parts = (it.seconds, it.rollout, it.training, it.rollout_alone, it.training_alone, it.sync, it.other)
        return cls(*(part / len(found.steps) for part in parts))

    @classmethod
    def middle(cls, turns: Sequence[Self]) -> Self:
        """The median of each number."""
        return cls(*(median(values) for values in zip(*(vars(each).values() for each in turns), strict=True)))


def model_runs(folder: Path, engine: str, rounds: int) -> list[Figure]:
    """Measure the real model."""
    model = warmed_up_model(folder)
    turns = {name: partial(run, folder, model, [*each, f"run.engine={engine}"]) for name, each in RUNS.items()}
    spent = {name: Spent.middle(values) for name, values in take_turns(turns, rounds).items()}
    (default, together), (apart, alone), *overlapped = spent.items()
    figures = [
        figure(f"step, {default}", together.step, "s"),
        figure(f"step, {apart}", alone.step, "s", together.step),
        figure(f"R, {apart}", alone.rollout, "s/step"),
        figure(f"T, {apart}", alone.training, "s/step"),
    ]
    for name, it in overlapped:
        judged = name == JUDGED and engine != "local"
        speed = f"speed-up, {name}, over ahead=0 on them", 1 / it.step, "steps/s", 1 / alone.step
        efficiency = f"max(R, T) over a step, {name}", max(it.rollout, it.training), "s", it.step
        figures += [
            figure(f"speed-up, {name}, over one mesh", 1 / it.step, "steps/s", 1 / together.step),
            at_least(*speed, target=1.6) if judged else figure(*speed),
            at_least(*efficiency, target=0.92) if judged else figure(*efficiency),
            figure(f"R during T, {name}", it.rollout, "s/step", alone.rollout),
            figure(f"T during R, {name}", it.training, "s/step", alone.training),
            figure(f"R alone, {name}", it.rollout_alone, "s/step"),
            figure(f"T alone, {name}", it.training_alone, "s/step"),
            figure(f"waiting for weights, {name}", it.sync, "s/step"),
            figure(f"neither, {name}", it.other, "s/step"),
        ]
    return figures


def run(folder: Path, model: Path, settings: Sequence[str]) -> Spent:
    """Run a script once, with the settings that follow its name."""
    algorithm, *chosen = settings
    name = f"run-{time.monotonic_ns()}"
    common = [f"run.folder={folder}", f"run.name={name}", f"policy.model={model}", f"steps={STEPS}"]
    words = ["run", f"{algorithm}/quickstart", *common, "policy.optimizer.schedule=constant", *chosen]
    environment = {**os.environ, **ALLOCATOR, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    meshrl = Path(sys.executable).parent / "meshrl"
    subprocess.run([meshrl, *words], check=True, cwd=ROOT, capture_output=True, env=environment)
    return Spent.read(folder / name)


if __name__ == "__main__":
    main()
