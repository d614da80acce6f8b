"""Tokens per second of `update`, packed, against one padded batch of the same rows.

    python bench/train.py --json F [--backend fsdp|megatron] [--threads 1,2] [--rounds N] [--parts real]

A step has 64 rows with lengths log-uniform from 32 to 512, of which the first 16 tokens are the prompt, and the GRPO
loss. The padded contestant is plain transformers: all rows padded on the right to the longest, an attention mask, sdpa,
one forward and backward pass, then the same clipping and AdamW. Only the rows' tokens count, not the padding. Both
start from one model folder, each in a separate process on the first `threads` cores. They take turns, and must report
the same loss for the first step. The target is 0.8 of the possible gain without padding: padded over real tokens.

tiny    the quickstart's size: hidden 64, ffn 192, 3 layers, 4 heads
larger  hidden 192, ffn 576, 4 layers, 6 heads

With `--backend fsdp`, FSDP2 trains packed on one rank. The backend torch takes turns too, and a step may take 1.15
times its time. Then come the memory of log-probs (bench/logprobs.py) and, with a GPU, its utilisation
(bench/utilisation.py).

With `--backend megatron`, Megatron-Core does the same. Then come two ranks of one thread each: FSDP2 and the layouts of
Megatron-Core, all in the same two processes of Ray, and torch in a separate process with two threads.

With `--parts hybrid`, models with recurrent layers (bench/hybrid.py) take turns: packed, padded by meshrl with all rows
in one batch, and the padded contestant. Packed must be 2 times as fast as that, and padded rows may take 1.1 times its
time.

With `--parts real`, an update of 16 rows of 128 to 512 tokens by a model of SmolLM2-135M's shape (bench/real.py), on
two threads. The peers are plain transformers, one row after another, and the matrix products alone.

About 4 minutes, 10 with fsdp and 14 with megatron. The part `hybrid` takes 3, and `real` 2 a round.
"""

import asyncio
import contextlib
import json
import math
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import AutoModelForCausalLM

from bench import hybrid, logprobs, real, utilisation
from bench.harness import Figure, Worker, arguments, at_least, figure, median, report, take_turns, within
from meshrl import Batch, ClippedLoss, NewModel, PolicyConfig, Ragged, Run, RunConfig
from meshrl.engines.local import RankLoop
from meshrl.roles import OptimizerConfig, Packing, Policy
from meshrl.run import MeshConfig

CHARACTERS: Final = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ>"
LONGEST: Final = 512
PROMPT: Final = 16
MODELS: Final = {
    "tiny": NewModel(characters=CHARACTERS, max_tokens=LONGEST),
    "larger": NewModel(characters=CHARACTERS, max_tokens=LONGEST, hidden_size=192, ffn_size=576, layers=4, heads=6),
}
OPTIMIZER: Final = OptimizerConfig(lr=1e-4)
LOSS: Final = ClippedLoss()
SPREAD: Final = "spread"
APART: Final = "apart"
ROWS: Final = "rows apart"
REAL: Final = "135M"
"""The name of the model of the part `real`."""
FSDP: Final = "fsdp, dp=2"
LAYOUTS: Final = {
    FSDP: PolicyConfig(backend="fsdp", model="", optimizer=OPTIMIZER),
    "megatron, dp=2": PolicyConfig(backend="megatron", model="", optimizer=OPTIMIZER),
    "megatron, tp=2": PolicyConfig(backend="megatron", model="", optimizer=OPTIMIZER, axes={"dp": 1, "tp": 2}),
    "megatron, pp=2": PolicyConfig(backend="megatron", model="", optimizer=OPTIMIZER, axes={"dp": 1, "pp": 2}),
}
"""Layouts on two ranks. Each gets the model."""

Step = Callable[[], Awaitable[float]]
"""One update, which returns its loss."""


def main() -> None:
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--threads", default="1,2", help="numbers of threads to measure with (default: 1,2)")
    parser.add_argument(
        "--backend", choices=("torch", "fsdp", "megatron"), default="torch", help="what trains (default: torch)"
    )
    parser.add_argument("--models", default="tiny,larger", help="which models (default: both)")
    parser.add_argument(
        "--parts", choices=("small", "hybrid", "real"), default="small", help="kinds of models (default: small)"
    )
    parser.add_argument("--worker", nargs=2, metavar=("CONTESTANT", "MODEL"), help="be this contestant")
    options = parser.parse_args()
    if options.worker:
        contestant, model = options.worker
        with asyncio.Runner(loop_factory=RankLoop) as runner:
            apart = partial(packed, backend="torch", packing="padded", budget=64 * LONGEST)
            contestants: dict[str, Callable[[str], Coroutine[Any, Any, None]]] = {
                contestant: partial(packed, backend=contestant),
                "padded": padded,
                APART: apart,
                ROWS: rows_apart,
                SPREAD: spread,
            }
            runner.run(contestants[contestant](model))
        return
    if options.parts == "hybrid":
        report("train, hybrid", compare_hybrid(options.rounds), options.json)
        return
    if options.parts == "real":
        report("train, real", compare_real(options.rounds, options.backend), options.json)
        return
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models.split(","):
            model = str(Path(folder) / name)
            asyncio.run(make_model(MODELS[name], folder, model))
            for threads in map(int, options.threads.split(",")):
                figures += compare(name, model, threads, options.rounds, options.backend)
            if options.backend == "megatron":
                figures += compare_layouts(name, model, options.rounds)
    if options.backend == "fsdp":
        figures += logprobs.compare() + utilisation.compare(options.rounds)
    report("train", figures, options.json)


async def make_model(spec: NewModel, folder: str, model: str) -> None:
    """Write the common initial model."""
    async with Run(RunConfig(folder=folder, name="new")) as run:
        policy = await run.spawn(Policy, PolicyConfig(model=spec))
        await policy.save(model)


def compare(name: str, model: str, threads: int, rounds: int, backend: str) -> list[Figure]:
    """Let all take turns, and compare their medians."""
    with contextlib.ExitStack() as stack:
        workers = {
            contestant: stack.enter_context(Worker([sys.executable, __file__, "--worker", contestant, model], threads))
            for contestant in dict.fromkeys((backend, "torch", "padded"))
        }
        check_losses([worker.ask(steps=1)["loss"] for worker in workers.values()])
        turns = take_turns({each: partial(worker.ask, steps=2) for each, worker in workers.items()}, rounds)
    lengths = make_rows().lengths
    real, ratio = int(lengths.sum()), float(len(lengths) * lengths.max() / lengths.sum())
    wall = {each: median([answer["wall"] / 2 for answer in turns[each]]) for each in workers}
    cpu = {each: median([answer["cpu"] / 2 for answer in turns[each]]) for each in workers}
    label = f"{name}, {threads} thread{'s' if threads > 1 else ''}"
    figures = [
        at_least(f"update, {label}", real / wall[backend], "tokens/s", real / wall["padded"], 0.8 * ratio),
        figure(f"CPU, {label}", cpu[backend], "s/step", cpu["padded"]),
        figure(f"padded over real tokens, {label}", ratio, "ratio"),
    ]
    if backend != "torch":
        figures += [
            within(f"update, against the backend torch, {label}", wall[backend], "s/step", wall["torch"], 1.15),
            figure(f"CPU, against the backend torch, {label}", cpu[backend], "s/step", cpu["torch"]),
        ]
    return figures


def compare_hybrid(rounds: int) -> list[Figure]:
    """Models with recurrent layers, packed and padded, on one thread."""
    figures: list[Figure] = []
    for name in hybrid.MODELS:
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            model = str(Path(folder) / "model")
            hybrid.write_model(name, CHARACTERS, LONGEST, model)
            command = [sys.executable, __file__, "--worker"]
            workers = {
                each: stack.enter_context(Worker([*command, each, model], 1)) for each in ("torch", APART, "padded")
            }
            check_losses([worker.ask(steps=1)["loss"] for worker in workers.values()])
            turns = take_turns({each: partial(worker.ask, steps=1) for each, worker in workers.items()}, rounds)
        wall = {each: median([answer["wall"] for answer in turns[each]]) for each in workers}
        real = int(make_rows().lengths.sum())
        figures += [
            at_least(f"update, {name}", real / wall["torch"], "tokens/s", real / wall["padded"], 2),
            within(f"update, padded rows, {name}", wall[APART], "s/step", wall["padded"], 1.1),
        ]
    return figures


def compare_real(rounds: int, backend: str) -> list[Figure]:
    """Let a model of real size, a plain loop over its rows and its matrix products alone take turns."""
    tokens = int(make_real_rows().lengths.sum())
    with tempfile.TemporaryDirectory() as folder:
        model = str(Path(folder, REAL))
        real.write_model(model)
        command, products = [sys.executable, __file__, "--worker"], real.command(tokens, backward=True)
        turns = take_turns(
            {each: partial(real.turn, [*command, each, model], steps=1) for each in (backend, ROWS)}
            | {each: partial(real.turn, products, library=each) for each in real.LIBRARIES},
            rounds,
        )
    check_losses([answer["first"] for each in (backend, ROWS) for answer in turns[each]])
    wall = {each: median([answer["wall"] for answer in answers]) for each, answers in turns.items()}
    cpu = {each: median([answer["cpu"] for answer in turns[each]]) for each in (backend, ROWS)}
    work = real.operations(tokens, backward=True) / 1e9
    speed = {each: work / seconds for each, seconds in wall.items()}
    return [
        at_least("update, real, against rows apart", tokens / wall[backend], "tokens/s", tokens / wall[ROWS], 1.3),
        *(
            at_least(f"update, real, against products by {each}", speed[backend], "GFLOP/s", speed[each], 0.75)
            for each in real.LIBRARIES
        ),
        figure("rows apart, real, against products by mkl", speed[ROWS], "GFLOP/s", speed["mkl"]),
        figure("CPU, real, against rows apart", cpu[backend], "s/step", cpu[ROWS]),
        real.bandwidth([answer for each in real.LIBRARIES for answer in turns[each]]),
    ]


def compare_layouts(name: str, model: str, rounds: int) -> list[Figure]:
    """Two ranks in each layout that divides the model, in turns with one rank of torch."""
    command = [sys.executable, __file__, "--worker"]
    with Worker([*command, SPREAD, model], 2) as ranks, Worker([*command, "torch", model], 2) as alone:
        contestants = {each: partial(ranks.ask, layout=each) for each in dividing(model)} | {"torch": alone.ask}
        check_losses([ask(steps=1)["loss"] for ask in contestants.values()])
        turns = take_turns({each: partial(ask, steps=2) for each, ask in contestants.items()}, rounds)
    wall = {each: median([answer["wall"] / 2 for answer in turns[each]]) for each in contestants}
    figures = [figure(f"update, {FSDP}, against torch on 2 threads, {name}", wall[FSDP], "s/step", wall["torch"])]
    for each in [each for each in wall if each not in (FSDP, "torch")]:
        figures += [
            figure(f"update, {each}, against {FSDP}, {name}", wall[each], "s/step", wall[FSDP]),
            figure(f"update, {each}, against torch on 2 threads, {name}", wall[each], "s/step", wall["torch"]),
        ]
    return figures


def check_losses(losses: list[float]) -> None:
    """Exit if the contestants' losses differ."""
    if not all(math.isclose(loss, losses[0], rel_tol=1e-3, abs_tol=1e-5) for loss in losses):
        raise SystemExit(f"the contestants differ in the loss of their first step: {losses}")


def dividing(model: str) -> Mapping[str, PolicyConfig]:
    """The layouts that divide a model, each with the model."""
    layers = MODELS[Path(model).name].layers
    return {
        name: config.model_copy(update={"model": model})
        for name, config in LAYOUTS.items()
        if layers % config.axes.get("pp", 1) == 0
    }


def make_rows() -> Batch:
    """The rows of each step: random text with random rewards, as a model that knows nothing would draw it."""
    rng = np.random.default_rng(0)
    lengths = np.exp(rng.uniform(np.log(32), np.log(LONGEST), 64)).round().astype(int)
    lengths[0] = LONGEST
    return as_batch(rng, lengths, len(CHARACTERS) + 2)


def as_batch(rng: np.random.Generator, lengths: NDArray[np.int64], vocabulary: int) -> Batch:
    """Rows of these lengths."""
    offsets = np.append(0, np.cumsum(lengths))
    count = int(offsets[-1])
    place = np.arange(count) - np.repeat(offsets[:-1], lengths)
    return Batch.of(
        tokens=Ragged(rng.integers(2, vocabulary, count, dtype=np.int32), offsets),
        loss_mask=Ragged(place >= PROMPT, offsets),
        sampler_logprobs=Ragged(np.full(count, -np.log(vocabulary), np.float32), offsets),
        advantages=rng.normal(size=len(lengths)).astype(np.float32),
    )


def make_real_rows() -> Batch:
    """The rows of the part `real`."""
    rng = np.random.default_rng(0)
    return as_batch(rng, rng.integers(128, LONGEST + 1, 16), real.SHAPE.vocab_size)


async def packed(model: str, backend: str, packing: Packing = "auto", budget: int = 1 << 14) -> None:
    """Run meshrl's policy on a mesh of one rank."""
    batch = make_real_rows() if Path(model).name == REAL else make_rows()
    async with Run(RunConfig(folder=str(Path(model).parent), name=f"{backend}-{packing}")) as run:
        table = PolicyConfig(
            backend=backend, model=model, optimizer=OPTIMIZER, packing=packing, micro_batch_tokens=budget
        )
        policy = await run.spawn(Policy, table)

        async def step() -> float:
            return (await policy.update(batch, LOSS))["loss"]

        await answer_questions({"": step})


async def spread(model: str) -> None:
    """Run policies in all layouts, in the same two processes. A question names the one that steps."""
    batch = make_rows()
    meshes = {"main": MeshConfig(ranks=2, cpus=1)}
    async with Run(RunConfig(folder=str(Path(model).parent), name=SPREAD, engine="ray", meshes=meshes)) as run:

        async def step(policy: Policy) -> float:
            return (await policy.update(batch, LOSS))["loss"]

        policies = {name: await run.spawn(Policy, config) for name, config in dividing(model).items()}
        await answer_questions({name: partial(step, policy) for name, policy in policies.items()})


async def padded(model: str) -> None:
    """Run plain transformers and torch, with all rows in one rectangle."""
    network, optimizer = plain(model)
    batch = make_rows()
    attention = torch.arange(LONGEST) < torch.from_numpy(batch.lengths)[:, None]
    tokens = torch.zeros(attention.shape, dtype=torch.long)
    tokens[attention] = torch.from_numpy(batch.tokens.values.astype(np.int64))
    learned = torch.zeros(attention.shape, dtype=torch.bool)
    learned[attention] = torch.from_numpy(np.array(batch.loss_mask.values))
    learned = learned[:, 1:]
    columns = {
        "sampler_logprobs": torch.full((int(learned.sum()),), float(batch.sampler_logprobs.values[0])),
        "advantages": torch.from_numpy(np.array(batch.row("advantages")))[:, None].expand_as(learned)[learned],
    }

    async def step() -> float:
        logits = network(tokens, attention_mask=attention, use_cache=False).logits[:, :-1]
        logprobs = torch.log_softmax(logits, -1).gather(-1, tokens[:, 1:, None])[..., 0]
        judged = LOSS(logprobs[learned], columns)
        value = judged.values.mean()
        value.backward()
        optimize(network, optimizer)
        return value.item()

    await answer_questions({"": step})


async def rows_apart(model: str) -> None:
    """Run plain transformers and torch, with a pass for each row, as many people do."""
    network, optimizer = plain(model)
    batch = make_real_rows()
    total = int(batch.loss_mask.values.sum())
    sampled, advantages = float(batch.sampler_logprobs.values[0]), batch.row("advantages").tolist()

    async def step() -> float:
        value = 0.0
        for row, advantage in zip(batch.tokens, advantages, strict=True):
            tokens = torch.from_numpy(row.astype(np.int64))[None]
            logits = network(tokens, use_cache=False).logits[0, PROMPT - 1 : -1]
            logprobs = torch.log_softmax(logits, -1).gather(-1, tokens[0, PROMPT:, None])[:, 0]
            given = {"sampler_logprobs": sampled, "advantages": advantage}
            columns = {name: torch.full_like(logprobs, each) for name, each in given.items()}
            part = LOSS(logprobs, columns).values.sum() / total
            part.backward()
            value += part.item()
        optimize(network, optimizer)
        return value

    await answer_questions({"": step})


def plain(model: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Plain transformers, and torch's optimizer."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
    return network, torch.optim.AdamW(
        network.parameters(),
        lr=OPTIMIZER.lr,
        betas=OPTIMIZER.betas,
        eps=OPTIMIZER.eps,
        weight_decay=OPTIMIZER.weight_decay,
        fused=True,
    )


def optimize(network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Clip, step and drop the gradients."""
    torch.nn.utils.clip_grad_norm_(network.parameters(), OPTIMIZER.max_grad_norm or math.inf)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


async def answer_questions(steps: Mapping[str, Step]) -> None:
    """Make the number of steps that each line on standard input asks for, and answer with the time."""
    print('{"ready": true}', flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        step = steps[question.get("layout", "")]
        wall, cpu = time.perf_counter(), time.process_time()
        losses = [await step() for _ in range(question["steps"])]
        answer = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "loss": losses[-1]}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
