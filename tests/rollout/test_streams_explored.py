"""The stream of rollouts keeps its promises under many schedules, and the explorer finds what breaks them."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from random import Random
from typing import TypeVar

import numpy as np
import pytest
from numpy.typing import NDArray

import meshrl as rl
from meshrl.mesh import OnSpan, Request
from meshrl.rollout import Rollouts
from meshrl.testing import (
    Crash,
    FakePolicy,
    FakeReward,
    FakeSampler,
    Lognormal,
    Scenario,
    ScheduleFailed,
    Witness,
    crashing,
    delayed,
    explore,
)

R = TypeVar("R", bound=rl.Actor)
C = TypeVar("C", bound=rl.RoleConfig)
_CLAIM = "tokens claim weights that came after they were sampled"
POLICY, SAMPLER, REWARD = rl.PolicyConfig(model="none"), rl.SamplerConfig(model="none"), rl.RewardConfig()


def prompts(batches: int, size: int) -> Iterator[rl.Batch]:
    for first in range(0, batches * size, size):
        yield rl.Batch.of(prompt=["?"] * size, answer=["ab"] * size, groups=np.arange(first, first + size))


async def small(seed: int) -> None:
    """Four steps of two prompts, with any bound."""
    random = Random(seed)
    ahead = random.randrange(5)
    policy = delayed(FakePolicy, seed=seed, update=Lognormal(1, 0.5))(POLICY)
    sampler = delayed(FakeSampler, seed=seed, generate=Lognormal(0.25, 1))(SAMPLER)
    reward = delayed(FakeReward, seed=seed, score=Lognormal(0.1, 1))(REWARD)
    witness = Witness(policy)
    await rl.publish(witness, sampler)
    drawn = witness.prompts(prompts(4, 2))
    async with rl.rollouts(sampler, drawn, rl.Sampling(), ahead=ahead, score=reward.score) as stream:
        async for batch in stream:
            await witness.update(batch, rl.CrossEntropy())
            await rl.publish(witness, stream)
    witness.check(ahead=ahead, n=1)


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


class DeadlyEngine(MortalEngine):
    """Also a crash while weights are loaded, or calls aborted, is a death."""

    async def call(self, endpoint: str, requests: Sequence[Request], seen: OnSpan | None = None) -> list[object]:
        try:
            return await super().call(endpoint, requests, seen)
        except rl.RankFailed as error:
            if isinstance(error.__cause__, Crash) and endpoint in ("load", "abort"):
                raise rl.RankDied(error.actor, error.rank, error.axes, endpoint, 7, "here", "crashed") from error
            raise


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
        self.ahead = self.allowed = random.randrange(5)
        self.n = random.randint(1, 2)
        self.size = random.randint(1, 3)
        self.keeps = random.choice([1.0, 0.7])
        self.tells = True
        """Whether the witness hears of dropped groups."""
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
        witness.check(ahead=self.allowed, n=self.n, dropped=dropped and dropped * self.tells)

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


async def deaths(seed: int) -> None:
    """Samplers that die in whatever they do, also while calls are aborted or weights are on their way."""
    world = World(seed)
    world.mortal = world.on_meshes = True
    world.sampler = crashing(TellingSampler, seed=seed, generate=0.05, load=0.05, abort=0.05)
    world.engine = DeadlyEngine(inline_bytes=world.random.choice([0, 65536]))
    await world.run()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "first", "seeds"),
    [
        (small, 0, 300),
        (anything, 0, 100),
        (deaths, 0, 40),
        *(pytest.param(each, 300, 1000, marks=pytest.mark.wide) for each in (small, anything, deaths)),
    ],
)
def test_the_stream_keeps_its_promises_under_any_schedule(scenario: Scenario, first: int, seeds: int) -> None:
    explore(scenario, seeds=seeds, first=first)


class SwapsWithinAStep(TellingSampler):
    """A forward pass that pauses in the middle: new weights come meanwhile, and the row says that it is theirs."""

    async def generate(self, prompts: rl.Batch, sampling: rl.Sampling) -> AsyncIterator[rl.Batch]:
        async for chunk in super().generate(prompts, sampling):
            await asyncio.sleep(0.05)
            yield chunk.assign(oldest_version=np.full(len(chunk), self.weights.version, np.int32))


async def bound_is_one_less(seed: int) -> None:
    world = World(seed)
    world.allowed = max(world.ahead - 1, 0)
    await world.run()


async def drops_are_not_told(seed: int) -> None:
    world = World(seed)
    world.tells = False
    await world.run()


async def swaps_within_a_step(seed: int) -> None:
    await World(seed, SwapsWithinAStep).run()


@pytest.mark.parametrize(
    ("scenario", "told"),
    [
        (bound_is_one_less, "publications behind"),
        (drops_are_not_told, "were never trained"),
        (swaps_within_a_step, _CLAIM),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_explorer_finds_a_broken_promise(scenario: Scenario, told: str) -> None:
    with pytest.raises(ScheduleFailed) as failure:
        explore(scenario, seeds=300)
    cause: BaseException | None = failure.value.__cause__
    while isinstance(cause, ExceptionGroup):
        cause = cause.exceptions[0]
    assert told in str(cause)
