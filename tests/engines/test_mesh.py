import copy
from collections.abc import AsyncIterator
from typing import Literal

import numpy as np
import pytest

import meshrl as rl
from meshrl.errors import ConfigError, ContractError, ReplicasDisagree
from meshrl.mesh import TP, Resources, Same
from tests.engines.conftest import NO_CORE, Reserve

pytestmark = pytest.mark.asyncio(loop_scope="session")

DP_PP = Literal["dp", "pp"]


class Worker(rl.Actor):
    @rl.endpoint
    async def where(self) -> rl.Gather[np.ndarray]:
        return np.array([rl.current_rank().index])

    @rl.endpoint
    async def twice(self, batch: rl.Shard[rl.Batch], factor: float = 2.0) -> rl.Gather[rl.Batch]:
        return batch.assign(rewards=batch.rewards * np.float32(factor))

    @rl.endpoint
    async def doubled(self, batch: rl.Shard[rl.Batch]) -> rl.Gather[rl.Batch]:
        return rl.Batch.concat([batch, batch])

    @rl.endpoint
    async def reversed(self, batch: rl.Shard[rl.Batch]) -> rl.Gather[rl.Batch]:
        return batch.select(np.arange(len(batch))[::-1])

    @rl.endpoint
    async def expanded(self, batch: rl.Shard[rl.Batch]) -> AsyncIterator[rl.Gather[rl.Batch]]:
        rows = batch.repeat(2)
        for row in range(len(rows)):
            yield rows.select([row])

    @rl.endpoint
    async def pairs(
        self, rows: rl.Shard[dict[str, rl.Batch]], scale: rl.Shard[np.ndarray] | None = None
    ) -> rl.Gather[dict[str, np.ndarray]]:
        weight = np.ones(len(rows["a"])) if scale is None else scale
        return {"sum": (rows["a"].rewards + rows["b"].rewards) * weight, "rank": weight * 0 + rl.current_rank().index}

    @rl.endpoint
    async def sums(self, *each: rl.Shard[rl.Batch], **named: rl.Shard[rl.Batch]) -> rl.Gather[rl.Batch]:
        total = np.sum([rows.rewards for rows in (*each, *named.values())], axis=0)
        return each[0].assign(rewards=total)

    @rl.endpoint
    async def totals(self) -> rl.Sum[list[int]]:
        return [2 * rl.current_rank().index + 1, 2 * rl.current_rank().index + 2]

    @rl.endpoint
    async def means(self) -> rl.Mean[dict[str, float]]:
        return {"a": 2.0 * rl.current_rank().index + 1, "b": 2.0 * rl.current_rank().index + 2}

    @rl.endpoint
    async def reward(self, batch: rl.Shard[rl.Batch]) -> rl.Mean[rl.Metrics]:
        return rl.Metrics.of(reward=(float(batch.rewards.sum()), len(batch)))

    @rl.endpoint
    async def agreed(self, values: list[object]) -> Same[object]:
        return values[rl.current_rank().index]

    @rl.endpoint
    async def on_one_alone(self, what: str) -> rl.Gather[dict[str, np.ndarray] | None]:
        first = rl.current_rank().index == 0
        if what == "nothing":
            return None if first else {"a": np.zeros(3)}
        return {"a" if first else "b": np.zeros(1)}

    @rl.endpoint
    async def same(self, batch: rl.Batch | None = None, rows: rl.Shard[rl.Batch] | None = None) -> rl.Gather[rl.Batch]:
        assert batch is not None
        return batch.select([rl.current_rank().index])

    @rl.endpoint
    async def same_in_stream(self, batch: rl.Batch) -> AsyncIterator[rl.Gather[rl.Batch]]:
        yield batch.select([rl.current_rank().index])


class Tall(Worker):
    @rl.endpoint
    async def along_tp(self) -> rl.Gather[np.ndarray, TP]:
        return np.array([rl.current_rank().index])

    @rl.endpoint
    async def along_both(self, rows: rl.Shard[np.ndarray, DP_PP]) -> rl.Gather[np.ndarray, DP_PP]:
        return rows * 0 + rl.current_rank().index


def make_batch(rows: int) -> rl.Batch:
    lengths = np.random.default_rng(rows).integers(1, 9, rows)
    return rl.Batch.of(
        rewards=np.arange(rows, dtype=np.float32), tokens=rl.Ragged.of([np.arange(n) for n in lengths], np.int32)
    )


@pytest.fixture
async def two(reserve: Reserve) -> rl.Mesh:
    return await reserve(2, NO_CORE)


async def test_rows_come_back_in_order_from_any_number_of_ranks(reserve: Reserve) -> None:
    for count in (1, 2, 3):
        worker = await (await reserve(count, NO_CORE)).spawn(Worker)
        for size in (0, 1, 2, 7):
            batch = make_batch(size)
            tripled = await (await worker.twice(batch, factor=3)).load()
            assert tripled.rewards.tolist() == [3.0 * row for row in range(size)]
            assert await (await worker.reversed(batch)).load() == batch
        doubled = await (await worker.doubled(make_batch(3))).load()  # by code that names the module of meshrl
        assert sorted(doubled.rewards.tolist()) == [0, 0, 1, 1, 2, 2]


async def test_results_are_reduced_container_by_container(two: rl.Mesh) -> None:
    worker = await two.spawn(Worker)
    assert (await worker.reward(make_batch(3)))["reward"] == 1.0, "weighted by rows"
    assert await worker.means() == {"a": 2.0, "b": 3.0}
    assert await worker.totals() == [4, 6]
    for what, told in ("nothing", r"parts \[0\] are None"), ("keys", "different keys"):
        with pytest.raises(ContractError, match=told):
            await worker.on_one_alone(what)


async def test_ranks_that_must_agree_are_compared_value_by_value(two: rl.Mesh) -> None:
    worker, nan = await two.spawn(Worker), float("nan")
    for value in {"a": nan}, [nan, ("b", 1)], np.array([nan, 1.0]):
        await worker.agreed([value, copy.deepcopy(value)])
    for one, other in ({"a": 1, "b": 2}, {"a": 1, "b": 3}), ([1.0, nan], [1.0, 2.0]), (np.zeros(2), np.ones(2)):
        with pytest.raises(ReplicasDisagree):
            await worker.agreed([one, other])


async def test_resources_that_no_machine_has_are_refused() -> None:
    for cpus, gpus in (-1, 0.0), (None, -1.0), (None, float("inf")), (None, 1.5):
        with pytest.raises(ConfigError, match=r"= (-1|inf|1\.5)"):
            Resources(cpus=cpus, gpus=gpus)


async def test_containers_optional_shards_and_any_number_of_arguments_are_split_alike(two: rl.Mesh) -> None:
    worker, batch = await two.spawn(Worker), make_batch(5)
    result = await worker.pairs({"a": batch, "b": batch}, np.array([1, 2, 3, 4, 5.0]))
    assert result["sum"].tolist() == [0, 4, 12, 24, 40]
    assert (await worker.pairs(rows={"a": batch, "b": batch}))["sum"].tolist() == [0, 2, 4, 6, 8]
    with pytest.raises(ContractError, match=r"`rows\['a'\]` has 5, `rows\['b'\]` has 4"):
        await worker.pairs({"a": batch, "b": batch.select(range(4))})
    assert (await (await worker.sums(batch, batch, more=batch)).load()).rewards.tolist() == [0, 3, 6, 9, 12]


async def test_what_was_not_split_in_this_call_follows_one_another(two: rl.Mesh) -> None:
    """A part of an outer call keeps the row numbers that the outer call's join needs."""
    worker, batch = await two.spawn(Worker), make_batch(5)
    chunks = [await chunk.load() async for chunk in worker.expanded(batch)]
    assert sorted(int(chunk.rewards[0]) for chunk in chunks) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    part = make_batch(4).part(np.array([3, 0]))
    streamed = [await chunk.load() async for chunk in worker.same_in_stream(part)]
    for joined in (
        await worker.same(part),
        await worker.same(part, rows=None),
        rl.Batch.concat(sorted(streamed, key=lambda chunk: -chunk.rewards[0])),
    ):
        assert await joined.load() == part
        assert [level.tolist() for level in joined.origins] == [[3, 0]]


async def test_axes_choose_what_is_split_and_joined_and_which_ranks_are_called(reserve: Reserve) -> None:
    mesh = await reserve(8, NO_CORE)
    worker = await mesh.shape(dp=2, pp=2, tp=2).spawn(Tall)
    assert (await worker.where()).tolist() == [0, 4]
    assert (await worker.along_tp()).tolist() == [0, 1]
    assert (await worker.along_both(np.arange(4))).tolist() == [0, 2, 4, 6]
    assert [rank.axes for rank in rl.ranks(worker)][5] == {"dp": 1, "pp": 0, "tp": 1}
    assert [array.tolist() for array in await rl.each(worker.where)()] == [[rank] for rank in range(8)]
    half = rl.at(worker, dp=1)
    assert [rank.index for rank in rl.ranks(half)] == [4, 5, 6, 7]
    assert (await half.where()).tolist() == [4]
    assert (await (await half.twice(make_batch(3))).load()).rewards.tolist() == [0, 2, 4]
    assert [array.tolist() for array in await rl.each(Worker().where)()] == [[0]], "an actor that was not spawned"

    wide = await mesh.spawn(Worker)  # another layout on the same ranks
    assert (await wide.where()).tolist() == list(range(8))
    tall = await mesh.shape(dp=1, tp=8).spawn(Worker)
    assert (await tall.where()).tolist() == [0]
    assert "dp=1, tp=8" in repr(tall)
    for handle, is_tall in (worker, True), (half, True), (copy.deepcopy(half), True), (tall, False):
        assert isinstance(handle, Worker)
        assert isinstance(handle, Tall) is is_tall
