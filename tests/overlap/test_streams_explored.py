"""The stream of rollouts keeps its promises under many schedules."""

import asyncio
from collections.abc import Callable
from random import Random
from typing import TypeVar

import numpy as np
import pytest
from numpy.typing import NDArray

import meshrl as rl
from meshrl.errors import RankFailed
from meshrl.roles import RoleConfig
from meshrl.testing import Crash, FakeReward, Scenario, Witness, crashing, delayed, explore
from tests.overlap.streams import (
    POLICY,
    REWARD,
    SAMPLER,
    SHORT,
    Beside,
    FragileEngine,
    TellingSampler,
    World,
    prompts,
    spawned,
)

R = TypeVar("R", bound=rl.Actor)
C = TypeVar("C", bound=RoleConfig)


async def anything(seed: int) -> None:
    """A crash of a role may end it before the last prompt; what was trained until then is right all the same."""
    world = World(seed)
    random = world.random
    mortal, on_meshes, overlapping = (random.random() < chance for chance in (0.5, 0.5, 0.3))
    generate, score = (0.03, random.choice([0.0, 0.01])) if mortal else (0.0, 0.0)
    keeps = random.choice([1.0, 0.7])

    async def place(role: Callable[[C], R], config: C, most: int) -> R:
        if not on_meshes:
            return role(config)
        mesh = await rl.Mesh.reserve(rl.LocalEngine(), random.randint(1, most), rl.Resources(cpus=0))
        return await mesh.spawn(role, config)

    def keep(batch: rl.Batch) -> NDArray[np.bool_]:
        kept = {group: random.random() < keeps for group in sorted(set(batch.groups.tolist()))}
        return np.array([kept[group] for group in batch.groups.tolist()])

    witness = Witness(await place(world.policy, POLICY, 1))
    sampler = await place(world.slow(crashing(TellingSampler, seed=seed, generate=generate)), SAMPLER, 2)
    judge = delayed(crashing(FakeReward, seed=seed, score=score), seed=seed, score=SHORT)
    stream = rl.rollouts(
        sampler,
        witness.prompts(prompts(random.randint(1, 6), world.size)),
        rl.Sampling(n=world.n),
        ahead=world.ahead,
        score=(await place(judge, REWARD, 2)).score,
        keep=keep,
        late=random.choice(["wait", "drop"]),
        swap=world.swap,
        retries=random.choice([0, 3]),
    )
    dropped: int | None = None
    try:
        await rl.publish(witness, stream)
        async with asyncio.TaskGroup() as tasks:

            async def publish() -> None:
                publication = tasks.create_task(rl.publish(witness, stream))
                if not overlapping:
                    await publication

            await world.train(witness, stream, publish)
        dropped = sum(stream.dropped.values())
    except* (Crash, RankFailed):
        if not mortal:
            raise
    witness.check(ahead=world.ahead, n=world.n, dropped=dropped)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "seeds"), [(0, 28), pytest.param(28, 1272, marks=pytest.mark.wide)])
def test_the_stream_keeps_its_promises_under_any_schedule(first: int, seeds: int) -> None:
    explore(anything, seeds=seeds, first=first)


class Replicas(World):
    def __init__(self, seed: int, *, min_ranks: int, missing: int = 0) -> None:
        super().__init__(seed)
        self.min_ranks, self.role, self.may_die = min_ranks, self.slow(TellingSampler), False
        self.replicas = self.random.randint(2, 4)
        self.lives = 4  # between two publications: five deaths of one row are no accident
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
            self.may_die, self.lives = True, 4
            if self.random.random() < 0.3:  # beside the stream, as an evaluation
                assert len(await rl.rollout(sampler, next(prompts(1, 3)), Beside(n=2))) == 6

        self.may_die = bool(self.min_ranks)  # else nobody knows the first weights, if all die
        await self.train(witness, stream, then)
        assert not stream.dropped.get("stale")
        witness.check(ahead=self.ahead, n=self.n, dropped=0)


async def one_death(seed: int) -> None:
    world = Replicas(seed % 7, min_ranks=1)
    world.engine.kill_at = 37 * seed % 400  # each number once in 400 seeds, and any few of them well spread
    await world.run(steps=3)


async def deaths(seed: int) -> None:
    random = Random(f"deaths {seed}")
    min_ranks, missing = random.randint(0, 2), random.randint(0, 2)
    # Without `min_ranks` a mesh begins with all ranks, and weights are not kept for all.
    world = Replicas(seed, min_ranks=min_ranks, missing=missing if min_ranks else 0)
    running = asyncio.ensure_future(world.run(steps=5))
    while not running.done():
        await asyncio.wait([running], timeout=random.expovariate(0.3))
        for number in range(world.replicas):
            if world.may_die and random.random() < 0.4 and world.lives:
                world.lives -= 1
                world.engine.kill(number)
    await running


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "first", "seeds"),
    [
        (one_death, 0, 30),
        (deaths, 0, 9),
        pytest.param(one_death, 30, 370, marks=pytest.mark.wide),
        pytest.param(deaths, 9, 415, marks=pytest.mark.wide),
    ],
)
def test_each_prompt_is_trained_once_whenever_a_replica_dies(scenario: Scenario, first: int, seeds: int) -> None:
    explore(scenario, seeds=seeds, first=first, time_limit=100_000)
