"""Mistakes in evaluating beside steps, and in following or going on with an earlier run, which was made well."""

from collections.abc import Callable, Coroutine, Iterable, Mapping
from pathlib import Path

import numpy as np

import meshrl as rl
from meshrl.overlap.stream_state import Keep
from meshrl.run import EvaluationConfig

TASK = rl.Task(
    train=rl.Batch.of(prompt=["cat>", "act>"], answer=["tac", "tca"]),
    held_out=rl.Batch.of(prompt=["dog>"], answer=["god"]),
)
FAKE = rl.PolicyConfig(backend="fake", model="none")
SIZES = {"characters": "act>", "hidden_size": 8, "ffn_size": 8, "layers": 1, "heads": 2, "max_tokens": 16}
TINY, LARGE = (rl.PolicyConfig.model_validate({"model": {**SIZES, "hidden_size": size}}) for size in (8, 16))
PLAIN = rl.RunConfig()
FIRST = rl.RunConfig(name="first", deterministic=True)
AGAIN = rl.RunConfig(name="again", replay="runs/first")
RESUMED = rl.RunConfig(checkpoint_every=1, resume=True)
OTHER_SEED = rl.RunConfig(checkpoint_every=1, resume=True, seed=1)


async def _idle(config: rl.RunConfig, resolved: Mapping[str, object] | None = None) -> None:
    async with rl.Run(config, resolved) as run:
        async for _ in run.steps(2):
            pass


async def _tuned(
    config: rl.RunConfig = RESUMED,
    policy: rl.PolicyConfig = FAKE,
    *,
    critic: bool = False,
    every: int | None = None,
    held_out: rl.Batch = TASK.held_out,
) -> None:
    async with rl.Run(config) as run:
        if critic:
            await run.spawn(rl.Critic, rl.CriticConfig(backend="fake", model="none"))
        actor = await run.spawn(rl.Policy, policy)
        if every:
            sampler = await run.spawn(rl.Sampler, rl.SamplerConfig(backend="fake", model="none"))
            evaluation = EvaluationConfig(every=every)
            rl.evaluate_during(run, evaluation, sampler, held_out, rl.Sampling(), policy=actor)
        rows = TASK.batches(1, run.seed)
        async for _ in run.steps(1):
            batch = next(rows)
            encoded = await actor.encode(batch.assign(completion=batch["answer"]))
            await run.record(await actor.update(encoded, rl.CrossEntropy()))


async def _streamed(
    config: rl.RunConfig,
    *,
    steps: int = 2,
    ahead: int = 1,
    keep: Keep | None = None,
    prompts: Iterable[rl.Batch] | None = None,
    publishes: bool = True,
) -> None:
    async with rl.Run(config) as run:
        policy = await run.spawn(rl.Policy, FAKE)
        sampler = await run.spawn(rl.Sampler, rl.SamplerConfig(backend="fake", model="none"))
        if publishes:
            await rl.publish(policy, sampler)
        drawn = prompts or TASK.batches(1, run.seed)
        async with rl.rollouts(sampler, drawn, rl.Sampling(), ahead=ahead, keep=keep) as stream:
            async for _ in run.steps(steps):
                await policy.update(await anext(stream), rl.CrossEntropy())
                await rl.publish(policy, stream)
        await rl.evaluate(sampler, TASK.held_out, rl.Sampling())


async def _then(first: Coroutine[None, None, None], again: Coroutine[None, None, None]) -> None:
    await first
    await again


async def checkpoint_that_cannot_be_read() -> None:
    await _tuned()
    Path("runs/run/checkpoints/step-000001/run.json").write_bytes(b"")
    await _tuned()


async def checkpoint_of_changed_tensors() -> None:
    await _tuned(policy=TINY)
    file = next(Path("runs/run/checkpoints/step-000001/0-policy").glob("*.safetensors"))
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    await _tuned(policy=TINY)


MISTAKES: dict[str, Callable[[], object]] = {
    "evaluation-without-prompts": lambda: _tuned(PLAIN, every=50, held_out=TASK.held_out.select([])),
    "evaluation-that-fails": lambda: _tuned(PLAIN, every=50, held_out=TASK.held_out.assign(answer=[""])),
    "script-that-never-evaluates": lambda: _idle(PLAIN, {"evaluation": EvaluationConfig(every=50)}),
    "replay-of-another-evaluation": lambda: _then(_tuned(FIRST, every=2), _tuned(AGAIN, every=4)),
    "replay-of-other-steps": lambda: _then(_streamed(FIRST), _streamed(AGAIN, steps=1)),
    "replay-of-another-stream": lambda: _then(_streamed(FIRST), _streamed(AGAIN, ahead=0)),
    "replay-of-another-keep": lambda: _then(_streamed(FIRST), _streamed(AGAIN, keep=lambda batch: batch.groups != 0)),
    "replay-of-no-schedule": lambda: _then(_streamed(rl.RunConfig(name="first")), _streamed(AGAIN)),
    "checkpoint-of-another-model": lambda: _then(_tuned(policy=TINY), _tuned(policy=LARGE)),
    "checkpoint-of-other-prompts": lambda: _then(_tuned(), _tuned(OTHER_SEED)),
    "actor-that-the-checkpoint-lacks": lambda: _then(_tuned(), _tuned(critic=True)),
    "actor-that-is-not-spawned-again": lambda: _then(_tuned(), _idle(RESUMED)),
    "no-publishing-before-the-first-batch": lambda: _then(
        _streamed(RESUMED, steps=1, ahead=0), _streamed(RESUMED, ahead=0, publishes=False)
    ),
    "number-of-a-prompt-twice": lambda: _streamed(
        rl.RunConfig(checkpoint_every=10), prompts=(TASK.train.assign(groups=np.arange(2)) for _ in range(2))
    ),
}
