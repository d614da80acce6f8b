"""Mistakes in going on from a checkpoint. Each goes on, in another way, with a run that was begun well."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

import meshrl as rl

FAKE = rl.PolicyConfig(backend="fake", model="none")
TINY = rl.NewModel(characters="act>", hidden_size=8, ffn_size=8, layers=1, heads=2, max_tokens=16)
TASK = rl.Task(train=rl.Batch.of(prompt=["cat>", "act>"], answer=["tac", "tca"]), held_out=rl.Batch.of(prompt=[]))


async def _run(policy: rl.PolicyConfig = FAKE, *, critic: bool = False, seed: int = 0) -> None:
    """One step on one prompt, with a checkpoint after it."""
    async with rl.Run(rl.RunConfig(checkpoint_every=1, resume=True, seed=seed)) as run:
        if critic:
            await run.spawn(rl.Critic, rl.CriticConfig(backend="fake", model="none"))
        actor = await run.spawn(rl.Policy, policy)
        rows = TASK.batches(1, run.seed)
        async for _ in run.steps(1):
            batch = next(rows)
            metrics = await actor.update(
                await actor.encode(batch.assign(completion=batch["answer"])), rl.CrossEntropy()
            )
            await run.record(metrics)


async def _stream(steps: int, *, publishes: bool) -> None:
    async with rl.Run(rl.RunConfig(checkpoint_every=1, resume=True)) as run:
        policy = await run.spawn(rl.Policy, FAKE)
        sampler = await run.spawn(rl.Sampler, rl.SamplerConfig(backend="fake", model="none"))
        if publishes:
            await rl.publish(policy, sampler)
        async with rl.rollouts(sampler, TASK.batches(1, run.seed), rl.Sampling()) as stream:
            async for _ in run.steps(steps):
                await policy.update(await anext(stream), rl.CrossEntropy())
                await rl.publish(policy, stream)


async def _again(
    policy: rl.PolicyConfig = FAKE, then: rl.PolicyConfig = FAKE, *, critic: bool = False, seed: int = 0
) -> None:
    await _run(policy)
    await _run(then, critic=critic, seed=seed)


async def actor_that_is_not_spawned_again() -> None:
    await _run()
    async with rl.Run(rl.RunConfig(resume=True)) as run:
        async for _ in run.steps(2):
            pass


async def no_publishing_before_the_first_batch() -> None:
    await _stream(1, publishes=True)
    await _stream(2, publishes=False)


async def number_of_a_prompt_twice() -> None:
    def prompts() -> Iterator[rl.Batch]:
        for _ in range(2):
            yield TASK.train.assign(groups=np.arange(2))

    async with rl.Run(rl.RunConfig(checkpoint_every=10)) as run:
        sampler = await run.spawn(rl.Sampler, rl.SamplerConfig(backend="fake", model="none"))
        policy = await run.spawn(rl.Policy, FAKE)
        async with rl.rollouts(sampler, prompts(), rl.Sampling()) as stream:
            async for _ in stream:
                await rl.publish(policy, stream)


async def checkpoint_that_cannot_be_read() -> None:
    await _run()
    Path("runs/run/checkpoints/step-000001/run.json").write_bytes(b"")
    await _run()


MISTAKES: dict[str, Callable[[], object]] = {
    "checkpoint-of-another-model": lambda: _again(
        rl.PolicyConfig(model=TINY), rl.PolicyConfig(model=TINY.model_copy(update={"hidden_size": 16}))
    ),
    "checkpoint-of-another-backend": lambda: _again(
        rl.PolicyConfig(model=TINY), rl.PolicyConfig(model=TINY, backend="fsdp")
    ),
    "checkpoint-of-other-prompts": lambda: _again(seed=1),
    "actor-that-the-checkpoint-lacks": lambda: _again(critic=True),
}
