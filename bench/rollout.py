"""Samples per second of rollouts: the samplers torch, vllm and sglang, against the engines alone and transformers.

    python bench/rollout.py --json F [--completions 1,8] [--rounds N] [--engines vllm,sglang] [--parts real]

A model of the quickstart's size with heads of 32 dims, which vLLM's CPU kernels need. 64 prompts x 1 or 8 completions,
whose lengths are forced to be log-uniform from 8 to 256. Each contestant is a separate process with one thread on the
first core, under the same allocator settings. They take turns, and the first turn does not count:

torch          the sampler torch, called through its handle as a script calls it
vllm           the sampler vllm, likewise. Its engine's process is on the same core, so that all its work counts
sglang         the sampler sglang, likewise
vLLM alone     vLLM's engine in a loop of ten lines (bench/peers/vllm_rollout.py), with the same arguments and seeds
SGLang alone   SGLang's own Engine, called once for all rows (bench/peers/sglang_rollout.py). It reads no seeds
transformers   `generate` on one padded batch, and its continuous batching (bench/peers/hf_rollout.py)

Ours return log-probs, versions and texts. The engines alone return tokens and log-probs, transformers only tokens. CPU
time is that of all processes of a contestant. The engines need `make test-vllm` and `make test-sglang`. A few minutes.

With `--parts real`, the sampler torch, `generate` and the matrix products alone (bench/real.py) on two threads, with a
model of SmolLM2-135M's shape: 64 rows with 16 tokens of prompt and 64 new ones, or log-uniform from 8 to 128. About 4
minutes a round.
"""

import asyncio
import contextlib
import json
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench import real
from bench.harness import ROOT, Figure, Worker, arguments, at_least, figure, median, report, take_turns
from meshrl import Batch, NewModel, Run, RunConfig, Sampler, SamplerConfig, Sampling, rollout
from meshrl.config import Config
from meshrl.engines.local import RankLoop
from meshrl.roles import with_options
from meshrl_inference.options import EngineOptions
from meshrl_sglang.options import SglangConfig
from meshrl_torch.model import saving as checkpoint
from meshrl_torch.model.loading import load
from meshrl_torch.model.text import encode_prompts
from meshrl_torch.sample.draw import key
from meshrl_vllm.options import VllmConfig

CHARACTERS: Final = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXY"
MODEL: Final = NewModel(characters=CHARACTERS, heads=2, max_tokens=288)
PROMPTS: Final = 64
TARGET: Final = 0.9
"""Share of the speed of an engine alone."""
SEEDS: Final = (1 << 63) - 1


class Engine(NamedTuple):
    """An engine, and how to start it alone."""

    alone: str
    """Its name when alone."""
    options: type[EngineOptions]
    path: str
    """Additional module path."""

    @property
    def name(self) -> str:
        """Name of its backend."""
        return self.alone.split()[0].lower()

    @property
    def python(self) -> Path:
        """The interpreter of its environment."""
        return ROOT / f".venv-{self.name}/bin/python"

    def command(self, model: Path, job: Path) -> Sequence[str | Path]:
        """The command that starts it alone."""
        peer = ROOT / f"bench/peers/{self.name}_rollout.py"
        return ["env", f"PYTHONPATH={self.path}", self.python, peer, model, job]


ENGINES: Final = {
    each.name: each
    for each in (
        Engine("vLLM alone", VllmConfig, ""),
        Engine("SGLang alone", SglangConfig, str(ROOT / "backends/meshrl_sglang/standins")),
    )
}


class Job(Config):
    """The settings of all contestants."""

    prompts: tuple[str, ...]
    ids: tuple[tuple[int, ...], ...]
    """Token ids of the prompts."""
    rows: tuple[int, ...]
    """Index of each row's prompt."""
    limits: tuple[int, ...]
    """Number of new tokens of each row."""
    max_tokens: int
    slots: int
    kv_cache_mib: int = 512


def main() -> None:
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--completions", default="1,8", help="completions a prompt (default: 1,8)")
    parser.add_argument("--engines", default=",".join(ENGINES), help="of these (default: vllm,sglang)")
    parser.add_argument("--parts", choices=("small", "real"), default="small", help="sizes of models (default: small)")
    parser.add_argument("--worker", nargs=3, metavar=("BACKEND", "MODEL", "JOB"), help="be one of our contestants")
    options = parser.parse_args()
    if options.worker:
        backend, model, job = options.worker
        with asyncio.Runner(loop_factory=RankLoop) as runner:
            runner.run(contest(backend, model, Job.model_validate_json(Path(job).read_bytes())))
        return
    if options.parts == "real":
        report("rollout, real", compare_real(options.rounds), options.json)
        return
    engines = [ENGINES[name] for name in options.engines.split(",")]
    for engine in engines:
        if not engine.python.exists():
            raise SystemExit(f"{engine.python.relative_to(ROOT)} is not there: run `make test-{engine.name}` first")
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        language = load(SamplerConfig(model=MODEL))
        model = Path(folder, "model")
        checkpoint.write(language, str(model))
        for completions in map(int, options.completions.split(",")):
            job = make_job(partial(encode_prompts, language), completions)
            path = Path(folder, f"{completions}.json")
            path.write_text(job.model_dump_json())
            figures += compare(engines, job, f"64 x {completions}", (model, path), options.rounds)
    report("rollout", figures, options.json)


def make_job(encode: Callable[[Sequence[str]], list[list[int]]], completions: int) -> Job:
    """Prompts of 3 to 8 letters, and a limit for each row."""
    rng = np.random.default_rng(0)
    prompts = ["".join(rng.choice(list(CHARACTERS), rng.integers(3, 9))) for _ in range(PROMPTS)]
    rows = np.repeat(np.arange(PROMPTS), completions)
    limits = log_uniform(rng, 256, len(rows))
    return Job(
        prompts=tuple(prompts),
        ids=tuple(map(tuple, encode(prompts))),
        rows=tuple(rows.tolist()),
        limits=tuple(limits.tolist()),
        max_tokens=MODEL.max_tokens,
        slots=len(rows),
    )


def log_uniform(rng: np.random.Generator, most: int, rows: int) -> NDArray[np.int64]:
    """Lengths from 8 to `most`."""
    return np.exp(rng.uniform(np.log(8), np.log(most + 1), rows)).astype(np.int64)


def compare_real(rounds: int) -> list[Figure]:
    """Let a model of real size, `generate` and the matrix products of a decode step take turns."""
    rng = np.random.default_rng(0)
    ids = rng.integers(2, real.SHAPE.vocab_size, (PROMPTS, 16))
    figures: list[Figure] = []
    cases = {"equal lengths": (np.full(PROMPTS, 64), 1.4), "8 to 128 tokens": (log_uniform(rng, 128, PROMPTS), 2.5)}
    with tempfile.TemporaryDirectory() as folder:
        model, path = Path(folder, "model"), Path(folder, "job.json")
        real.write_model(str(model))
        for label, (limits, target) in cases.items():
            job = Job(
                prompts=tuple("".join(real.CHARACTERS[each - 2] for each in row) for row in ids.tolist()),
                ids=tuple(map(tuple, ids.tolist())),
                rows=tuple(range(PROMPTS)),
                limits=tuple(limits.tolist()),
                max_tokens=real.SHAPE.max_position_embeddings,
                slots=PROMPTS,
            )
            path.write_text(job.model_dump_json())
            figures += real_figures(label, target, (model, path), rounds)
    return figures


def real_figures(label: str, target: float, files: tuple[Path, Path], rounds: int) -> list[Figure]:
    """The figures of one case of the part `real`."""
    commands: dict[str, Sequence[str | Path]] = {
        "torch": [sys.executable, __file__, "--worker", "torch", *files],
        "generate": [sys.executable, ROOT / "bench/peers/hf_rollout.py", "generate", *files],
        "products": real.command(PROMPTS, backward=False),
    }
    questions = {name: partial(real.turn, commands[name], rows=True) for name in ("torch", "generate")}
    questions |= {each: partial(real.turn, commands["products"], library=each) for each in real.LIBRARIES}
    turns = take_turns(questions, rounds)
    speed = {
        name: median([answer.get("tokens", PROMPTS) / answer["wall"] for answer in answers])
        for name, answers in turns.items()
    }
    return [
        at_least(f"sampling, real, {label}", speed["torch"], "tokens/s", speed["generate"], target),
        *(
            figure(f"sampling, real, {label}, against products by {each}", speed["torch"], "tokens/s", speed[each])
            for each in real.LIBRARIES
        ),
        real.bandwidth([answer for each in real.LIBRARIES for answer in turns[each]]),
    ]


def compare(engines: Sequence[Engine], job: Job, label: str, files: tuple[Path, Path], rounds: int) -> list[Figure]:
    """Let all take turns, and compare ours with each of the others. `files`: the model and the job."""
    ours = [*(engine.name for engine in engines), "torch"]
    hf: list[str | Path] = [sys.executable, ROOT / "bench/peers/hf_rollout.py"]
    commands: dict[str, Sequence[str | Path]] = {
        **{name: [sys.executable, __file__, "--worker", name, *files] for name in ours},
        **{engine.alone: engine.command(*files) for engine in engines},
        "transformers' generate": [*hf, "generate", *files],
        "transformers' continuous batching": [*hf, "batching", *files],
    }
    with contextlib.ExitStack() as stack:
        workers = {name: stack.enter_context(Worker(command, threads=1)) for name, command in commands.items()}
        questions: dict[str, Callable[[], dict[str, float]]] = {
            name: partial(turn, worker, rows=True) for name, worker in workers.items()
        }
        for engine in engines:
            alone = workers[engine.alone]
            questions[engine.alone] = partial(seeded_turn, alone, count(), len(job.rows))
        answers = {name: each[1:] for name, each in take_turns(questions, rounds + 1).items()}
    wanted = {name: {sum(job.limits)} for name in answers}
    made = {name: {answer["tokens"] for answer in each} for name, each in answers.items()}
    assert made == wanted, f"the contestants made other numbers of tokens than {sum(job.limits)}: {made}"
    speed = {name: median([answer["rows"] / answer["wall"] for answer in each]) for name, each in answers.items()}
    cpu = {name: median([answer["cpu"] for answer in each]) for name, each in answers.items()}
    others = [name for name in commands if name not in ours]
    own = {(engine.name, engine.alone) for engine in engines}
    pairs = [(mine, name) for mine in ours for name in others]
    figures = [
        at_least(f"{mine} against {name}, {label}", speed[mine], "samples/s", speed[name], TARGET)
        if (mine, name) in own
        else figure(f"{mine} against {name}, {label}", speed[mine], "samples/s", speed[name])
        for mine, name in pairs
    ]
    if "vllm" in answers:
        both = zip(answers["vllm"], answers["vLLM alone"], strict=True)
        alike = float(np.mean([mine["checksum"] == theirs["checksum"] for mine, theirs in both]))
        figures.append(figure(f"the same tokens as vLLM alone, {label}", alike, "of the turns"))
    return [
        *figures,
        *(figure(f"CPU, {mine} against {name}, {label}", cpu[mine], "s/turn", cpu[name]) for mine, name in pairs),
    ]


def turn(worker: Worker, **question: object) -> dict[str, float]:
    """One turn, with the CPU seconds of all the contestant's processes."""
    before = worker.cpu_seconds()
    answer = worker.ask(**question)
    return {**answer, "cpu": worker.cpu_seconds() - before}


def seeded_turn(worker: Worker, turns: Iterator[int], rows: int) -> dict[str, float]:
    """One turn of an engine alone, with the same seeds as ours."""
    return turn(worker, seeds=seeds(next(turns), rows))


def seeds(turn: int, rows: int) -> list[int]:
    """The seeds that a sampler gives its engine in a call with weights of version 0."""
    call = int(key(SamplerConfig(model="").seed, Sampling().seed, 0, turn))
    sent = Batch.of(row=np.arange(rows)).part(np.arange(rows)).repeat(1)
    return [int(key(call, number)) & SEEDS for number in sent.origins[0].tolist()]


async def contest(backend: str, model: str, job: Job) -> None:
    """Run as one of our contestants: one batch of rollouts per line on standard input."""
    config = SamplerConfig(backend=backend, model=model, slots=job.slots)
    if engine := ENGINES.get(backend):
        config = with_options(config, engine.options(python=str(engine.python), kv_cache_mib=job.kv_cache_mib))
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
