"""What tests of streams share: prompts, a loop that trains, and an engine on which samplers die."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random
from typing import Any, TypeVar, cast

import numpy as np

import meshrl as rl
from meshrl.engines.local import LocalMember
from meshrl.errors import RankDied
from meshrl.mesh import Member, OnSpan, Rank, Request, Slot
from meshrl.overlap import Rollouts, Schedule, read_schedule, schedule
from meshrl.overlap.stream_state import SwapMode
from meshrl.testing import FakePolicy, FakeSampler, Lognormal, Witness, delayed

T = TypeVar("T")
POLICY, SAMPLER, REWARD = rl.PolicyConfig(model="none"), rl.SamplerConfig(model="none"), rl.RewardConfig()


def prompts(batches: int, size: int) -> Iterator[rl.Batch]:
    for first in range(0, batches * size, size):
        yield rl.Batch.of(prompt=["?"] * size, answer=["ab"] * size, groups=np.arange(first, first + size))


async def spawned(
    role: Callable[[rl.SamplerConfig], FakeSampler], engine: rl.LocalEngine, replicas: int, min_ranks: int = 0
) -> FakeSampler:
    mesh = await rl.Mesh.reserve(engine, replicas, rl.Resources(cpus=0, min_ranks=min_ranks))
    return await mesh.spawn(role, SAMPLER)


async def train(stream: Rollouts, policy: FakePolicy, then: Callable[[int], object] = lambda _: None) -> list[rl.Batch]:
    batches: list[rl.Batch] = []
    async for batch in stream:
        batches.append(await batch.load())
        await policy.update(batches[-1], rl.CrossEntropy())
        await rl.publish(policy, stream)
        then(len(batches))
    return batches


async def trained(
    sampler: rl.Sampler,
    drawn: Iterator[rl.Batch] | Sequence[rl.Batch],
    policy: FakePolicy | None = None,
    *,
    n: int = 2,
    then: Callable[[int], object] = lambda _: None,
    **chosen: Any,
) -> list[rl.Batch]:
    policy = policy or FakePolicy(POLICY)
    await rl.publish(policy, sampler)
    async with rl.rollouts(sampler, drawn, rl.Sampling(n=n), **chosen) as stream:
        return await train(stream, policy, then)


@contextmanager
def noted(runs: Path, name: str, replayed: str | None = None) -> Generator[None]:
    (runs / name).mkdir()
    followed = read_schedule(runs / replayed) if replayed else None
    with closing(Schedule(runs / name / "schedule.jsonl", followed)) as kept:
        before = schedule.set(kept)
        try:
            yield
        finally:
            schedule.reset(before)


def labels(batches: Sequence[rl.Batch]) -> set[int]:
    return {label for batch in batches for label in batch.groups.tolist()}


class Beside(rl.Sampling):
    beside = True


class TellingSampler(FakeSampler):
    """Says of each row which weights there were when it was sampled, besides what it claims."""

    async def generate(self, prompts: rl.Batch, sampling: rl.Sampling) -> AsyncIterator[rl.Batch]:
        async for chunk in super().generate(prompts, sampling):
            yield chunk.assign(sampled_by=np.full(len(chunk), self.weights.version))


SHORT = Lognormal(0.1, 1)
SWAPS: Sequence[SwapMode] = ("in_flight", "drain", "abort")


class World:
    def __init__(self, seed: int) -> None:
        self.seed, self.random = seed, Random(seed)
        self.ahead, self.n, self.size = self.random.randrange(5), self.random.randint(1, 3), self.random.randint(1, 4)
        self.swap: SwapMode = self.random.choice(SWAPS)
        self.parts = Random(f"parts {seed}").choice([1, 1, 2, 4])
        times = {"update": Lognormal(1, 0.5), "forward_backward": Lognormal(0.3, 1), "step": SHORT}
        self.policy = delayed(FakePolicy, seed=seed, weights=SHORT, **times)

    def slow(self, sampler: type[FakeSampler]) -> type[FakeSampler]:
        return delayed(sampler, seed=self.seed, generate=Lognormal(0.3, 1), load=SHORT)

    async def train(self, witness: Witness, stream: Rollouts, then: Callable[[], Awaitable[object]]) -> None:
        async with stream:
            while self.parts > 1:
                count = 0
                async for part in stream.parts(self.parts):
                    count += 1
                    await witness.forward_backward(await self.seen(part), rl.CrossEntropy())
                if not count:
                    return
                assert count <= self.parts
                await witness.step()
                await then()
            async for batch in stream:
                await witness.update(await self.seen(batch), rl.CrossEntropy())
                await then()

    async def seen(self, batch: rl.Batch) -> rl.Batch:
        told = await batch.load()
        assert np.all(np.less_equal(told.row("oldest_version"), told.row("sampled_by")))
        assert np.all(np.less_equal(told.row("staleness"), self.ahead))
        return told


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
                member.has_started = False
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
                    raise RankDied("FakeSampler", member.rank.index, member.rank.axes, endpoint, 7, "here", "killed")
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
