"""Predicted and measured steps of grpo/quickstart in many settings, and the proposals of `meshrl plan`.

    python bench/plan.py --json F [--rounds N] [--steps N] [--parts steps,time] [--keep FOLDER]

Each round records two runs: one mesh of both cores, and two meshes of one core each, one step ahead. It also runs each
setting below, and the proposal of `meshrl plan` for two cores from the first record of the first round. The code of
`meshrl simulate` predicts the steps of each setting from a round's records. The median step of a run counts, after
those that fill the pipeline, and then the median of the rounds. "Noise" is the difference between rounds of one
setting. With --keep, earlier rounds count too. On a busy machine, run one round at a time; --rounds 0 only reads them.
Part `time` measures how long a plan for 64 GPUs takes.
"""

import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Final

import numpy as np

from bench.grpo import warmed_up_model
from bench.harness import (
    ALLOCATOR,
    ROOT,
    Figure,
    arguments,
    at_least,
    at_most,
    figure,
    median,
    report,
    within,
)
from meshrl.observe import read_events
from meshrl.planning import Devices, Plan, PlanOptions, Proposal, RecordedRun, fit, forecast_of, make_plan
from meshrl.planning.pace import step_windows
from meshrl.run import find_config, load_job

CONFIG: Final = "grpo/quickstart"
CORES: Final = 2
APART: Final = (
    "run.meshes={main = {cpus = 1}, rollout = {cpus = 1}, reward = {cpus = 0}}",
    "sampler.mesh=rollout",
    "reward.mesh=reward",
)
TOGETHER: Final = "one mesh"
AHEAD: Final = "two meshes, ahead=1"
PROPOSED: Final = "proposed"
SETTINGS: Final[Mapping[str, Sequence[str]]] = {
    TOGETHER: (),
    "one mesh, processes": ("run.engine=processes",),
    "one mesh of 1 core": ("run.meshes.main.cpus=1",),
    "one mesh, 24 prompts": ("prompts=24",),
    "one mesh, 128 prompts": ("prompts=128",),
    "one mesh, 4 completions": ("sampling.n=4",),
    "two meshes, ahead=0": APART,
    AHEAD: (*APART, "ahead=1"),
    "two meshes, ahead=2": (*APART, "ahead=2"),
    "two meshes, ahead=0, 96 prompts": (*APART, "prompts=96"),
    "two meshes, ahead=1, 24 prompts": (*APART, "ahead=1", "prompts=24"),
    "two meshes, ahead=1, 4 completions": (*APART, "ahead=1", "sampling.n=4"),
    "two meshes, ahead=2, 96 prompts": (*APART, "ahead=2", "prompts=96"),
    "two meshes of one process, ahead=0": (*APART, "run.engine=local"),
}
SAME_ROWS: Final = (
    TOGETHER,
    "one mesh, processes",
    "one mesh of 1 core",
    "two meshes, ahead=0",
    AHEAD,
    "two meshes, ahead=2",
)
"""The settings that a plan for the configuration chooses from. They do not change the rows of a step."""
FILLING: Final = 4
RECORDED: Final = 24
"""Steps of a recorded run."""
GPUS: Final = 64


def main() -> None:
    parser = arguments(__doc__, rounds=2)
    parser.add_argument("--steps", type=int, default=14, help="of each run")
    parser.add_argument("--keep", type=Path, help="keep the runs here, and the model")
    parser.add_argument("--parts", default="steps,time", help="which parts (default: both)")
    options = parser.parse_args()
    figures: list[Figure] = []
    if "steps" in options.parts.split(","):
        with tempfile.TemporaryDirectory() as temporary:
            figures += compare(options.keep or Path(temporary), options.rounds, options.steps)
    if "time" in options.parts.split(","):
        figures += planning()
    report("plan", figures, options.json)


def compare(folder: Path, rounds: int, steps: int) -> list[Figure]:
    """Run `rounds` more rounds, and report all rounds."""
    folder.mkdir(exist_ok=True)
    if not (folder / "warm/model").is_dir():
        warmed_up_model(folder)
    common = [f"policy.model={folder / 'warm/model'}", "policy.optimizer.schedule=constant", "~evaluation"]
    there = len([*folder.glob("*-done")])
    for number in range(there, there + rounds):
        run_round(folder, number, common, steps)
        (folder / f"{number}-done").touch()
    every = [Round(folder, number, common) for number in range(there + rounds)]
    took = {name: median([each.took(name) for each in every]) for name in (*SETTINGS, PROPOSED)}
    figures: list[Figure] = []
    for told, count in (("two records", 2), ("one record", 1)):
        by_round = [each.predicted(count) for each in every]
        figures += judged(told, {name: median([each[name] for each in by_round]) for name in SETTINGS}, took)
    for told, names in (("a setting", SETTINGS), ("the proposal", [PROPOSED])):
        pairs = [pair for name in names for pair in combinations([each.took(name) for each in every], 2)]
        if pairs:
            apart = median([abs(math.log(one / other)) for one, other in pairs])
            figures.append(figure(f"noise: {told} in two rounds", apart, "of a step"))
    first = proposal(folder, common)
    fastest = min(took[name] for name in SAME_ROWS)
    figures.append(figure("proposed, predicted", first.step_seconds, "s", took[PROPOSED]))
    figures.append(within(f"proposed ({first.name}), over the fastest", took[PROPOSED], "s", fastest, 1.05))
    return figures


def run_round(folder: Path, number: int, common: Sequence[str], steps: int) -> None:
    """Run each setting once. The order reverses from round to round, except that records come first."""
    for name in (TOGETHER, AHEAD):
        run(folder, f"{number}-record-{slug(name)}", [*common, *SETTINGS[name], f"steps={RECORDED}"])
    names = [*SETTINGS, PROPOSED]
    for name in names if number % 2 == 0 else reversed(names):
        settings = SETTINGS[name] if name in SETTINGS else proposal(folder, common).overrides
        run(folder, f"{number}-{slug(name)}", [*common, *settings, f"steps={steps}"])


def proposal(folder: Path, common: Sequence[str]) -> Proposal:
    """The best proposal from the first record of the first round."""
    record = folder / f"0-record-{slug(TOGETHER)}"
    return make_plan(CONFIG, common, PlanOptions(Devices(CORES, "cpus"), [record])).proposals[0]


@dataclass(frozen=True)
class Round:
    """The runs of one round."""

    folder: Path
    number: int
    common: Sequence[str]

    def took(self, name: str) -> float:
        """The median step of a setting in seconds."""
        notes: list[str] = []
        windows = step_windows(
            read_events(self.folder / f"{self.number}-{slug(name)}" / "events.jsonl", notes), FILLING
        )
        assert not notes, notes
        return float(np.median(windows[:, 1] - windows[:, 0]))

    def predicted(self, count: int) -> dict[str, float]:
        """The median step of each setting in seconds, predicted from `count` records."""
        folders = [self.folder / f"{self.number}-record-{slug(name)}" for name in (TOGETHER, AHEAD)]
        records = [RecordedRun.read(each) for each in folders[:count]]
        return {name: predict(records, [*self.common, *settings]) for name, settings in SETTINGS.items()}


def judged(told: str, predicted: Mapping[str, float], took: Mapping[str, float]) -> list[Figure]:
    """Each setting as predicted from both records, and the accuracy. From one record, only the accuracy."""
    errors = [abs(predicted[name] / took[name] - 1) for name in SETTINGS]
    order = kendall([predicted[name] for name in SETTINGS], [took[name] for name in SETTINGS])
    middle = f"median error, {told}", median(errors), "of a step"
    both = f"Kendall's rank correlation, {told}", order, "of 1"
    is_judged = told == "two records"
    return [
        *(figure(f"{name}, predicted", predicted[name], "s", took[name]) for name in SETTINGS if is_judged),
        at_most(*middle, 0.1) if is_judged else figure(*middle),
        figure(f"error of nine in ten, {told}", float(np.quantile(errors, 0.9)), "of a step"),
        figure(f"largest error, {told}", max(errors), "of a step"),
        at_least(*both, peer=1.0, target=0.9) if is_judged else figure(*both),
    ]


def predict(records: Sequence[RecordedRun], overrides: Sequence[str]) -> float:
    """The median step in seconds."""
    job = load_job(find_config(CONFIG), [*overrides, "steps=60"])
    return forecast_of(job, fit(records, job.resolved, CORES), quiet=True).step_seconds_median


def kendall(one: Sequence[float], other: Sequence[float]) -> float:
    """Concordant minus discordant pairs, over all pairs (Kendall 1938, tau a)."""
    pairs = list(combinations(zip(one, other, strict=True), 2))
    return sum(float(np.sign((a - c) * (b - d))) for (a, b), (c, d) in pairs) / len(pairs)


def planning() -> list[Figure]:
    """The time of a plan for many GPUs, with an FSDP2 policy and vLLM engines."""
    began = time.perf_counter()
    backends = ["policy.backend=fsdp", "sampler.backend=vllm"]
    made: Plan = make_plan(CONFIG, backends, PlanOptions(Devices(GPUS, "gpus"), rollout=3000, train=4000))
    took = time.perf_counter() - began
    return [
        figure(f"layouts on {GPUS} GPUs", made.candidates, "layouts"),
        figure("of which were simulated", made.simulated, "layouts"),
        at_most("time of 1,000 layouts", took * 1000 / made.candidates, "s", 120),
        figure("time of all", took, "s"),
    ]


def slug(name: str) -> str:
    """A name in the form of a folder's name."""
    return "-".join(name.replace("=", " ").replace(",", "").split())


def run(folder: Path, name: str, overrides: Sequence[str]) -> Path:
    """Run the real script once, and return its folder."""
    words = ["run", CONFIG, f"run.folder={folder}", f"run.name={name}", *overrides]
    environment = {**os.environ, **ALLOCATOR, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    meshrl = Path(sys.executable).parent / "meshrl"
    subprocess.run([meshrl, *words], check=True, cwd=ROOT, capture_output=True, env=environment)
    return folder / name


if __name__ == "__main__":
    main()
