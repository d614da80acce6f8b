"""Streams keep their promises where replicas of the sampler die, at whatever moment, and come back."""

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from itertools import count
from random import Random
from typing import TypeVar, cast

import numpy as np
import pytest

import meshrl as rl
from meshrl.engines.local import LocalMember
from meshrl.mesh import Member, OnSpan, Rank, Request, Slot
from meshrl.testing import (
    FakePolicy,
    FakeReward,
    FakeSampler,
    Lognormal,
    Scenario,
    ScheduleFailed,
    Witness,
    delayed,
    explore,
)
from tests.rollout.test_streams_explored import POLICY, REWARD, SAMPLER, TellingSampler, prompts

T = TypeVar("T")


class FragileEngine(rl.LocalEngine):
    """Samplers on it die when they are told to, as processes do: all of their calls end, and they take no more."""

    def __init__(self, seed: int, *, missing: int = 0, inline_bytes: int = 65536) -> None:
        """`missing`: how many are not there at first. What is made again takes its time, drawn by the seed."""
        super().__init__(inline_bytes=inline_bytes)
        self.samplers: Sequence[LocalMember] = ()
        self.kill_at = -1
        """The number of the operation before which one dies; below 0 none."""
        self.operations = 0
        self._missing = missing
        self._random = Random(f"fragile {seed}")
        self._deaths: dict[int, asyncio.Future[None]] = {}

    def kill(self, number: int) -> None:
        """A sampler's process ends."""
        if not self._deaths[number].done():
            self._deaths[number].set_result(None)

    async def start(
        self,
        slots: Sequence[Slot],
        ranks: Sequence[Rank],
        create: type,
        arguments: tuple[object, ...],
        keywords: Mapping[str, object],
    ) -> Sequence[LocalMember]:
        members = await super().start(slots, ranks, create, arguments, keywords)
        if issubclass(create, FakeSampler):
            self.samplers = members
            self._deaths = {number: asyncio.get_running_loop().create_future() for number in range(len(members))}
            for member in members[len(members) - self._missing :]:
                member.is_made = False
                self.kill(member.rank.index)
        return members

    async def restart(self, members: Sequence[Member]) -> None:
        await asyncio.sleep(self._random.expovariate(0.3))
        await super().restart(members)
        for member in members:
            self._deaths[member.rank.index] = asyncio.get_running_loop().create_future()

    async def call(self, endpoint: str, requests: Sequence[Request], seen: OnSpan | None = None) -> list[object]:
        return await self._unless_dead(endpoint, requests, super().call(endpoint, requests, seen))

    async def stream(
        self, endpoint: str, requests: Sequence[Request], consumed: Sequence[int], seen: OnSpan | None = None
    ) -> AsyncGenerator[object]:
        values = super().stream(endpoint, requests, consumed, seen)
        try:
            while (value := await self._unless_dead(endpoint, requests, anext(values, None))) is not None:
                yield value
        finally:
            await values.aclose()

    async def _unless_dead(self, endpoint: str, requests: Sequence[Request], work: Awaitable[T]) -> T:
        ours = [cast("LocalMember", each.member) for each in requests if each.member in self.samplers]
        if ours:
            if self.operations == self.kill_at:
                self.kill(ours[0].rank.index)
            self.operations += 1
        deaths = {self._deaths[member.rank.index]: member for member in ours}
        task = asyncio.ensure_future(work)
        try:
            ends: list[asyncio.Future[T] | asyncio.Future[None]] = [task, *deaths]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for death, member in deaths.items():
                if death.done():
                    raise rl.RankDied("FakeSampler", member.rank.index, member.rank.axes, endpoint, 7, "here", "killed")
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


class World:
    """A policy, replicas of a sampler that may die, and a stream, all drawn by a seed."""

    def __init__(
        self, seed: int, *, min_ranks: int, missing: int = 0, sampler: type[FakeSampler] = TellingSampler
    ) -> None:
        self.sampler = sampler
        self.random = random = Random(seed)
        self.seed, self.min_ranks = seed, min_ranks
        self.replicas = random.randint(2, 4)
        self.ahead = random.randrange(4)
        self.n = random.randint(1, 3)
        self.may_die = False
        self.size = random.randint(1, 4)
        self.engine = FragileEngine(
            seed, missing=min(missing, self.replicas - 1), inline_bytes=random.choice([0, 65536])
        )

    async def run(self, steps: int) -> None:
        """Train to the last prompt; each is trained once, under the bound."""
        random, seed, short = self.random, self.seed, Lognormal(0.1, 1)
        witness = Witness(delayed(FakePolicy, seed=seed, update=Lognormal(1, 0.5), weights=short)(POLICY))
        role = delayed(self.sampler, seed=seed, generate=Lognormal(0.3, 1), load=short)
        mesh = await rl.Mesh.reserve(self.engine, self.replicas, rl.Resources(cpus=0, min_ranks=self.min_ranks))
        sampler = await mesh.spawn(role, SAMPLER)
        judges = await rl.Mesh.reserve(self.engine, 1, rl.Resources(cpus=0))
        reward = await judges.spawn(delayed(FakeReward, seed=seed, score=short), REWARD)
        await rl.publish(witness, sampler)
        stream = rl.rollouts(
            sampler,
            witness.prompts(prompts(steps, self.size)),
            rl.Sampling(n=self.n),
            ahead=self.ahead,
            score=reward.score,
            late="wait",
            swap=random.choice(["in_flight", "drain", "abort"]),
            retries=0 if self.min_ranks else 1000,
        )
        async with stream:
            self.may_die = bool(self.min_ranks)  # else nobody knows the first weights, if all die
            async for batch in stream:
                told = await batch.load()
                assert np.all(np.less_equal(told.row("oldest_version"), told.row("sampled_by")))
                await witness.update(told, rl.CrossEntropy())
                await rl.publish(witness, stream)
                self.may_die = True
                if random.random() < 0.3:  # beside the stream, as an evaluation
                    assert len(await rl.rollout(sampler, next(prompts(1, 3)), Beside(n=2))) == 6
        assert not stream.dropped.get("stale")
        witness.check(ahead=self.ahead, n=self.n, dropped=0)


class Beside(rl.Sampling):
    """Of a call that is none of training's."""

    beside = True


async def one_death(seed: int) -> None:
    """One of the replicas dies before some operation: a call on it, or a value of a stream."""
    world = World(seed % 7, min_ranks=1)
    world.engine.kill_at = 37 * seed % 400  # each number once in 400 seeds, and any few of them well spread
    await world.run(steps=3)


async def deaths(seed: int, sampler: type[FakeSampler] = TellingSampler) -> None:
    """Any of them die, now and then, also several at once, or while they are made again; some come late."""
    random = Random(f"deaths {seed}")
    min_ranks, missing = random.randint(0, 2), random.randint(0, 2)
    # Without `min_ranks` a mesh begins with all ranks, and weights are not kept for all.
    world = World(seed, min_ranks=min_ranks, missing=missing if min_ranks else 0, sampler=sampler)
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
        (one_death, 0, 150),
        (deaths, 0, 60),
        *(pytest.param(each, 150, 400, marks=pytest.mark.wide) for each in (one_death, deaths)),
    ],
)
def test_each_prompt_is_trained_once_whenever_a_replica_dies(scenario: Scenario, first: int, seeds: int) -> None:
    explore(scenario, seeds=seeds, first=first, time_limit=100_000)


async def joins_with_old_weights(seed: int) -> None:
    """What is made again does not take the weights that the others have."""
    lives = count()

    class Deaf(TellingSampler):
        def __init__(self, config: rl.SamplerConfig) -> None:
            super().__init__(config)
            self.deaf = next(lives) > 4

        async def load(self, weights: rl.Weights) -> rl.Batch:
            if self.deaf:
                self.deaf = False
                return await super().load(self.weights)
            return await super().load(weights)

    await deaths(seed, Deaf)


def test_the_explorer_finds_a_replica_of_old_weights() -> None:
    with pytest.raises(ScheduleFailed) as failure:
        explore(joins_with_old_weights, seeds=200, time_limit=100_000)
    assert re.search("weights of version 0|stale", repr(failure.value.__cause__))
