"""Samples per second of rollouts: the samplers torch and vllm, against vLLM alone and against transformers.

    python bench/rollout.py --json F [--completions 1,8] [--rounds N]

A model of the quickstart's size with heads of 32 dims, which vLLM's kernels for CPUs need, 64 prompts x 1 or 8
completions, whose lengths are forced to be log-uniform from 8 to 256. Each contestant is a process of its own with one
thread on the first core, under the same allocator settings, and they take turns, of which the first is not counted:

torch          the sampler torch, called through its handle as a script calls it
vllm           the sampler vllm, likewise; its engine's process has the same core, so that all its work counts
vLLM alone     vLLM's engine in a loop of ten lines (bench/peers/vllm_rollout.py); the same arguments and seeds
transformers   `generate` on one padded batch, and its continuous batching (bench/peers/hf_rollout.py)

Ours return log-probs, versions and texts; vLLM alone returns tokens and log-probs, transformers tokens. CPU is of all
processes of a contestant. vLLM needs `make test-vllm`. A few minutes.
"""

import asyncio
import contextlib
import json
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final

import numpy as np

from bench.harness import ROOT, Figure, Worker, arguments, at_least, figure, median, report, take_turns
from meshrl import Batch, Config, NewModel, Run, RunConfig, Sampler, SamplerConfig, Sampling, rollout, with_options
from meshrl.engines.local import RankLoop
from meshrl_hf import checkpoint
from meshrl_hf.loading import load
from meshrl_hf.seeds import key
from meshrl_hf.text import encode_prompts
from meshrl_vllm.options import VllmConfig

VLLM: Final = ROOT / ".venv-vllm/bin/python"
CHARACTERS: Final = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXY"
MODEL: Final = NewModel(characters=CHARACTERS, heads=2, max_tokens=288)
PROMPTS: Final = 64
TARGET: Final = 0.9
"""Of the speed of vLLM alone."""
OURS: Final = ("vllm", "torch")
SEEDS: Final = (1 << 63) - 1


class Job(Config):
    """What all contestants are told."""

    prompts: tuple[str, ...]
    ids: tuple[tuple[int, ...], ...]
    """Their tokens."""
    rows: tuple[int, ...]
    """The prompt of each row."""
    limits: tuple[int, ...]
    """New tokens of each row."""
    max_tokens: int
    slots: int
    kv_cache_mib: int = 512


def main() -> None:
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--completions", default="1,8", help="completions a prompt (default: 1,8)")
    parser.add_argument("--worker", nargs=3, metavar=("BACKEND", "MODEL", "JOB"), help="be one of our contestants")
    options = parser.parse_args()
    if options.worker:
        backend, model, job = options.worker
        with asyncio.Runner(loop_factory=RankLoop) as runner:
            runner.run(contest(backend, model, Job.model_validate_json(Path(job).read_bytes())))
        return
    if not VLLM.exists():
        raise SystemExit(f"{VLLM.relative_to(ROOT)} is not there: run `make test-vllm` first")
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        language = load(SamplerConfig(model=MODEL))
        model = Path(folder, "model")
        checkpoint.write(language, str(model))
        for completions in map(int, options.completions.split(",")):
            job = make_job(partial(encode_prompts, language.tokenizer, chat=None), completions)
            path = Path(folder, f"{completions}.json")
            path.write_text(job.model_dump_json())
            figures += compare(job, f"64 x {completions}", model, path, options.rounds)
    report("rollout", figures, options.json)


def make_job(encode: Callable[[Sequence[str]], list[list[int]]], completions: int) -> Job:
    """Prompts of 3 to 8 letters, and a limit for each row."""
    rng = np.random.default_rng(0)
    prompts = ["".join(rng.choice(list(CHARACTERS), rng.integers(3, 9))) for _ in range(PROMPTS)]
    rows = np.repeat(np.arange(PROMPTS), completions)
    limits = np.exp(rng.uniform(np.log(8), np.log(257), len(rows))).astype(int)
    return Job(
        prompts=tuple(prompts),
        ids=tuple(map(tuple, encode(prompts))),
        rows=tuple(rows.tolist()),
        limits=tuple(limits.tolist()),
        max_tokens=MODEL.max_tokens,
        slots=len(rows),
    )


def compare(job: Job, label: str, model: Path, path: Path, rounds: int) -> list[Figure]:
    """Let all take turns; ours against each of the others."""
    hf: list[str | Path] = [sys.executable, ROOT / "bench/peers/hf_rollout.py"]
    commands: dict[str, Sequence[str | Path]] = {
        "torch": [sys.executable, __file__, "--worker", "torch", model, path],
        "vllm": [sys.executable, __file__, "--worker", "vllm", model, path],
        "vLLM alone": [VLLM, ROOT / "bench/peers/vllm_rollout.py", model, path],
        "transformers' generate": [*hf, "generate", model, path],
        "transformers' continuous batching": [*hf, "batching", model, path],
    }
    turns = count()
    with contextlib.ExitStack() as stack:
        workers = {name: stack.enter_context(Worker(command, threads=1)) for name, command in commands.items()}
        alone = workers["vLLM alone"]
        questions: dict[str, Callable[[], dict[str, float]]] = {
            name: partial(turn, worker, rows=True) for name, worker in workers.items()
        }
        questions["vLLM alone"] = lambda: turn(alone, seeds=seeds(next(turns), len(job.rows)))
        answers = {name: each[1:] for name, each in take_turns(questions, rounds + 1).items()}
    wanted = {name: {sum(job.limits)} for name in answers}
    made = {name: {answer["tokens"] for answer in each} for name, each in answers.items()}
    assert made == wanted, f"the contestants made other numbers of tokens than {sum(job.limits)}: {made}"
    pairs = zip(answers["vllm"], answers["vLLM alone"], strict=True)
    alike = float(np.mean([ours["checksum"] == theirs["checksum"] for ours, theirs in pairs]))
    speed = {name: median([answer["rows"] / answer["wall"] for answer in each]) for name, each in answers.items()}
    cpu = {name: median([answer["cpu"] for answer in each]) for name, each in answers.items()}
    others = [name for name in commands if name not in OURS]
    return [
        at_least(f"vllm against vLLM alone, {label}", speed["vllm"], "samples/s", speed["vLLM alone"], TARGET),
        figure(f"the same tokens as vLLM alone, {label}", alike, "of the turns"),
        *(
            figure(f"{ours} against {name}, {label}", speed[ours], "samples/s", speed[name])
            for ours in OURS
            for name in others
            if (ours, name) != ("vllm", "vLLM alone")
        ),
        *(
            figure(f"CPU, {ours} against {name}, {label}", cpu[ours], "s/turn", cpu[name])
            for ours in OURS
            for name in others
        ),
    ]


def turn(worker: Worker, **question: object) -> dict[str, float]:
    """One turn, with the CPU seconds of all the contestant's processes."""
    before = worker.cpu_seconds()
    answer = worker.ask(**question)
    return {**answer, "cpu": worker.cpu_seconds() - before}


def seeds(turn: int, rows: int) -> list[int]:
    """What the sampler vllm gives its engine in a call, of weights of version 0."""
    call = int(key(SamplerConfig(model="").seed, Sampling().seed, 0, turn))
    sent = Batch.of(row=np.arange(rows)).part(np.arange(rows)).repeat(1)
    return [int(key(call, number)) & SEEDS for number in sent.origins[0].tolist()]


async def contest(backend: str, model: str, job: Job) -> None:
    """One of our contestants: a batch of rollouts for each line on standard input."""
    vllm = VllmConfig(python=str(VLLM), kv_cache_mib=job.kv_cache_mib)
    config = with_options(SamplerConfig(backend=backend, model=model, slots=job.slots), vllm)
    prompts = Batch.of(prompt=[job.prompts[row] for row in job.rows], max_tokens=np.array(job.limits))
    async with Run(RunConfig(folder=str(Path(model).parent), name=f"contest-{backend}")) as run:
        sampler = await run.spawn(Sampler, config)
        print('{"ready": true}', flush=True)
        for _ in sys.stdin:
            began = time.perf_counter()
            batch = await rollout(sampler, prompts, Sampling(ignore_eos=True))
            wall = time.perf_counter() - began
            batch = await batch.load("tokens", "loss_mask")
            new = batch.tokens.values[batch.loss_mask.values.astype(np.bool_)].astype(np.int32)
            answer = {"wall": wall, "rows": len(batch), "tokens": len(new), "checksum": zlib.crc32(new.tobytes())}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
