"""Mistakes in following the schedule of an earlier run. Each follows, in another way, one that was recorded well."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import meshrl as rl
from meshrl.overlap.stream import Keep

TASK = rl.Task(
    train=rl.Batch.of(prompt=["cat>", "act>"], answer=["tac", "tca"]),
    held_out=rl.Batch.of(prompt=["dog>"], answer=["god"]),
)
FIRST: Mapping[str, object] = {"name": "first", "deterministic": True}
AGAIN: Mapping[str, object] = {"name": "again", "replay": "runs/first"}


async def _tuned(settings: Mapping[str, object], *, steps: int = 4, every: int = 2) -> None:
    """As `sft`, whose sampler is given weights for evaluations and at the end."""
    async with rl.Run(rl.RunConfig.model_validate(settings)) as run:
        policy = await run.spawn(rl.Policy, rl.PolicyConfig(backend="fake", model="none"))
        sampler = await run.spawn(rl.Sampler, rl.SamplerConfig(backend="fake", model="none"))
        rl.evaluate_during(run, rl.EvaluationConfig(every=every), sampler, TASK.held_out, rl.Sampling(), policy=policy)
        async for _ in run.steps(steps):
            batch = await policy.encode(TASK.train.assign(completion=TASK.train["answer"]))
            await policy.update(batch, rl.CrossEntropy())
        await rl.publish(policy, sampler)
        await rl.evaluate(sampler, TASK.held_out, rl.Sampling())


async def _streamed(
    settings: Mapping[str, object], *, steps: int = 2, ahead: int = 1, keep: Keep | None = None
) -> None:
    async with rl.Run(rl.RunConfig.model_validate(settings)) as run:
        policy = await run.spawn(rl.Policy, rl.PolicyConfig(backend="fake", model="none"))
        sampler = await run.spawn(rl.Sampler, rl.SamplerConfig(backend="fake", model="none"))
        prompts = (TASK.train.assign(groups=np.arange(2) + 2 * number) for number in range(9))
        async with rl.rollouts(sampler, prompts, rl.Sampling(), ahead=ahead, keep=keep) as stream:
            async for _ in run.steps(steps):
                await policy.update(await anext(stream), rl.CrossEntropy())
                await rl.publish(policy, stream)
        await rl.evaluate(sampler, TASK.held_out, rl.Sampling())


async def replay_of_another_evaluation() -> None:
    await _tuned(FIRST)
    await _tuned(AGAIN, every=4)


async def _again(first: Mapping[str, object] = FIRST, **otherwise: Any) -> None:
    await _streamed(first)
    await _streamed(AGAIN, **otherwise)


MISTAKES: dict[str, Callable[[], object]] = {
    "replay-of-other-steps": lambda: _again(steps=1),
    "replay-of-another-stream": lambda: _again(ahead=0),
    "replay-of-another-keep": lambda: _again(keep=lambda batch: batch.groups != 0),
    "replay-of-no-schedule": lambda: _again({"name": "first"}),
}
