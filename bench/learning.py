"""Learning with GRPO, RLOO and DPO against TRL's trainers: rewards during training, and exact match afterwards.

    python bench/learning.py --json F [--svg F] [--algorithms grpo,rloo,dpo] [--seeds 3,3,1] [--steps N] [--folder F]

Our side runs the shipped script by `meshrl run NAME/quickstart`, the other side TRL's trainer
(bench/peers/trl_learning.py). Both start from one model, the quickstart's after its 200 supervised steps. They use the
same prompts in the same order, and the same batches, rates, optimizer, clip and sampling, in float32. Each run is a
separate process on one core. The seed determines the order of the prompts and the draws. One judge, our sampler,
evaluates each run's saved model: exact match on 512 held-out prompts, greedy and at temperature 1.

GRPO and RLOO draw different completions, so their means over the seeds are compared. Ours may be below TRL's by two
standard errors of the difference. DPO draws nothing: the margins and losses of every step on the same pairs are
compared, and one seed is enough. There is one known difference: GRPO divides by a group's standard deviation plus 1e-6,
TRL by it plus 1e-4.

TRL needs `make peers`. --svg needs matplotlib, which reasoning_gym installs. About 15 minutes.
"""

import asyncio
import json
import math
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt
from numpy.typing import NDArray

from bench.harness import ROOT, Figure, alone, arguments, at_least, at_most, figure, report
from meshrl import Run, RunConfig, Sampler, SamplerConfig, Task, evaluate, rejected_answers
from meshrl.config import Config
from meshrl.engines.local import RankLoop
from meshrl.run import find_config, load_job
from meshrl_torch.train.optimizer import learning_rate

TRL: Final = ROOT / ".peers/trl/bin/python"
SIDES: Final = ("meshrl", "trl")
CLOSE: Final = 1e-4
"""Allowed difference of DPO's margins and losses in nats: what float32 rounding can grow to in a run."""
MATCH: Final = "exact_match.json"
SMOOTH: Final = 5
"""Steps averaged in each point of a drawn curve."""
COLOURS: Final = {"meshrl": "#2f7fe0", "trl": "#e0701a"}
GREY: Final = "#808080"

Curves = NDArray[np.float64]
"""A number of each seed and step."""


class Job(Config):
    """One run, as TRL gets it."""

    algorithm: str
    prompts: tuple[str, ...]
    """Prompts of all steps in order."""
    answers: tuple[str, ...]
    rejected: tuple[str, ...]
    """DPO's worse completions."""
    steps: int
    prompts_per_step: int
    completions: int
    max_tokens: int
    clip: float
    beta: float
    rates: tuple[float, ...]
    """Learning rate of each step."""
    betas: tuple[float, float]
    eps: float
    max_grad_norm: float
    seed: int


@dataclass(frozen=True)
class Result:
    """One run: its recorded steps, and the results of its model."""

    steps: Sequence[Mapping[str, float]]
    exact_match: Mapping[str, float]

    def curve(self, name: str) -> NDArray[np.float64]:
        """A number of each step."""
        return np.array([line[name] for line in self.steps], np.float64)


Results = Mapping[str, Sequence[Result]]
"""The runs of each side, one per seed."""


def main() -> None:
    parser = arguments(__doc__, rounds=None)
    parser.add_argument("--svg", type=Path, metavar="F", help="draw the curves into this file")
    parser.add_argument("--seeds", metavar="N,N", help="runs of each side of each algorithm (default: 3, of DPO 1)")
    parser.add_argument("--steps", type=int, default=80, help="steps of a run (default: 80)")
    parser.add_argument("--algorithms", default="grpo,rloo,dpo", help="which (default: all three)")
    parser.add_argument("--folder", type=Path, help="keep the runs there, and reuse those that it has")
    parser.add_argument("--judge", nargs="+", type=Path, metavar="RUN", help="be the judge of runs' models")
    options = parser.parse_args()
    if options.judge:
        with asyncio.Runner(loop_factory=RankLoop) as runner:
            runner.run(judge(options.judge))
        return
    names = options.algorithms.split(",")
    seeds = [*map(int, options.seeds.split(","))] if options.seeds else [1 if name == "dpo" else 3 for name in names]
    if len(names) != len(seeds):
        parser.error(f"{len(names)} algorithms and {len(seeds)} numbers of seeds: give one for each")
    if not TRL.exists():
        raise SystemExit(f"{TRL.relative_to(ROOT)} is not there: run `make peers` first")
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.folder or Path(scratch)).resolve()
        start = folder / "start"
        if not (start / "model").exists():
            meshrl_run("sft/quickstart", f"run.folder={folder}", f"run.name={start.name}")
        judged([start])
        results = {
            name: train(name, start / "model", folder, count, options.steps)
            for name, count in zip(names, seeds, strict=True)
        }
        before = read_match(start)
    figures = [figure(f"{kind} exact match, the model that all start from", before[kind], "of 1") for kind in before]
    for name, result in results.items():
        figures += dpo_figures(result) if name == "dpo" else reward_figures(name, result)
        figures += match_figures(name, result)
    report("learning", figures, options.json)
    if options.svg:
        draw(results, options.svg)


def meshrl_run(config: str, *settings: str) -> None:
    """`meshrl run` on one core."""
    alone([Path(sys.executable).parent / "meshrl", "run", config, *settings], threads=1)


def train(name: str, model: Path, folder: Path, seeds: int, steps: int) -> Results:
    """Run both sides with each seed, in turns."""
    folders = {side: [folder / f"{name}-{seed}-{side}" for seed in range(seeds)] for side in SIDES}
    for seed, (ours, theirs) in enumerate(zip(*folders.values(), strict=True)):
        settings = [
            f"policy.model={model}",
            f"policy.optimizer.total_steps={steps}",
            f"steps={steps}",
            f"run.seed={seed}",
            f"sampling.seed={seed}",
            f"run.folder={folder}",
        ]
        if not (ours / "model").exists():
            meshrl_run(f"{name}/quickstart", *settings, f"run.name={ours.name}")
        if not (theirs / "model").exists():
            theirs.mkdir(exist_ok=True)
            job = theirs / "job.json"
            job.write_text(make_job(name, settings, seed, steps).model_dump_json())
            alone([TRL, ROOT / "bench/peers/trl_learning.py", model, job, theirs], threads=1)
        print(f"{name}, seed {seed}: done", file=sys.stderr, flush=True)
    judged([run for runs in folders.values() for run in runs])
    return {side: [read(run, steps) for run in runs] for side, runs in folders.items()}


def quickstart(name: str, *settings: str) -> Any:
    """The settings of an algorithm's quickstart."""
    return load_job(find_config(f"{name}/quickstart"), settings).config


@cache
def task(name: str) -> Task:
    """The words of an algorithm's quickstart."""
    return Task.load(quickstart(name).task)


def make_job(name: str, settings: Sequence[str], seed: int, steps: int) -> Job:
    """What `meshrl run` does with these settings, for TRL: the prompts in its order, and its learning rates."""
    config = quickstart(name, *settings)
    rows = config.rows if name == "dpo" else config.prompts
    batches = list(islice(task(name).batches(rows, seed), steps))
    optimizer = config.policy.optimizer
    return Job(
        algorithm=name,
        prompts=tuple(str(text) for batch in batches for text in batch.objects("prompt")),
        answers=tuple(str(text) for batch in batches for text in batch.objects("answer")),
        rejected=tuple(text for batch in batches for text in rejected_answers(batch, config.rejected))
        if name == "dpo"
        else (),
        steps=steps,
        prompts_per_step=rows,
        completions=config.sampling.n,
        max_tokens=config.sampling.max_tokens,
        clip=getattr(config.loss, "clip", 0.0),
        beta=getattr(config.loss, "beta", 0.0),
        rates=tuple(learning_rate(optimizer, step) for step in range(steps)),
        betas=optimizer.betas,
        eps=optimizer.eps,
        max_grad_norm=optimizer.max_grad_norm or 0.0,
        seed=seed,
    )


def read(run: Path, steps: int) -> Result:
    """Read a run's numbers, and the results of its model."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    if len(lines) != steps:
        raise SystemExit(f"{run} tells of {len(lines)} steps, and {steps} are asked for: name another --folder")
    return Result(lines, read_match(run))


def read_match(run: Path) -> dict[str, float]:
    """The judge's results for its model."""
    found: dict[str, float] = json.loads((run / MATCH).read_text("utf-8"))
    return found


def judged(runs: Sequence[Path]) -> None:
    """Judge the runs that have no results yet."""
    if unseen := [run for run in runs if not (run / MATCH).exists()]:
        alone([sys.executable, __file__, "--judge", *unseen], threads=1)


async def judge(runs: Sequence[Path]) -> None:
    """Exact match of each run's model on the held-out prompts, `greedy` and `sampled`, by our sampler."""
    held_out = task("grpo").held_out.only("prompt", "answer")
    with tempfile.TemporaryDirectory() as scratch:
        async with Run(RunConfig(folder=scratch, name="judge")) as run:
            for each in runs:
                sampler = await run.spawn(Sampler, SamplerConfig(model=str(each / "model")))
                match = await evaluate(sampler, held_out, quickstart("grpo").sampling)
                (each / MATCH).write_text(json.dumps(match) + "\n", "utf-8")


def reward_figures(name: str, results: Results) -> list[Figure]:
    """The mean reward of all steps and of the last quarter."""
    last = max(1, len(results["meshrl"][0].steps) // 4)
    return [
        *compared(f"{name}, reward, all steps", results, lambda run: run.curve("reward").mean()),
        *compared(f"{name}, reward, last {last} steps", results, lambda run: run.curve("reward")[-last:].mean()),
    ]


def match_figures(name: str, results: Results) -> list[Figure]:
    """Exact match on held-out prompts."""
    return [
        *compared(f"{name}, greedy exact match", results, lambda run: run.exact_match["greedy"]),
        *compared(f"{name}, sampled exact match", results, lambda run: run.exact_match["sampled"]),
    ]


def compared(name: str, results: Results, measure: Callable[[Result], float]) -> list[Figure]:
    """The means of both sides over their seeds, and their standard errors."""
    both = [np.array([measure(run) for run in results[side]], np.float64) for side in SIDES]
    ours, theirs = (float(each.mean()) for each in both)
    if len(both[0]) < 2:
        return [figure(name, ours, "of 1", theirs)]
    errors = [float(each.std(ddof=1)) / math.sqrt(len(each)) for each in both]
    allowed = 2 * math.hypot(*errors)
    return [
        at_least(name, ours, "of 1", theirs, 1 - allowed / theirs),
        figure(f"{name}, standard error", errors[0], "of 1", errors[1]),
    ]


def dpo_figures(results: Results) -> list[Figure]:
    """Largest difference of the pairs' mean margins and losses in any step, over all seeds."""
    ours, theirs = (margins(results[side], side) for side in SIDES)
    losses = [np.array([run.curve("loss") for run in results[side]]) for side in SIDES]
    return [
        figure("dpo, margin, last step", float(ours[:, -1].mean()), "nats", float(theirs[:, -1].mean())),
        at_most("dpo, largest difference of margins", float(np.abs(ours - theirs).max()), "nats", CLOSE),
        at_most("dpo, largest difference of losses", float(np.abs(losses[0] - losses[1]).max()), "nats", CLOSE),
    ]


def margins(runs: Sequence[Result], side: str) -> Curves:
    """The mean margin of each seed and step, before its update. TRL's is multiplied by beta."""
    if side == "meshrl":
        return np.array([run.curve("margin") for run in runs])
    return np.array([run.curve("rewards/margins") for run in runs]) / float(quickstart("dpo").loss.beta)


def draw(results: Mapping[str, Results], path: Path) -> None:
    """Draw the curves of both sides, mean over seeds with standard error, on a transparent background."""
    mpl.rcParams.update({"svg.hashsalt": "meshrl", "font.size": 9})
    for key in ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color"):
        mpl.rcParams[key] = GREY
    canvas, axes = plt.subplots(1, len(results), figsize=(3.2 * len(results), 2.8), squeeze=False)
    for panel, (name, result) in zip(axes[0], results.items(), strict=True):
        for side in SIDES:
            curves = margins(result[side], side) if name == "dpo" else rewards(result[side])
            steps = np.arange(curves.shape[1]) + (1 if name == "dpo" else SMOOTH)
            mean, error = curves.mean(0), curves.std(0) / math.sqrt(max(1, len(curves) - 1))
            dashes = (0, (4, 3)) if side == "trl" else "-"
            panel.plot(steps, mean, color=COLOURS[side], lw=1.5, ls=dashes, label=side.replace("trl", "TRL"))
            panel.fill_between(steps, mean - error, mean + error, color=COLOURS[side], alpha=0.25, lw=0)
        panel.set(title=name.upper(), xlabel="step", ylabel="margin, nats" if name == "dpo" else "reward")
        panel.grid(alpha=0.3)
        panel.legend(loc="lower right", frameon=False)
    canvas.tight_layout()
    canvas.savefig(path, metadata={"Date": None}, transparent=True)


def rewards(runs: Sequence[Result]) -> Curves:
    """The smoothed reward of each seed and step."""
    window = np.ones(SMOOTH) / SMOOTH
    return np.array([np.convolve(run.curve("reward"), window, "valid") for run in runs])


if __name__ == "__main__":
    main()
