"""From another machine: what lies in the object store, for how long, and what never goes through the controller."""

from contextlib import suppress

import numpy as np
import psutil
import pytest

import meshrl as rl
from meshrl.data import RemoteColumn
from meshrl.engines.ray import RayEngine
from meshrl.engines.ray.refs import RayRef
from meshrl.errors import RankFailed
from meshrl.mesh import EVERY, Same
from meshrl.mesh.shared_memory import FOLDER
from tests.processes.conftest import until
from tests.ray.conftest import NO_CORE, Probe, stored

pytestmark = pytest.mark.usefixtures("from_afar")


class Rows(Probe):
    @rl.endpoint
    async def twice(self, batch: rl.Shard[rl.Batch], *, fail: bool = False) -> rl.Gather[rl.Batch]:
        tokens = rl.Ragged(np.multiply(batch.tokens.values, 2), batch.tokens.offsets)
        if fail:
            raise ValueError("as asked")
        return batch.assign(tokens=tokens)

    @rl.endpoint
    async def total(self, weights: rl.Weights, array: np.ndarray) -> Same[float]:
        assert not array.flags.writeable
        return float(sum(tensor.sum() for tensor in weights.tensors.values()) + array.sum())


class Relay(rl.Actor):
    @rl.endpoint
    async def hand_on(self, batch: rl.Batch, rows: Rows) -> Same[rl.Batch]:
        return await rows.twice(batch)


def held(batch: rl.Batch) -> list[object]:
    column = batch._columns["tokens"]
    assert isinstance(column, RemoteColumn)
    return [piece.held for piece in column.missing]


async def test_rows_stay_in_the_store_and_leave_it_and_go_past_the_controller(engine: RayEngine, mesh: rl.Mesh) -> None:
    one, other = await mesh.spawn(Rows), await (await rl.Mesh.reserve(engine, 2, NO_CORE)).spawn(Rows)
    relay = await mesh.spawn(Relay)
    batch = await one.make(50_000)
    assert isinstance(next(iter(held(batch))), RayRef)
    doubled = await relay.hand_on(batch, other)
    assert isinstance(next(iter(held(doubled))), RayRef)
    assert [int(row[-1]) for row in (await doubled.load()).tokens] == [99_998] * 4

    weights = rl.Weights(1, {f"layer{number}": np.ones(1000, np.float32) for number in range(1000)})
    assert await one.total(weights, np.ones(1_000_000)) == 2_000_000

    before = psutil.Process().memory_info().rss
    batch = await one.make(1_000_000, 8)
    doubled = await one.twice(batch)
    assert doubled.lengths.sum() == 16_000_000
    assert psutil.Process().memory_info().rss - before < 8_000_000, "the batches have 64 MB each"

    highest = list[int]()
    for step in range(60):
        batch = (await one.make(50_000, 4)).select(np.random.default_rng(step).permutation(8))
        with suppress(RankFailed):
            doubled = await other.twice(batch, fail=step % 3 == 0)
            if step % 10 == 0:
                await doubled.load()
        highest.append(stored())
    batch = doubled = rl.Batch.of(row=[])
    await until(lambda: stored() < 1_000_000)
    assert max(highest[30:]) < 50_000_000, "a step's columns have 3.2 MB"


class Model(rl.Actor):
    @rl.endpoint
    async def weights(self) -> rl.Gather[rl.Weights, EVERY]:
        number = rl.current_rank().index
        return rl.Weights(3, {str(number): np.full(1 << 20, number, np.float32)})

    @rl.endpoint
    async def take(self, weights: rl.Weights) -> Same[list[str]]:
        return [*weights.transports, *(name for name, array in weights.tensors.items() if (array == int(name)).all())]


@pytest.mark.skipif(not FOLDER.is_dir(), reason="nothing is shared")
async def test_weights_go_between_ranks_by_the_shortest_way(engine: RayEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RayEngine, "shares_memory", True)
    made = await (await rl.Mesh.reserve(engine, 2, NO_CORE)).spawn(Model)
    taken = await (await rl.Mesh.reserve(engine, 2, NO_CORE)).spawn(Model)
    weights = await made.weights()
    assert weights.nbytes == 2 << 22
    for _ in range(2):  # they stay as they are
        assert await taken.take(weights) == ["shared memory", "0", "1"]
    assert (await weights.load()).tensors["1"].max() == 1
