"""Streams keep their promises where replicas of the sampler die, at whatever moment, and come back."""

import asyncio
import re
from itertools import count
from random import Random

import pytest

import meshrl as rl
from meshrl.testing import FakeReward, FakeSampler, Scenario, ScheduleFailed, Witness, delayed, explore
from tests.overlap.streams import POLICY, REWARD, SHORT, Beside, FragileEngine, TellingSampler, World, prompts, spawned


class Replicas(World):
    def __init__(
        self, seed: int, *, min_ranks: int, missing: int = 0, sampler: type[FakeSampler] = TellingSampler
    ) -> None:
        super().__init__(seed)
        self.min_ranks, self.role, self.may_die = min_ranks, self.slow(sampler), False
        self.replicas = self.random.randint(2, 4)
        inline_bytes = self.random.choice([0, 65536])
        self.engine = FragileEngine(seed, missing=min(missing, self.replicas - 1), inline_bytes=inline_bytes)

    async def run(self, steps: int) -> None:
        witness = Witness(self.policy(POLICY))
        sampler = await spawned(self.role, self.engine, self.replicas, self.min_ranks)
        judges = await rl.Mesh.reserve(self.engine, 1, rl.Resources(cpus=0))
        reward = await judges.spawn(delayed(FakeReward, seed=self.seed, score=SHORT), REWARD)
        await rl.publish(witness, sampler)
        stream = rl.rollouts(
            sampler,
            witness.prompts(prompts(steps, self.size)),
            rl.Sampling(n=self.n),
            ahead=self.ahead,
            score=reward.score,
            swap=self.swap,
            retries=0 if self.min_ranks else 1000,
        )

        async def then() -> None:
            await rl.publish(witness, stream)
            self.may_die = True
            if self.random.random() < 0.3:  # beside the stream, as an evaluation
                assert len(await rl.rollout(sampler, next(prompts(1, 3)), Beside(n=2))) == 6

        self.may_die = bool(self.min_ranks)  # else nobody knows the first weights, if all die
        await self.train(witness, stream, then)
        assert not stream.dropped.get("stale")
        witness.check(ahead=self.ahead, n=self.n, dropped=0)


async def one_death(seed: int) -> None:
    """One of the replicas dies before some operation: a call on it, or a value of a stream."""
    world = Replicas(seed % 7, min_ranks=1)
    world.engine.kill_at = 37 * seed % 400  # each number once in 400 seeds, and any few of them well spread
    await world.run(steps=3)


async def deaths(seed: int, sampler: type[FakeSampler] = TellingSampler) -> None:
    """Any of them die, now and then, also several at once, or while they are made again; some come late."""
    random = Random(f"deaths {seed}")
    min_ranks, missing = random.randint(0, 2), random.randint(0, 2)
    # Without `min_ranks` a mesh begins with all ranks, and weights are not kept for all.
    world = Replicas(seed, min_ranks=min_ranks, missing=missing if min_ranks else 0, sampler=sampler)
    running = asyncio.ensure_future(world.run(steps=5))
    while not running.done():
        await asyncio.wait([running], timeout=random.expovariate(0.3))
        for number in range(world.replicas):
            if world.may_die and random.random() < 0.4:
                world.engine.kill(number)
    await running


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "first", "seeds"),
    [
        (one_death, 0, 42),
        (deaths, 0, 24),
        pytest.param(one_death, 42, 358, marks=pytest.mark.wide),
        pytest.param(deaths, 24, 400, marks=pytest.mark.wide),
    ],
)
def test_each_prompt_is_trained_once_whenever_a_replica_dies(scenario: Scenario, first: int, seeds: int) -> None:
    explore(scenario, seeds=seeds, first=first, time_limit=100_000)


async def joins_with_old_weights(seed: int) -> None:
    lives = count()

    class Deaf(TellingSampler):
        def __init__(self, config: rl.SamplerConfig) -> None:
            super().__init__(config)
            self.deaf = next(lives) > 4

        async def load(self, weights: rl.Weights) -> rl.Batch:
            now, self.deaf = self.weights if self.deaf else weights, False
            return await super().load(now)

    await deaths(seed, Deaf)


def test_the_explorer_finds_a_replica_of_old_weights() -> None:
    with pytest.raises(ScheduleFailed) as failure:
        explore(joins_with_old_weights, seeds=200, time_limit=100_000)
    assert re.search("weights of version 0|stale", repr(failure.value.__cause__))
