import asyncio
from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest

import meshrl as rl
from meshrl.errors import ContractError, DataError
from meshrl.mesh import parts, routed
from meshrl.overlap.routing import Router, Share
from meshrl.testing import FakePolicy, FakeSampler, Lognormal, delayed, simulate
from tests.overlap.streams import POLICY, SAMPLER, prompts, spawned, trained


def asked(labels: list[int]) -> rl.Batch:
    return rl.Batch.of(prompt=["?"] * len(labels), groups=np.array(labels, np.int64))


def test_a_group_stays_on_its_replica_unless_that_has_too_much_and_what_ends_is_outstanding_no_more() -> None:
    router, one = Router(2), rl.Sampling(max_tokens=10)
    before = {label: Share(1, 0, 10) for label in range(8)}
    assert router.divide(asked([0, 0, 0]), one, before).tolist() == [1, 1, 1]
    assert router.divide(asked([0, 1, 0, 1, 9]), one, before).tolist() == [1, 1, 1, 1, 0]
    assert router.divide(asked([0, 1, 2, 3]), one, before).tolist() == [1, 1, 0, 1]
    many = router.give(asked(list(range(20, 58))), one, np.repeat([0, 1], [18, 20]))
    assert router.divide(asked([0]), one, before).tolist() == [1]  # 20 tokens more, of a mean of 195
    other = router.give(asked([60]), one, np.array([1]))
    assert router.outstanding.tolist() == [180, 210]
    assert router.divide(asked([0]), one, before).tolist() == [0]
    router.take(many, [20, 21, 57])
    assert router.outstanding.tolist() == [160, 200]
    router.end(many.values())  # what came back is not taken off twice
    assert router.outstanding.tolist() == [0, 10]
    router.end(other.values())
    assert router.outstanding.tolist() == [0, 0]


class Where(rl.Actor):
    @rl.endpoint
    async def rank(self, batch: rl.Shard[rl.Batch]) -> rl.Gather[rl.Batch]:
        return batch.assign(rank=np.full(len(batch), rl.current_rank().index))


async def test_a_caller_may_divide_the_rows() -> None:
    engine = rl.LocalEngine()
    where = await (await rl.Mesh.reserve(engine, 3, rl.Resources(cpus=0))).spawn(Where)
    owners = np.array([2, 0, 2, 2, 0])
    batch = asked([5, 6, 7, 8, 9])
    told = await routed(where.rank, owners)(batch)
    assert told.row("rank").tolist() == owners.tolist()
    assert told.groups.tolist() == [5, 6, 7, 8, 9]
    assert parts(where.rank) == 3
    for wrong in (owners[1:], owners + 1, owners - 1):
        with pytest.raises(ContractError, match=r"Where.rank: rows cannot .*: . owners from -?. to ."):
            await routed(where.rank, wrong)(batch)
    alone = Where()
    assert parts(alone.rank) == 1
    assert await routed(alone.rank, owners)(batch)
    await engine.close()


def test_rows_go_where_the_fewest_tokens_are_outstanding() -> None:
    drawn: list[tuple[int, list[int]]] = []

    class Stuck(FakeSampler):
        async def generate(self, prompts: rl.Batch, sampling: rl.Sampling) -> AsyncIterator[rl.Batch]:
            drawn.append((rl.current_rank().index, prompts.groups.tolist()))
            if np.less(prompts.groups, 4).any():
                await asyncio.Event().wait()
            async for rows in super().generate(prompts, sampling):
                yield rows

    def limited() -> Iterator[rl.Batch]:
        for batch, limits in zip(prompts(3, 4), ([90, 10, 10, 10], [30, 30, 10, 10], [60, 40, 10, 5]), strict=True):
            yield batch.assign(max_tokens=np.array(limits))

    async def script() -> None:
        sampler, policy = await spawned(Stuck, rl.LocalEngine(), 2), FakePolicy(POLICY)
        await rl.publish(policy, sampler)
        async with rl.rollouts(sampler, limited(), rl.Sampling(n=1), ahead=1, late="drop") as stream:
            batch = await anext(stream)
            assert sorted(batch.groups.tolist()) == [4, 5, 6, 7]
            await policy.update(batch, rl.CrossEntropy())
            await rl.publish(policy, stream)
            await asyncio.sleep(100)

    simulate(script)
    # The first call leaves 100 tokens with rank 0 and 20 with rank 1, so the second goes to rank 1, and comes back.
    # Of the third, 60 and 40 go to rank 1, and then 10 and 5 to rank 0.
    calls = [each for each in drawn if each[1]]
    assert calls == [(0, [0, 1]), (1, [2, 3]), (1, [4, 5, 6, 7]), (0, [10, 11]), (1, [8, 9])]


def test_a_row_of_a_group_that_was_not_asked_for_is_an_error() -> None:
    class Confused(FakeSampler):
        async def generate(self, prompts: rl.Batch, sampling: rl.Sampling) -> AsyncIterator[rl.Batch]:
            async for rows in super().generate(prompts, sampling):
                yield rows.assign(groups=rows.groups + 7)

    async def script() -> None:
        async with rl.rollouts(Confused(SAMPLER), prompts(1, 3), rl.Sampling()) as stream:
            await anext(stream)

    with pytest.raises(DataError, match=r"yielded a row of group (7|8|9), and its call has 0, 1, 2"):
        simulate(script)


def test_the_completions_of_a_prompt_stay_on_one_rank_also_where_they_were_aborted() -> None:
    class Telling(FakeSampler):
        async def generate(self, prompts: rl.Batch, sampling: rl.Sampling) -> AsyncIterator[rl.Batch]:
            async for chunk in super().generate(prompts, sampling):
                yield chunk.assign(rank=np.full(len(chunk), rl.current_rank().index))

    async def script() -> list[rl.Batch]:
        sampler = await spawned(delayed(Telling, generate=Lognormal(1.0, 1.0)), rl.LocalEngine(), 2)
        return await trained(sampler, prompts(10, 4), n=4, ahead=2, swap="abort")

    whole = rl.Batch.concat(simulate(script))
    ranks = whole.row("rank").reshape(-1, 4)
    moved = (ranks != ranks[:, :1]).any(axis=1)
    versions = whole.row("oldest_version").reshape(-1, 4)
    assert np.ptp(versions, axis=1).any()  # groups with rows from before and after
    assert moved.mean() < 0.1
    assert set(ranks.ravel().tolist()) == {0, 1}
