"""Calls through a mesh: splitting, joining, views of ranks, and what goes wrong."""

import copy
from collections.abc import AsyncIterator
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
    Same,
    Shard,
    Sum,
    at,
    current_rank,
    each,
    endpoint,
    ranks,
)
from tests.engines.conftest import NO_CORE, Reserve

pytestmark = pytest.mark.asyncio(loop_scope="session")

DP_PP = Literal["dp", "pp"]


class Worker(Actor):
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
    async def sums(self, *each: Shard[Batch], **named: Shard[Batch]) -> Gather[Batch]:
        """The rewards of all, row by row."""
        total = np.sum([rows.rewards for rows in (*each, *named.values())], axis=0)
        return each[0].assign(rewards=total)

    @endpoint
    async def tokens(self, batch: Shard[Batch]) -> Sum[int]:
        return int(batch.lengths.sum())

    @endpoint
    async def totals(self) -> Sum[list[int]]:
        return [2 * current_rank().index + 1, 2 * current_rank().index + 2]

    @endpoint
    async def means(self) -> Mean[dict[str, float]]:
        return {"a": 2.0 * current_rank().index + 1, "b": 2.0 * current_rank().index + 2}

    @endpoint
    async def reward(self, batch: Shard[Batch]) -> Mean[Metrics]:
        return Metrics.of(reward=(float(batch.rewards.sum()), len(batch)))

    @endpoint
    async def on_one_alone(self, what: str) -> Gather[dict[str, np.ndarray] | None]:
        first = current_rank().index == 0
        if what == "nothing":
            return None if first else {"a": np.zeros(3)}
        return {"a" if first else "b": np.zeros(1)}

    @endpoint
    async def index(self) -> Same[int]:
        return current_rank().index

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


@pytest.fixture
async def two(reserve: Reserve) -> Mesh:
    """Ranks that share a loop where they are threads."""
    return await reserve(2, NO_CORE)


async def test_rows_come_back_in_order_from_any_number_of_ranks(reserve: Reserve) -> None:
    for count in (1, 2, 3):
        worker = await (await reserve(count, NO_CORE)).spawn(Worker)
        for size in (0, 1, 2, 7):
            batch = make_batch(size)
            tripled = await (await worker.twice(batch, factor=3)).load()
            assert tripled.rewards.tolist() == [3.0 * row for row in range(size)]
            assert await (await worker.reversed(batch)).load() == batch
            assert await worker.tokens(batch) == batch.lengths.sum()
        doubled = await (await worker.doubled(make_batch(3))).load()  # by code that names the module of meshrl
        assert sorted(doubled.rewards.tolist()) == [0, 0, 1, 1, 2, 2]


async def test_results_are_reduced_container_by_container(two: Mesh) -> None:
    worker = await two.spawn(Worker)
    assert (await worker.reward(make_batch(3)))["reward"] == 1.0, "weighted by rows"
    assert await worker.means() == {"a": 2.0, "b": 3.0}
    assert await worker.totals() == [4, 6]
    for what, told in (
        ("nothing", r"parts \[0\] are None and the others are not"),
        ("keys", "different keys"),
    ):
        with pytest.raises(ContractError, match=told):
            await worker.on_one_alone(what)
    with pytest.raises(ReplicasDisagree, match=r"Worker.index .* rank 0 returned 0 and rank 1 returned 1"):
        await worker.index()


async def test_containers_optional_shards_and_any_number_of_arguments_are_split_alike(two: Mesh) -> None:
    worker, batch = await two.spawn(Worker), make_batch(5)
    result = await worker.pairs({"a": batch, "b": batch}, np.array([1, 2, 3, 4, 5.0]))
    assert result["sum"].tolist() == [0, 4, 12, 24, 40]
    assert (await worker.pairs(rows={"a": batch, "b": batch}))["sum"].tolist() == [0, 2, 4, 6, 8]
    with pytest.raises(ContractError, match=r"`rows\['a'\]` has 5, `rows\['b'\]` has 4"):
        await worker.pairs({"a": batch, "b": batch.select(range(4))})
    assert (await (await worker.sums(batch, batch, more=batch)).load()).rewards.tolist() == [0, 3, 6, 9, 12]


async def test_what_was_not_split_in_this_call_follows_one_another(two: Mesh) -> None:
    """A part of an outer call keeps the row numbers that the outer call's join needs."""
    worker, batch = await two.spawn(Worker), make_batch(5)
    chunks = [await chunk.load() async for chunk in worker.expanded(batch)]
    assert sorted(int(chunk.rewards[0]) for chunk in chunks) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    part = make_batch(4).part(np.array([3, 0]))
    streamed = [await chunk.load() async for chunk in worker.same_in_stream(part)]
    for joined in (
        await worker.same(part),
        await worker.same(part, rows=None),
        Batch.concat(sorted(streamed, key=lambda chunk: -chunk.rewards[0])),
    ):
        assert await joined.load() == part
        assert [level.tolist() for level in joined.origins] == [[3, 0]]


async def test_axes_choose_what_is_split_and_joined_and_which_ranks_are_called(reserve: Reserve) -> None:
    mesh = await reserve(8, NO_CORE)
    worker = await mesh.shape(dp=2, pp=2, tp=2).spawn(Tall)
    assert (await worker.where()).tolist() == [0, 4]
    assert (await worker.along_tp()).tolist() == [0, 1]
    assert (await worker.along_both(np.arange(4))).tolist() == [0, 2, 4, 6]
    assert [rank.axes for rank in ranks(worker)][5] == {"dp": 1, "pp": 0, "tp": 1}
    assert [array.tolist() for array in await each(worker.where)()] == [[rank] for rank in range(8)]
    half = at(worker, dp=1)
    assert [rank.index for rank in ranks(half)] == [4, 5, 6, 7]
    assert (await half.where()).tolist() == [4]
    assert (await (await half.twice(make_batch(3))).load()).rewards.tolist() == [0, 2, 4]
    with pytest.raises(ContractError, match=r"at\(Tall, dp=2\): the mesh has dp from 0 to 1"):
        at(worker, dp=2)
    assert [array.tolist() for array in await each(Worker().where)()] == [[0]], "an actor that was not spawned"

    wide = await mesh.spawn(Worker)  # another layout on the same ranks
    assert (await wide.where()).tolist() == list(range(8))
    tall = await mesh.shape(dp=1, tp=8).spawn(Worker)
    assert (await tall.where()).tolist() == [0]
    assert "dp=1, tp=8" in repr(tall)


async def test_what_is_spawned_is_an_instance_of_its_class(two: Mesh) -> None:
    mesh = two.shape(dp=2, tp=1, pp=1)
    worker, tall = await mesh.spawn(Worker), await mesh.spawn(Tall)
    assert isinstance(worker, Worker)
    assert isinstance(worker, Actor)
    assert not isinstance(worker, Tall)
    assert isinstance(at(tall, dp=0), Tall)
    assert isinstance(copy.deepcopy(tall), Worker)


async def test_wrong_uses_say_what_to_write(two: Mesh) -> None:
    with pytest.raises(ContractError, match=r"mesh.shape\(dp=3\): the sizes multiply to 3, but the mesh has 2 ranks"):
        two.shape(dp=3)
    with pytest.raises(ContractError, match="too many positional arguments"):
        await cast("Any", two).spawn(Worker, 1, 2)
    with pytest.raises(ContractError, match="is a role without an implementation of checkpoint, encode, logprobs"):
        await two.spawn(Policy)
    worker: Any = await two.spawn(Worker)
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
