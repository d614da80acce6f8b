"""Rollouts that run while the policy trains, on fakes in virtual time: see what `ahead` saves before you have a GPU.

    python examples/overlap.py

A batch takes about 10 seconds to sample, some more and some less, and 10 to train. The loop is that of a real run.
Virtual time jumps from one event to the next, so nothing waits.
"""

import asyncio
from functools import partial

import numpy as np

from meshrl import Batch, CrossEntropy, PolicyConfig, RewardConfig, SamplerConfig, Sampling, publish, rollouts
from meshrl.testing import FakePolicy, FakeReward, FakeSampler, Lognormal, delayed, simulate

BATCHES, PROMPTS = 20, 8


async def seconds(ahead: int) -> float:
    """Measure how long a run takes if its rows may be `ahead` publications behind."""
    slow_policy = delayed(FakePolicy, seed=0, update=Lognormal(mean=10, sigma=0.1))
    slow_sampler = delayed(FakeSampler, seed=0, generate=Lognormal(mean=2.5, sigma=0.8), load=0.5)
    policy, sampler = slow_policy(PolicyConfig(model="none")), slow_sampler(SamplerConfig(model="none"))
    reward = FakeReward(RewardConfig())
    groups = np.arange(BATCHES * PROMPTS).reshape(BATCHES, PROMPTS)
    prompts = (Batch.of(prompt=["1+1="] * PROMPTS, answer=["2"] * PROMPTS, groups=each) for each in groups)

    await publish(policy, sampler)
    async with rollouts(sampler, prompts, Sampling(n=2), ahead=ahead, score=reward.score) as stream:
        async for batch in stream:
            await policy.update(batch, CrossEntropy())
            await publish(policy, stream)
    return asyncio.get_running_loop().time()


if __name__ == "__main__":
    for bound in (0, 1, 2):
        print(f"ahead={bound}: {simulate(partial(seconds, bound)):.0f} seconds for {BATCHES} steps")
