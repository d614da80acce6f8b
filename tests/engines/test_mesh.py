"""Calls through a mesh: splitting, joining, views of ranks, and what goes wrong."""

import copy
from collections.abc import AsyncIterator
from math import prod
from typing import Any, Literal, cast

import numpy as np
import pytest

import meshrl
from meshrl import (
    TP,
    Actor,
    Batch,
    ContractError,
    Gather,
    Mean,
    Mesh,
    Metrics,
    Policy,
    Ragged,
    ReplicasDisagree,
    Resources,
    Same,
    Shard,
    Sum,
    at,
    current_rank,
    each,
    endpoint,
    ranks,
)
from meshrl.mesh import Engine
from meshrl.mesh import scatter as rows

DP_PP = Literal["dp", "pp"]


class Worker(Actor):
    def __init__(self, offset: int = 0) -> None:
        self.offset = offset

    @endpoint
    async def where(self) -> Gather[np.ndarray]:
        return np.array([current_rank().index])

    @endpoint
    async def twice(self, batch: Shard[Batch], factor: float = 2.0) -> Gather[Batch]:
        return batch.assign(rewards=batch.rewards * np.float32(factor))

    @endpoint
    async def doubled(self, batch: Shard[Batch]) -> Gather[Batch]:
        return meshrl.Batch.concat([batch, batch])

    @endpoint
    async def reversed(self, batch: Shard[Batch]) -> Gather[Batch]:
        return batch.select(np.arange(len(batch))[::-1])

    @endpoint
    async def expanded(self, batch: Shard[Batch]) -> AsyncIterator[Gather[Batch]]:
        rows = batch.repeat(2)
        for row in range(len(rows)):
            yield rows.select([row])

    @endpoint
    async def pairs(
        self, rows: Shard[dict[str, Batch]], scale: Shard[np.ndarray] | None = None
    ) -> Gather[dict[str, np.ndarray]]:
        weight = np.ones(len(rows["a"])) if scale is None else scale
        return {"sum": (rows["a"].rewards + rows["b"].rewards) * weight, "rank": weight * 0 + current_rank().index}

    @endpoint
    async def tokens(self, batch: Shard[Batch]) -> Sum[int]:
        return int(batch.lengths.sum())

    @endpoint
    async def reward(self, batch: Shard[Batch]) -> Mean[Metrics]:
        return Metrics.of(reward=(float(batch.rewards.sum()), len(batch)))

    @endpoint
    async def index(self) -> Same[int]:
        return current_rank().index

    @endpoint
    async def offset_(self) -> Same[int]:
        return self.offset

    @endpoint
    async def call(self, other: "Worker", batch: Batch) -> Same[Batch]:
        return await other.twice(batch)

    @endpoint
    async def same(self, batch: Batch | None = None, rows: Shard[Batch] | None = None) -> Gather[Batch]:
        assert batch is not None
        return batch.select([current_rank().index])

    @endpoint
    async def same_in_stream(self, batch: Batch) -> AsyncIterator[Gather[Batch]]:
        yield batch.select([current_rank().index])


class Tall(Worker):
    @endpoint
    async def along_tp(self) -> Gather[np.ndarray, TP]:
        return np.array([current_rank().index])

    @endpoint
    async def along_both(self, rows: Shard[np.ndarray, DP_PP]) -> Gather[np.ndarray, DP_PP]:
        return rows * 0 + current_rank().index


def make_batch(rows: int) -> Batch:
    lengths = np.random.default_rng(rows).integers(1, 9, rows)
    return Batch.of(
        rewards=np.arange(rows, dtype=np.float32), tokens=Ragged.of([np.arange(n) for n in lengths], np.int32)
    )


async def reserve(engine: Engine, count: int) -> Mesh:
    return await Mesh.reserve(engine, count, Resources(cpus=0))


async def spawn(engine: Engine, count: int) -> Worker:
    return await (await reserve(engine, count)).spawn(Worker)


async def spawn_tall(engine: Engine, **axes: int) -> Tall:
    return await (await reserve(engine, prod(axes.values()))).shape(**axes).spawn(Tall)


@pytest.mark.parametrize("count", [1, 2, 3])
async def test_rows_come_back_in_order(engine: Engine, count: int) -> None:
    worker = await spawn(engine, count)
    for size in (0, 1, 2, 7):
        batch = make_batch(size)
        tripled = await (await worker.twice(batch, factor=3)).load()
        assert tripled.rewards.tolist() == [3.0 * row for row in range(size)]
        assert await (await worker.reversed(batch)).load() == batch
        assert await worker.tokens(batch) == batch.lengths.sum()


async def test_means_are_weighted_by_rows(engine: Engine) -> None:
    worker = await spawn(engine, 2)
    assert (await worker.reward(make_batch(3)))["reward"] == 1.0


async def test_containers_and_optional_shards_are_split_alike(engine: Engine) -> None:
    worker, batch = await spawn(engine, 2), make_batch(5)
    result = await worker.pairs({"a": batch, "b": batch}, np.array([1, 2, 3, 4, 5.0]))
    assert result["sum"].tolist() == [0, 4, 12, 24, 40]
    assert (await worker.pairs(rows={"a": batch, "b": batch}))["sum"].tolist() == [0, 2, 4, 6, 8]
    with pytest.raises(ContractError, match=r"`rows\['a'\]` has 5, `rows\['b'\]` has 4"):
        await worker.pairs({"a": batch, "b": batch.select(range(4))})


async def test_streams_yield_each_rows_own_values(engine: Engine) -> None:
    worker, batch = await spawn(engine, 2), make_batch(5)
    chunks = [await chunk.load() async for chunk in worker.expanded(batch)]
    assert sorted(int(chunk.rewards[0]) for chunk in chunks) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


async def test_what_was_not_split_in_this_call_follows_one_another(engine: Engine) -> None:
    """A part of an outer call keeps the row numbers that the outer call's join needs."""
    worker = await spawn(engine, 2)
    part = make_batch(4).part(np.array([3, 0]))
    streamed = [await chunk.load() async for chunk in worker.same_in_stream(part)]
    for joined in (
        await worker.same(part),
        await worker.same(part, rows=None),
        Batch.concat(sorted(streamed, key=lambda chunk: -chunk.rewards[0])),
    ):
        assert await joined.load() == part
        assert [level.tolist() for level in joined.origins] == [[3, 0]]


async def test_an_actor_of_a_script_may_name_the_module_of_meshrl(engine: Engine) -> None:
    worker = await spawn(engine, 2)
    doubled = await (await worker.doubled(make_batch(3))).load()
    assert sorted(doubled.rewards.tolist()) == [0, 0, 1, 1, 2, 2]


async def test_axes_choose_what_is_split_and_joined(engine: Engine) -> None:
    worker = await spawn_tall(engine, dp=2, pp=2, tp=2)
    assert (await worker.where()).tolist() == [0, 4]
    assert (await worker.along_tp()).tolist() == [0, 1]
    assert (await worker.along_both(np.arange(4))).tolist() == [0, 2, 4, 6]
    assert [rank.axes for rank in ranks(worker)][5] == {"dp": 1, "pp": 0, "tp": 1}


async def test_each_gives_one_result_a_rank_and_at_a_submesh(engine: Engine) -> None:
    worker = await spawn_tall(engine, dp=2, tp=2, pp=1)
    assert [array.tolist() for array in await each(worker.where)()] == [[0], [1], [2], [3]]
    half = at(worker, dp=1)
    assert [rank.index for rank in ranks(half)] == [2, 3]
    assert (await half.where()).tolist() == [2]
    assert (await (await half.twice(make_batch(3))).load()).rewards.tolist() == [0, 2, 4]
    with pytest.raises(ContractError, match=r"at\(Tall, dp=2\): the mesh has dp from 0 to 1"):
        at(worker, dp=2)
    plain = Worker()
    assert [array.tolist() for array in await each(plain.where)()] == [[0]]


async def test_ranks_that_disagree_are_named(engine: Engine) -> None:
    worker = await spawn(engine, 2)
    assert await worker.offset_() == 0
    with pytest.raises(ReplicasDisagree, match=r"Worker.index .* rank 0 returned 0 and rank 1 returned 1"):
        await worker.index()


async def test_a_handle_can_be_sent_to_another_actor(engine: Engine) -> None:
    one, other = await spawn(engine, 2), await spawn(engine, 2)
    assert (await (await one.call(other, make_batch(3))).load()).rewards.tolist() == [0, 2, 4]


async def test_what_is_spawned_is_an_instance_of_its_class(engine: Engine) -> None:
    mesh = (await reserve(engine, 2)).shape(dp=2, tp=1, pp=1)
    worker, tall = await mesh.spawn(Worker), await mesh.spawn(Tall)
    assert isinstance(worker, Worker)
    assert isinstance(worker, Actor)
    assert not isinstance(worker, Tall)
    assert isinstance(at(tall, dp=0), Tall)
    assert isinstance(copy.deepcopy(tall), Worker)


async def test_two_layouts_live_in_the_same_ranks(engine: Engine) -> None:
    mesh = await reserve(engine, 4)
    wide = await mesh.spawn(Worker)
    tall = await mesh.shape(dp=1, tp=4).spawn(Worker)
    assert (await wide.where()).tolist() == [0, 1, 2, 3]
    assert (await tall.where()).tolist() == [0]
    assert "dp=1, tp=4" in repr(tall)


def test_values_are_reduced_container_by_container() -> None:
    parts = [{"a": [1.0, 2.0], "m": Metrics.of(x=(1, 1))}, {"a": [3.0, 4.0], "m": Metrics.of(x=(5, 3))}]
    assert rows.mean(parts) == {"a": [2.0, 3.0], "m": Metrics.of(x=(6, 4))}
    assert rows.total([[1, 2], [3, 4]]) == [4, 6]
    with pytest.raises(ContractError, match=r"parts \[0\] are None and the others are not"):
        rows.gather([None, make_batch(3)], None)
    with pytest.raises(ContractError, match="different keys"):
        rows.gather([{"a": make_batch(1)}, {"b": make_batch(1)}], None)


async def test_wrong_uses_say_what_to_write(engine: Engine) -> None:
    mesh = await reserve(engine, 2)
    with pytest.raises(ContractError, match=r"mesh.shape\(dp=3\): the sizes multiply to 3, but the mesh has 2 ranks"):
        mesh.shape(dp=3)
    with pytest.raises(ContractError, match="too many positional arguments"):
        await cast("Any", mesh).spawn(Worker, 1, 2)
    with pytest.raises(ContractError, match="is a role without an implementation of checkpoint, encode, logprobs"):
        await mesh.spawn(Policy)
    worker: Any = await mesh.spawn(Worker)
    with pytest.raises(ContractError, match="missing a required argument: 'batch'"):
        await worker.twice()
    with pytest.raises(ContractError, match="int cannot be split over ranks"):
        await worker.twice(3)
    with pytest.raises(AttributeError, match="no endpoint 'twise': did you mean 'twice'"):
        await worker.twise()
    with pytest.raises(ContractError, match="is a stream"):
        each(worker.expanded)
    with pytest.raises(ContractError, match=r"ranks\(\) needs an actor that was spawned on a mesh"):
        meshrl.ranks(Worker())
