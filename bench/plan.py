"""Predicted and measured steps of grpo/quickstart in many settings, and what `meshrl plan` proposes.

    python bench/plan.py --json F [--rounds N] [--steps N] [--parts steps,time] [--records FOLDER]

Two runs are recorded: one mesh of both cores, and two meshes of one core each, one step ahead. From them the steps
of each setting below are predicted, by the code of `meshrl simulate`, and each is run, in turns. The median step
after those that fill the pipeline counts. "Noise" is how far the rounds of one setting are apart. Then the proposal
of `meshrl plan` for two cores, from the first record alone, is run against the fastest setting with the same rows.
Last, the time in which a plan for 64 GPUs is made.
"""

import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
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
    take_turns,
    within,
)
from meshrl.planning import Devices, Plan, Wanted, make_plan
from meshrl.report import read_events
from meshrl.run import RunConfig, find_config, load_job
from meshrl.simulation import Record, fit, forecast_of
from meshrl.simulation.pace import step_windows

CONFIG: Final = "grpo/quickstart"
CORES: Final = 2
APART: Final = (
    "run.meshes={main = {cpus = 1}, rollout = {cpus = 1}, reward = {cpus = 0}}",
    "sampler.mesh=rollout",
    "reward.mesh=reward",
)
TOGETHER: Final = "one mesh"
AHEAD: Final = "two meshes, ahead=1"
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
"""The settings that a plan of the configuration chooses from: the rows of a step are its own."""
FILLING: Final = 4
RECORDED: Final = 24
"""Steps of a recorded run."""
GPUS: Final = 64


def main() -> None:
    parser = arguments(__doc__, rounds=2)
    parser.add_argument("--steps", type=int, default=14, help="of each run")
    parser.add_argument("--records", type=Path, help="keep the runs here, and take the model from here if it is there")
    parser.add_argument("--parts", default="steps,time", help="which parts (default: both)")
    options = parser.parse_args()
    figures: list[Figure] = []
    if "steps" in options.parts.split(","):
        with tempfile.TemporaryDirectory() as temporary:
            folder = options.records or Path(temporary)
            model = folder / "warm/model"
            if not model.is_dir():
                folder.mkdir(exist_ok=True)
                warmed_up_model(folder)
            figures += compare(folder, model, options.rounds, options.steps)
    if "time" in options.parts.split(","):
        figures += planning()
    report("plan", figures, options.json)


def compare(folder: Path, model: Path, rounds: int, steps: int) -> list[Figure]:
    """Record, predict, run, and plan."""
    common = [f"policy.model={model}", "policy.optimizer.schedule=constant", "evaluation=false"]
    names = {"together": TOGETHER, "apart": AHEAD}
    records = [
        Record.read(run(folder, name, [*common, *SETTINGS[setting], f"steps={RECORDED}"]))
        for name, setting in names.items()
    ]
    proposed = make_plan(CONFIG, common, Wanted(Devices(CORES, "cpus"), [records[0].folder]))
    first = proposed.proposals[0]
    turns = {
        name: partial(measured, folder, [*common, *settings, f"steps={steps}"])
        for name, settings in {**SETTINGS, "proposed": first.overrides}.items()
    }
    found = take_turns(turns, rounds)
    took = {name: median(values) for name, values in found.items()}
    figures = [*predictions(records, common, took)]
    noise = [abs(math.log(one / other)) for values in found.values() for one, other in combinations(values, 2)]
    if noise:
        figures.append(figure("noise: a setting run twice, median difference", median(noise), "of a step"))
    figures += [
        figure("proposed, predicted", first.step_seconds, "s"),
        within(
            f"proposed ({first.name}), over the fastest", took["proposed"], "s", min(took[n] for n in SAME_ROWS), 1.05
        ),
    ]
    return figures


def predictions(records: Sequence[Record], common: Sequence[str], took: Mapping[str, float]) -> list[Figure]:
    """Each setting as predicted from both records, and how good these are; and how good those from the first alone."""
    figures: list[Figure] = []
    for told, some in (("two records", records), ("one record", records[:1])):
        predicted = {name: predict(some, [*common, *settings]) for name, settings in SETTINGS.items()}
        if some is records:
            figures += [figure(f"{name}, predicted", predicted[name], "s", took[name]) for name in SETTINGS]
        errors = [abs(predicted[name] / took[name] - 1) for name in SETTINGS]
        order = kendall([predicted[name] for name in SETTINGS], [took[name] for name in SETTINGS])
        middle = f"median error, {told}", median(errors), "of a step"
        both = f"Kendall's rank correlation, {told}", order, "of 1"
        figures += [
            at_most(*middle, 0.1) if some is records else figure(*middle),
            figure(f"error of nine in ten, {told}", float(np.quantile(errors, 0.9)), "of a step"),
            figure(f"largest error, {told}", max(errors), "of a step"),
            at_least(*both, peer=1.0, target=0.9) if some is records else figure(*both),
        ]
    return figures


def predict(records: Sequence[Record], overrides: Sequence[str]) -> float:
    """The median step, in seconds."""
    job = load_job(find_config(CONFIG), [*overrides, "steps=60"], RunConfig)
    return forecast_of(job, fit(records, job.resolved, CORES).pace, quiet=True).step_seconds_median


def kendall(one: Sequence[float], other: Sequence[float]) -> float:
    """Of all pairs, those in the same order less those in another, over both (Kendall 1938, tau a)."""
    pairs = list(combinations(zip(one, other, strict=True), 2))
    return sum(float(np.sign((a - c) * (b - d))) for (a, b), (c, d) in pairs) / len(pairs)


def planning() -> list[Figure]:
    """The time of a plan for many GPUs, by what an FSDP2 policy and vLLM's engines would take."""
    began = time.perf_counter()
    backends = ["policy.backend=fsdp", "sampler.backend=vllm"]
    made: Plan = make_plan(CONFIG, backends, Wanted(Devices(GPUS, "gpus"), rollout=3000, train=4000))
    took = time.perf_counter() - began
    return [
        figure(f"candidates on {GPUS} GPUs", made.candidates, "candidates"),
        figure("of which were simulated", made.simulated, "layouts"),
        at_most("time of 1,000 candidates", took * 1000 / made.candidates, "s", 120),
        figure("time of all", took, "s"),
    ]


def measured(folder: Path, overrides: Sequence[str]) -> float:
    """Run a setting: its median step, in seconds."""
    done = run(folder, f"run-{time.monotonic_ns()}", overrides)
    notes: list[str] = []
    windows = step_windows(read_events(done / "events.jsonl", notes), FILLING)
    assert not notes, notes
    return float(np.median(windows[:, 1] - windows[:, 0]))


def run(folder: Path, name: str, overrides: Sequence[str]) -> Path:
    """One run of the real script; its folder."""
    words = ["run", CONFIG, f"run.folder={folder}", f"run.name={name}", *overrides]
    environment = {**os.environ, **ALLOCATOR, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    meshrl = Path(sys.executable).parent / "meshrl"
    subprocess.run([meshrl, *words], check=True, cwd=ROOT, capture_output=True, env=environment)
    return folder / name


if __name__ == "__main__":
    main()
