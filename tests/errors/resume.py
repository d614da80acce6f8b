"""Mistakes in going on from a checkpoint. Each goes on, in another way, with a run that was begun well."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from meshrl import (
    Batch,
    Critic,
    CriticConfig,
    CrossEntropy,
    NewModel,
    Policy,
    PolicyConfig,
    Run,
    RunConfig,
    Sampler,
    SamplerConfig,
    Sampling,
    Task,
    publish,
    rollouts,
)

FAKE = PolicyConfig(backend="fake", model="none")
TINY = NewModel(characters="act>", hidden_size=8, ffn_size=8, layers=1, heads=2, max_tokens=16)
TASK = Task(train=Batch.of(prompt=["cat>", "act>"], answer=["tac", "tca"]), held_out=Batch.of(prompt=[]))


async def _run(policy: PolicyConfig = FAKE, *, critic: bool = False, seed: int = 0) -> None:
    """One step on one prompt, with a checkpoint after it."""
    async with Run(RunConfig(checkpoint_every=1, resume=True, seed=seed)) as run:
        if critic:
            await run.spawn(Critic, CriticConfig(backend="fake", model="none"))
        actor = await run.spawn(Policy, policy)
        rows = TASK.batches(1, run.seed)
        async for _ in run.steps(1):
            batch = next(rows)
            metrics = await actor.update(await actor.encode(batch.assign(completion=batch["answer"])), CrossEntropy())
            await run.record(metrics)


async def _stream(steps: int, *, publishes: bool) -> None:
    async with Run(RunConfig(checkpoint_every=1, resume=True)) as run:
        policy = await run.spawn(Policy, FAKE)
        sampler = await run.spawn(Sampler, SamplerConfig(backend="fake", model="none"))
        if publishes:
            await publish(policy, sampler)
        async with rollouts(sampler, TASK.batches(1, run.seed), Sampling()) as stream:
            async for _ in run.steps(steps):
                await policy.update(await anext(stream), CrossEntropy())
                await publish(policy, stream)


async def checkpoint_of_another_model() -> None:
    await _run(PolicyConfig(model=TINY))
    await _run(PolicyConfig(model=TINY.model_copy(update={"hidden_size": 16})))


async def checkpoint_of_another_backend() -> None:
    await _run(PolicyConfig(model=TINY))
    await _run(PolicyConfig(model=TINY, backend="fsdp"))


async def checkpoint_of_other_prompts() -> None:
    await _run()
    await _run(seed=1)


async def actor_that_the_checkpoint_lacks() -> None:
    await _run()
    await _run(critic=True)


async def actor_that_is_not_spawned_again() -> None:
    await _run()
    async with Run(RunConfig(resume=True)) as run:
        async for _ in run.steps(2):
            pass


async def no_publishing_before_the_first_batch() -> None:
    await _stream(1, publishes=True)
    await _stream(2, publishes=False)


async def number_of_a_prompt_twice() -> None:
    def prompts() -> Iterator[Batch]:
        for _ in range(2):
            yield TASK.train.assign(groups=np.arange(2))

    async with Run(RunConfig(checkpoint_every=10)) as run:
        sampler = await run.spawn(Sampler, SamplerConfig(backend="fake", model="none"))
        policy = await run.spawn(Policy, FAKE)
        async with rollouts(sampler, prompts(), Sampling()) as stream:
            async for _ in stream:
                await publish(policy, stream)


async def checkpoint_that_cannot_be_read() -> None:
    await _run()
    Path("runs/run/checkpoints/step-000001/run.json").write_bytes(b"")
    await _run()
