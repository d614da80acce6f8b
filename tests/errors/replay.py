"""Mistakes in following the schedule of an earlier run. Each follows, in another way, one that was recorded well."""

from collections.abc import Mapping

import numpy as np

from meshrl import (
    Batch,
    CrossEntropy,
    EvaluationConfig,
    Policy,
    PolicyConfig,
    Run,
    RunConfig,
    Sampler,
    SamplerConfig,
    Sampling,
    Task,
    evaluate,
    evaluate_during,
    publish,
    rollouts,
)
from meshrl.rollout.stream import Keep

TASK = Task(
    train=Batch.of(prompt=["cat>", "act>"], answer=["tac", "tca"]), held_out=Batch.of(prompt=["dog>"], answer=["god"])
)
FIRST: Mapping[str, object] = {"name": "first", "deterministic": True}
AGAIN: Mapping[str, object] = {"name": "again", "replay": "runs/first"}


async def _tuned(settings: Mapping[str, object], *, steps: int = 4, every: int = 2) -> None:
    """As `sft`, whose sampler is given weights for evaluations and at the end."""
    async with Run(RunConfig.model_validate(settings)) as run:
        policy = await run.spawn(Policy, PolicyConfig(backend="fake", model="none"))
        sampler = await run.spawn(Sampler, SamplerConfig(backend="fake", model="none"))
        evaluate_during(run, EvaluationConfig(every=every), sampler, TASK.held_out, Sampling(), policy=policy)
        async for _ in run.steps(steps):
            batch = await policy.encode(TASK.train.assign(completion=TASK.train["answer"]))
            await policy.update(batch, CrossEntropy())
        await publish(policy, sampler)
        await evaluate(sampler, TASK.held_out, Sampling())


async def _streamed(
    settings: Mapping[str, object], *, steps: int = 2, ahead: int = 1, keep: Keep | None = None
) -> None:
    async with Run(RunConfig.model_validate(settings)) as run:
        policy = await run.spawn(Policy, PolicyConfig(backend="fake", model="none"))
        sampler = await run.spawn(Sampler, SamplerConfig(backend="fake", model="none"))
        prompts = (TASK.train.assign(groups=np.arange(2) + 2 * number) for number in range(9))
        async with rollouts(sampler, prompts, Sampling(), ahead=ahead, keep=keep) as stream:
            async for _ in run.steps(steps):
                await policy.update(await anext(stream), CrossEntropy())
                await publish(policy, stream)
        await evaluate(sampler, TASK.held_out, Sampling())


async def replay_of_another_evaluation() -> None:
    await _tuned(FIRST)
    await _tuned(AGAIN, every=4)


async def replay_of_other_steps() -> None:
    await _streamed(FIRST)
    await _streamed(AGAIN, steps=1)


async def replay_of_another_stream() -> None:
    await _streamed(FIRST)
    await _streamed(AGAIN, ahead=0)


async def replay_of_another_keep() -> None:
    await _streamed(FIRST)
    await _streamed(AGAIN, keep=lambda batch: batch.groups != 0)


async def replay_of_no_schedule() -> None:
    await _streamed({"name": "first"})
    await _streamed(AGAIN)
