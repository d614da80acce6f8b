"""Samples per second of whole GRPO steps (generate, reward, advantages, update, publish) against TRL's GRPOTrainer.

    python bench/grpo.py --json F [--threads 1,2] [--cases short,long] [--rounds N]
    python bench/grpo.py --json F --threads 2 --ahead 1 [--engine processes|ray] [--cases short,long] [--rounds N]

Both start from one model, the quickstart's after its 200 supervised steps, and read the same prompts, shapes and
hyperparameters from one file. Each runs in a separate process on the first `threads` cores, with the same allocator
settings. They take turns, and steps before the first turn do not count. Two cases of 64 prompts x 8 completions, one
update per step:

short  the quickstart's: at most 10 new tokens, rewarded if exactly right
long   completion lengths forced, log-uniform from 8 to 256: with Sampling(ignore_eos=True) and a `max_tokens` column
       here, with a logits processor in TRL (bench/peers/trl_grpo.py). The reward is the share of right characters

With --ahead above 0 our rollouts and training overlap, on two meshes with half of the threads each, against TRL on all
of them. The first steps of a turn then do not count, so rollouts made during the other's turn bring no advantage. A
turn ends when no rollout runs.

TRL needs `make peers`; `--without trl` leaves it out, and the targets with it. About 6 minutes.
"""

import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, get_args

import numpy as np

from bench.harness import (
    ROOT,
    Figure,
    Worker,
    arguments,
    at_least,
    figure,
    machine_cores,
    median,
    report,
    take_turns,
)
from meshrl import Batch, Policy, Reward, Run, RunConfig, Sampler, Task, group_advantages, publish, rollouts
from meshrl.config import Config
from meshrl.engines.local import RankLoop
from meshrl.overlap import Rollouts
from meshrl.run import MeshConfig, find_config, load_job

TRL: Final = ROOT / ".peers/trl/bin/python"
LONGEST: Final = 256
EngineName: TypeAlias = Literal["local", "processes", "ray"]
FILLING: Final = 2
"""Steps of an overlapped turn that do not count."""


class Case(Config):
    """One comparison: what is generated, how often it is measured, and the target."""

    name: str
    long: bool
    steps: int
    """Steps per turn."""
    warm_up: int
    rounds: int
    target: float
    """Target of samples per second over TRL's."""


CASES: Final = {
    "short": Case(name="at most 10 tokens", long=False, steps=5, warm_up=10, rounds=7, target=1.3),
    "long": Case(name="8 to 256 tokens", long=True, steps=1, warm_up=1, rounds=3, target=3.0),
}


class Job(Config):
    """The settings of both contestants."""

    prompts: tuple[str, ...]
    answers: tuple[str, ...]
    prompts_per_step: int
    completions: int
    max_tokens: int
    lengths: tuple[tuple[int, ...], ...]
    """Forced lengths of the rows of consecutive steps, repeated in a cycle. Empty: the model decides."""
    reward: Literal["exact", "share"]
    """Name of a function in bench/peers/score.py."""
    clip: float
    lr: float
    betas: tuple[float, float]
    warmup_steps: int
    max_grad_norm: float
    ahead: int
    engine: EngineName
    seed: int = 0


def main() -> None:
    parser = arguments(__doc__, rounds=None)
    parser.add_argument("--threads", default="1,2", help="numbers of threads to measure with (default: 1,2)")
    parser.add_argument("--cases", default="short,long", help="which cases (default: both)")
    parser.add_argument("--worker", nargs=2, metavar=("MODEL", "JOB"), help="be the contestant meshrl")
    parser.add_argument("--ahead", type=int, default=0, help="versions that our rollouts may be behind (default: 0)")
    parser.add_argument(
        "--engine", choices=get_args(EngineName), default="local", help="where our ranks run (default: local)"
    )
    parser.add_argument("--without", choices=("trl",), help="the peer that is left out")
    options = parser.parse_args()
    if options.worker:
        with asyncio.Runner(loop_factory=RankLoop) as runner:
            model, job = options.worker
            runner.run(contest(model, Job.model_validate_json(Path(job).read_bytes())))
        return
    peers = () if options.without else ("trl",)
    if peers and not TRL.exists():
        raise SystemExit(
            f"{TRL.relative_to(ROOT)} is not there: run `make peers` first, or leave it out: --without trl"
        )
    with tempfile.TemporaryDirectory() as folder:
        model = warmed_up_model(Path(folder))
        figures: list[Figure] = []
        for name in options.cases.split(","):
            job = Path(folder) / f"{name}.json"
            case = CASES[name]
            made = make_job(case, options.ahead, options.engine)
            job.write_text(made.model_dump_json())
            if options.ahead:
                case = overlapped(case, made)
            for threads in map(int, options.threads.split(",")):
                figures += compare(case, options.rounds or case.rounds, threads, model, job, peers)
        report("grpo", figures, options.json)


def warmed_up_model(folder: Path) -> Path:
    """The model that sft/quickstart makes, for longer texts."""
    settings = [f"run.folder={folder}", "run.name=warm", f"policy.model.max_tokens={LONGEST + 64}"]
    meshrl = Path(sys.executable).parent / "meshrl"
    subprocess.run([meshrl, "run", "sft/quickstart", *settings], check=True, cwd=ROOT, capture_output=True)
    return folder / "warm/model"


def overlapped(case: Case, job: Job) -> Case:
    """A higher target, and turns that contain all the lengths, however they are spread over steps."""
    where = "" if job.engine == "local" else f", {job.engine}"
    return case.model_copy(
        update={
            "name": f"{case.name}, ahead={job.ahead}{where}",
            "steps": max(case.steps, len(job.lengths)),
            "target": max(case.target, 2.0 if job.engine == "local" else 2.2),
        }
    )


def quickstart(model: str, *settings: str) -> Any:
    """The settings of grpo/quickstart with this initial model."""
    overrides = [f"policy.model={model}", "policy.optimizer.schedule=constant", *settings]
    return load_job(find_config("grpo/quickstart"), overrides).config


def make_job(case: Case, ahead: int, engine: EngineName) -> Job:
    """The quickstart's prompts and numbers. In the long case also a length for each row of a step."""
    config = quickstart("")
    train = Task.load(config.task).train.select(np.arange(64 * 64))
    rng = np.random.default_rng(0)
    rows = config.prompts * config.sampling.n
    lengths = np.exp(rng.uniform(np.log(8), np.log(LONGEST), (4, rows))).round().astype(int).tolist()
    optimizer = config.policy.optimizer
    return Job(
        prompts=tuple(map(str, train.objects("prompt"))),
        answers=tuple(map(str, train.objects("answer"))),
        prompts_per_step=config.prompts,
        completions=config.sampling.n,
        max_tokens=LONGEST if case.long else config.sampling.max_tokens,
        lengths=tuple(map(tuple, lengths)) if case.long else (),
        reward="share" if case.long else "exact",
        clip=config.loss.clip,
        lr=optimizer.lr,
        betas=optimizer.betas,
        warmup_steps=optimizer.warmup_steps,
        max_grad_norm=optimizer.max_grad_norm or 0.0,
        ahead=ahead,
        engine=engine,
    )


def compare(case: Case, rounds: int, threads: int, model: Path, job: Path, peers: Sequence[str]) -> list[Figure]:
    """Let both take turns and compare their medians."""
    commands: dict[str, Sequence[str | Path]] = {
        "meshrl": [sys.executable, __file__, "--worker", model, job],
        "trl": [TRL, ROOT / "bench/peers/trl_grpo.py", model, job],
    }
    with contextlib.ExitStack() as stack:
        workers = {name: stack.enter_context(Worker(commands[name], threads)) for name in ("meshrl", *peers)}
        for worker in workers.values():
            worker.ask(steps=case.warm_up)
        turns = take_turns({name: partial(worker.ask, steps=case.steps) for name, worker in workers.items()}, rounds)

    def middle(name: str, measure: Callable[[dict[str, float]], float]) -> float:
        return median([measure(answer) for answer in turns[name]])

    def both(what: str, unit: str, measure: Callable[[dict[str, float]], float]) -> Figure:
        return figure(f"{what}, {label}", *numbers(unit, measure))

    def numbers(unit: str, measure: Callable[[dict[str, float]], float]) -> tuple[float, str, float | None]:
        ours, *theirs = (middle(name, measure) for name in workers)
        return ours, unit, theirs[0] if theirs else None

    label = f"{case.name}, {threads} thread{'s' if threads > 1 else ''}"
    rate, unit, peer = numbers("samples/s", lambda answer: answer["rows"] / answer["wall"])
    if case.long and len({frozenset(answer["tokens"] for answer in answers) for answers in turns.values()}) > 1:
        raise SystemExit(f"the contestants made different numbers of tokens: {turns}")
    speed = f"speed, {label}", rate, unit
    return [
        figure(*speed) if peer is None else at_least(*speed, peer, case.target),
        both("wall", "s/step", lambda answer: answer["wall"] / case.steps),
        *([both("CPU", "s/step", lambda answer: answer["cpu"] / case.steps)] if "cpu" in turns["meshrl"][0] else []),
        both("completion", "tokens/sample", lambda answer: answer["tokens"] / answer["rows"]),
        both("reward", "of 1", lambda answer: answer["reward"]),
    ]


async def contest(model: str, job: Job) -> None:
    """The contestant meshrl: GRPO as in algorithms/grpo.py. Each question on standard input asks for some steps."""
    config = quickstart(model, *(["sampler.mesh=rollout", "reward.mesh=reward"] if job.ahead else []))
    # In the long case each row has its own length, so it is drawn separately.
    forced = {"ignore_eos": True, "n": 1} if job.lengths else {}
    sampling = config.sampling.model_copy(update={"max_tokens": job.max_tokens, "seed": job.seed, **forced})
    share = f"{ROOT}/bench/peers/score.py:share"
    scores = config.reward.model_copy(update={"function": share}) if job.lengths else config.reward
    each = MeshConfig(cpus=max(1, machine_cores() // 2))
    meshes = {"main": each, "rollout": each, "reward": MeshConfig(cpus=0)} if job.ahead else {}
    run_config = RunConfig(folder=str(Path(model).parent), name="contest", engine=job.engine, meshes=meshes)
    async with Run(run_config) as run:
        policy = await run.spawn(Policy, config.policy)
        sampler = await run.spawn(Sampler, config.sampler)
        reward = await run.spawn(Reward, scores)
        await publish(policy, sampler)

        async def step(stream: Rollouts) -> Batch:
            batch = await (await anext(stream)).load("rewards", "asked")
            advantages = group_advantages(batch.rewards, batch.row("asked"))
            await policy.update(batch.assign(advantages=advantages), config.loss)
            await publish(policy, stream)
            return batch

        async with rollouts(sampler, step_prompts(job), sampling, ahead=job.ahead, score=reward.score) as stream:
            print('{"ready": true}', flush=True)
            for question in sys.stdin:
                for _ in range(FILLING if job.ahead else 0):
                    await step(stream)
                wall, cpu = time.perf_counter(), time.process_time()
                done = [await step(stream) for _ in range(json.loads(question)["steps"])]
                answer = {"wall": time.perf_counter() - wall, "rows": float(sum(map(len, done)))}
                if job.engine == "local":  # else the ranks are in other processes
                    answer["cpu"] = time.process_time() - cpu
                masks = [(await batch.load("loss_mask")).loss_mask.values for batch in done]
                answer["tokens"] = float(sum(map(np.count_nonzero, masks)))
                answer["reward"] = float(np.mean([batch.rewards.mean() for batch in done]))
                # A running rollout would take the other contestant's time.
                while stream.ledger.running:  # noqa: ASYNC110 -- a stream reports changes only to the trainer
                    await asyncio.sleep(0.01)
                print(json.dumps(answer), flush=True)


def step_prompts(job: Job) -> Iterator[Batch]:
    """The prompts of each step, numbered in `asked`. With forced lengths, one row per completion."""
    step = 0
    while True:
        here = np.arange(job.prompts_per_step) + step * job.prompts_per_step
        rows = here % len(job.prompts)
        batch = Batch.of(
            prompt=[job.prompts[row] for row in rows], answer=[job.answers[row] for row in rows], asked=here
        )
        if job.lengths:
            limits = np.array(job.lengths[step % len(job.lengths)])
            batch = batch.repeat(job.completions).assign(max_tokens=limits)
        yield batch.assign(groups=np.arange(len(batch)) + step * len(batch))
        step += 1


if __name__ == "__main__":
    main()
