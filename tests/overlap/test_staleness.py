import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from random import Random
from typing import Literal

import pytest
from structlog.testing import capture_logs

from meshrl import Batch, CrossEntropy, Sampling, Weights, publish, rollouts
from meshrl.errors import DataError
from meshrl.testing import Crash, FakePolicy, FakeSampler, Latency, crashing, delayed, simulate
from tests.overlap.streams import POLICY, SAMPLER, labels, prompts, train


@dataclass
class FirstIsSlow(Latency):
    def draw(self, random: Random, batch: Batch | None) -> float:
        return 10.0 if batch is not None and 0 in batch.groups else 0.1


def test_a_group_that_would_be_too_old_for_the_next_batch_is_waited_for_or_dropped() -> None:
    async def script(late: Literal["wait", "drop"]) -> tuple[list[Batch], dict[str, int], int]:
        policy = delayed(FakePolicy, update=1.0)(POLICY)
        sampler = delayed(FakeSampler, generate=FirstIsSlow())(SAMPLER)
        await publish(policy, sampler)
        drawn = (
            batch.assign(answer=["long" if group == 0 else "a" for group in batch.groups]) for batch in prompts(4, 2)
        )
        async with rollouts(sampler, drawn, Sampling(), ahead=1, late=late) as stream:
            return await train(stream, policy), dict(stream.dropped), stream.waited

    batches, dropped, waited = simulate(lambda: script("wait"))
    assert [batch.groups.tolist() for batch in batches[:2]] == [[1, 3], [0, 2]]
    assert [batch.row("staleness").tolist() for batch in batches[:2]] == [[0, 0], [1, 1]]
    assert labels(batches) == set(range(8))
    assert (dropped, waited) == ({}, 1)
    batches, dropped, waited = simulate(lambda: script("drop"))
    assert [batch.groups.tolist() for batch in batches[:2]] == [[1, 3], [2, 5]]
    assert [batch.row("staleness").tolist() for batch in batches[:2]] == [[0, 0], [1, 0]]
    assert labels(batches) == set(range(1, 8))
    assert (dropped, waited) == ({"stale": 1}, 0)


def test_weights_whose_numbers_grow_by_several_are_one_version_each() -> None:
    class Jumping(FakePolicy):
        numbers = iter((7, 11, 15, 9))

        async def weights(self, adapter: str | None = None) -> Weights:
            return Weights(next(self.numbers), (await super().weights(adapter)).tensors)

    async def script() -> list[tuple[int, int]]:
        policy, sampler = Jumping(POLICY), FakeSampler(SAMPLER)
        await publish(policy, sampler)
        async with rollouts(sampler, prompts(10, 2), Sampling(), ahead=1) as stream:
            ages: list[tuple[int, int]] = []
            for _ in range(2):
                batch = await anext(stream)
                ages += zip(batch.row("staleness").tolist(), batch.row("oldest_version").tolist(), strict=True)
                await publish(policy, stream)
            with pytest.raises(DataError, match="version 9 were published after those of version 15"):
                await publish(policy, stream)
        return ages

    assert simulate(script) == [(0, 7), (0, 7), (1, 7), (1, 7)]


@pytest.mark.parametrize("ahead", [1, 3])
def test_as_many_prompts_are_drawn_as_the_bound_allows_and_no_more(ahead: int) -> None:
    drawn: list[int] = []

    class Noting(FakeSampler):
        async def generate(self, prompts: Batch, sampling: Sampling) -> AsyncIterator[Batch]:
            drawn.extend(prompts.groups.tolist())
            async for rows in super().generate(prompts, sampling):
                yield rows

    async def script() -> None:
        policy, sampler = FakePolicy(POLICY), delayed(Noting, load=5.0)(SAMPLER)
        await publish(policy, sampler)
        async with rollouts(sampler, prompts(20, 2), Sampling(), ahead=ahead) as stream:
            await policy.update(await anext(stream), CrossEntropy())
            await asyncio.sleep(100)
            assert len(drawn) == 2 * (ahead + 1)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(publish(policy, stream))
                await asyncio.sleep(4)
                assert len(drawn) == 2 * (ahead + 1), "the publication is on its way"
            for _ in range(2):
                await publish(policy, stream)
            await asyncio.sleep(100)
            assert len(drawn) == 2 * (ahead + 2)
            assert (await anext(stream)).row("staleness").max() <= ahead

    with capture_logs():
        simulate(script)


def test_a_publication_that_is_on_its_way_counts_for_the_bound() -> None:
    async def script() -> tuple[list[int], list[int], dict[str, int]]:
        policy, sampler = FakePolicy(POLICY), delayed(FakeSampler, load=5.0)(SAMPLER)
        await publish(policy, sampler)
        async with rollouts(sampler, prompts(6, 2), Sampling(), ahead=1) as stream:
            trained = await anext(stream)
            await policy.update(trained, CrossEntropy())
            await publish(policy, stream)
            await asyncio.sleep(100)
            await policy.update(trained, CrossEntropy())
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(publish(policy, stream))
                await asyncio.sleep(1)
                batch = await anext(stream)
            return batch.groups.tolist(), batch.row("staleness").tolist(), dict(stream.dropped)

    with capture_logs() as logged:
        assert simulate(script) == ([4, 5], [1, 1], {"stale": 2})
    assert any("publish once for each batch" in line["event"] for line in logged)


def test_a_publication_that_failed_makes_nothing_older() -> None:
    async def script() -> list[list[int]]:
        policy, sampler = crashing(FakePolicy, weights=[3])(POLICY), FakeSampler(SAMPLER)
        await publish(policy, sampler)
        ages: list[list[int]] = []
        async with rollouts(sampler, prompts(6, 2), Sampling(), ahead=1) as stream:
            async for batch in stream:
                ages.append(batch.row("staleness").tolist())
                await policy.update(batch, CrossEntropy())
                try:
                    await publish(policy, stream)
                except Crash:
                    await publish(policy, stream)
            assert not stream.dropped
        return ages

    ages = simulate(script)
    assert len(ages) == 6
    assert max(map(max, ages)) == 1
