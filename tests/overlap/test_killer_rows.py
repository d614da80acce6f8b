"""Rows that end what draws them, and replicas that are away when a stream begins or ends: what a user sees of them."""

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest
from structlog.testing import capture_logs

import meshrl as rl
from meshrl.errors import DataError, EngineDied, RankDied
from meshrl.run.train import is_machine_fault
from meshrl.testing import FakePolicy, FakeSampler, delayed, simulate
from tests.overlap.streams import POLICY, Beside, FragileEngine, prompts, spawned, trained

SLOW = delayed(FakeSampler, generate=1.0)


class Mortal(FakeSampler):
    killer = "5+1="

    async def generate(self, prompts: rl.Batch, sampling: rl.Sampling) -> AsyncIterator[rl.Batch]:
        if self.killer in prompts.objects("prompt"):
            raise EngineDied("an illegal memory access was encountered")
        async for rows in super().generate(prompts, sampling):
            yield rows


def sums(count: int) -> rl.Batch:
    return rl.Batch.of(
        prompt=[f"{n}+1=" for n in range(count)], answer=[str(n + 1) for n in range(count)], groups=np.arange(count)
    )


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_row_that_ends_every_replica_ends_the_stream_by_its_name(ahead: int) -> None:
    async def script() -> None:
        sampler = await spawned(delayed(Mortal, generate=1.0), FragileEngine(0), 3, min_ranks=1)
        await trained(sampler, [sums(8).select(range(4)), sums(8).select(range(4, 8))], ahead=ahead)

    died = r"5 died of it one after another \(numbers \d(, \d){4}\).*an illegal memory access was encountered"
    with capture_logs(), pytest.raises(DataError, match=rf"(?s)groups? .*\b5 \('5\+1='\).*{died}") as failure:
        simulate(script, time_limit=10_000)
    assert not is_machine_fault(failure.value), "a restart would meet the same row"


def test_a_row_that_ends_every_replica_ends_a_call_beside_the_stream() -> None:
    async def script() -> None:
        sampler = await spawned(delayed(Mortal, generate=1.0), FragileEngine(0), 2, min_ranks=1)
        await rl.publish(FakePolicy(POLICY), sampler)
        async with rl.rollouts(sampler, [sums(4)], rl.Sampling(n=2)) as stream:
            await anext(stream)
            await rl.rollout(sampler, sums(8), Beside(n=1))

    told = r"a call outside the stream, with 8 prompts, kills the sampler's replicas: 10 died of it one after another"
    with capture_logs(), pytest.raises(DataError, match=told):
        simulate(script, time_limit=10_000)


@pytest.mark.parametrize("min_ranks", [0, 1])
def test_what_is_drawn_after_a_stream_is_of_the_newest_weights(min_ranks: int) -> None:
    async def script() -> rl.Batch:
        engine = FragileEngine(0)
        sampler, policy = await spawned(SLOW, engine, 2, min_ranks), FakePolicy(POLICY)
        await rl.publish(policy, sampler)
        async with rl.rollouts(sampler, prompts(9, 4), rl.Sampling(n=2), ahead=2, retries=9) as stream:
            for _ in range(3):
                batch = await anext(stream)
                await policy.update(await batch.load(), rl.CrossEntropy())
                await rl.publish(policy, stream)
            engine.kill(0)
            engine.kill(1)
            await asyncio.sleep(0.1)
        return await (await rl.rollout(sampler, sums(4), rl.Sampling(n=1))).load()

    with capture_logs() as logged:
        assert set(simulate(script).row("oldest_version").tolist()) == {3}
    assert sum("is away" in line["event"] for line in logged) == 2 * min_ranks


def test_a_replica_that_comes_has_what_was_published_before_the_first_batch() -> None:
    async def script() -> rl.Batch:
        engine = FragileEngine(0, missing=1)
        sampler, policy = await spawned(delayed(FakeSampler, generate=50.0), engine, 2, 1), FakePolicy(POLICY)
        await rl.publish(policy, sampler)
        async with rl.rollouts(sampler, prompts(1, 4), rl.Sampling(n=1)) as stream:
            rows = sums(4).assign(completion=["?"] * 4)
            await policy.update(await policy.encode(rows), rl.CrossEntropy())
            await rl.publish(policy, sampler)
            asyncio.get_running_loop().call_later(20, engine.kill, 0)
            return await (await anext(stream)).load()

    with capture_logs():
        assert set(simulate(script).row("oldest_version").tolist()) == {1}


@pytest.mark.parametrize(("replicas", "min_ranks"), [(1, 0), (2, 2), (2, 1)])
def test_a_call_without_a_stream_needs_enough_replicas_that_live(replicas: int, min_ranks: int) -> None:
    async def script() -> rl.Batch:
        engine = FragileEngine(0)
        sampler = await spawned(SLOW, engine, replicas, min_ranks)
        engine.kill(0)
        return await rl.rollout(sampler, sums(4), rl.Sampling(n=1))

    with pytest.raises(RankDied) if replicas - 1 < max(1, min_ranks) else capture_logs():
        assert len(simulate(script)) == 4
