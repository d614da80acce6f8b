"""The stream of rollouts keeps its promises under many schedules, and the explorer finds what breaks them."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from random import Random
from typing import TypeVar

import numpy as np
import pytest
from numpy.typing import NDArray

import meshrl as rl
from meshrl.mesh import OnSpan, Request
from meshrl.overlap import Rollouts
from meshrl.testing import (
    Crash,
    FakePolicy,
    FakeReward,
    FakeSampler,
    Lognormal,
    ScheduleFailed,
    Witness,
    crashing,
    delayed,
    explore,
)
from tests.overlap.streams import POLICY, REWARD, SAMPLER, prompts

R = TypeVar("R", bound=rl.Actor)
C = TypeVar("C", bound=rl.RoleConfig)
_CLAIM = "tokens claim weights that came after they were sampled"


class MortalEngine(rl.LocalEngine):
    """Where an actor crashes its process dies, as far as its callers see."""

    async def stream(
        self, endpoint: str, requests: Sequence[Request], consumed: Sequence[int], seen: OnSpan | None = None
    ) -> AsyncGenerator[object]:
        values = super().stream(endpoint, requests, consumed, seen)
        try:
            async for value in values:
                yield value
        except rl.RankFailed as error:
            if isinstance(error.__cause__, Crash):
                raise rl.RankDied(error.actor, error.rank, error.axes, endpoint, 7, "here", "crashed") from error
            raise
        finally:
            await values.aclose()


class TellingSampler(FakeSampler):
    """Says of each row which weights there were when it was sampled, besides what it claims."""

    async def generate(self, prompts: rl.Batch, sampling: rl.Sampling) -> AsyncIterator[rl.Batch]:
        async for chunk in super().generate(prompts, sampling):
            yield chunk.assign(sampled_by=np.full(len(chunk), self.weights.version))


class World:
    """Roles with latencies and crashes, and a stream, all drawn by a seed."""

    def __init__(self, seed: int, sampler: type[FakeSampler] = TellingSampler) -> None:
        self.random = random = Random(seed)
        self.seed = seed
        self.ahead = random.randrange(5)
        self.n = random.randint(1, 2)
        self.size = random.randint(1, 3)
        self.keeps = random.choice([1.0, 0.7])
        self.mortal = random.random() < 0.5
        self.on_meshes = random.random() < 0.5
        generate, score = (0.03, random.choice([0.0, 0.01])) if self.mortal else (0.0, 0.0)
        self.sampler = crashing(sampler, seed=seed, generate=generate)
        self.reward = crashing(FakeReward, seed=seed, score=score)
        self.engine = MortalEngine() if random.random() < 0.5 else rl.LocalEngine()

    async def place(self, role: Callable[[C], R], config: C, most: int) -> R:
        if not self.on_meshes:
            return role(config)
        mesh = await rl.Mesh.reserve(self.engine, self.random.randint(1, most), rl.Resources(cpus=0))
        return await mesh.spawn(role, config)

    def keep(self, batch: rl.Batch) -> NDArray[np.bool_]:
        groups = batch.groups.tolist()
        kept = {group: self.random.random() < self.keeps for group in sorted(set(groups))}
        return np.array([kept[group] for group in groups])

    async def run(self) -> None:
        """Train to the last prompt. A crash may end it before; what was trained until then is right all the same."""
        random, seed, short = self.random, self.seed, Lognormal(0.1, 1)
        policy = delayed(FakePolicy, seed=seed, update=Lognormal(1, 0.5), weights=short)
        witness = Witness(await self.place(policy, POLICY, 1))
        slow_sampler = delayed(self.sampler, seed=seed, generate=Lognormal(0.3, 1), load=short)
        sampler = await self.place(slow_sampler, SAMPLER, 2)
        reward = await self.place(delayed(self.reward, seed=seed, score=short), REWARD, 2)
        stream = rl.rollouts(
            sampler,
            witness.prompts(prompts(random.randint(1, 6), self.size)),
            rl.Sampling(n=self.n),
            ahead=self.ahead,
            score=reward.score,
            keep=self.keep,
            late=random.choice(["wait", "drop"]),
            swap=random.choice(["in_flight", "drain", "abort"]),
            retries=random.choice([0, 3]),
        )
        dropped: int | None = None
        try:
            await self.train(witness, stream)
            dropped = sum(stream.dropped.values())
        except* (Crash, rl.RankFailed, rl.RankDied):
            if not self.mortal:
                raise
        witness.check(ahead=self.ahead, n=self.n, dropped=dropped)

    async def train(self, witness: Witness, stream: Rollouts) -> None:
        overlapping = self.random.random() < 0.3
        await rl.publish(witness, stream)
        async with stream, asyncio.TaskGroup() as tasks:
            async for batch in stream:
                told = await batch.load("sampled_by")
                assert np.all(np.less_equal(told.row("oldest_version"), told.row("sampled_by"))), _CLAIM
                await witness.update(batch, rl.CrossEntropy())
                if overlapping:
                    tasks.create_task(rl.publish(witness, stream))
                else:
                    await rl.publish(witness, stream)


async def anything(seed: int) -> None:
    await World(seed).run()


@pytest.mark.slow
@pytest.mark.parametrize(("first", "seeds"), [(0, 100), pytest.param(100, 1200, marks=pytest.mark.wide)])
def test_the_stream_keeps_its_promises_under_any_schedule(first: int, seeds: int) -> None:
    explore(anything, seeds=seeds, first=first)


class SwapsWithinAStep(TellingSampler):
    """A forward pass that pauses in the middle: new weights come meanwhile, and the row says that it is theirs."""

    async def generate(self, prompts: rl.Batch, sampling: rl.Sampling) -> AsyncIterator[rl.Batch]:
        async for chunk in super().generate(prompts, sampling):
            await asyncio.sleep(0.05)
            yield chunk.assign(oldest_version=np.full(len(chunk), self.weights.version, np.int32))


async def swaps_within_a_step(seed: int) -> None:
    await World(seed, SwapsWithinAStep).run()


def test_the_explorer_finds_a_broken_promise() -> None:
    with pytest.raises(ScheduleFailed) as failure:
        explore(swaps_within_a_step, seeds=300)
    cause: BaseException | None = failure.value.__cause__
    while isinstance(cause, ExceptionGroup):
        cause = cause.exceptions[0]
    assert _CLAIM in str(cause)
