"""From another machine: what lies in the object store, for how long, and what never goes through the controller."""

from contextlib import suppress

import numpy as np
import psutil
import pytest

from meshrl import (
    EVERY,
    Actor,
    Batch,
    Gather,
    Mesh,
    Ragged,
    RankFailed,
    Same,
    Shard,
    Weights,
    current_rank,
    endpoint,
)
from meshrl.data import RemoteColumn
from meshrl.engines.ray import RayEngine
from meshrl.engines.ray.refs import RayRef
from meshrl.mesh.shared_memory import FOLDER
from tests.processes.conftest import until
from tests.ray.conftest import NO_CORE, Probe, stored

pytestmark = pytest.mark.usefixtures("from_afar")


class Rows(Probe):
    @endpoint
    async def twice(self, batch: Shard[Batch], *, fail: bool = False) -> Gather[Batch]:
        tokens = Ragged(np.multiply(batch.tokens.values, 2), batch.tokens.offsets)
        if fail:
            raise ValueError("as asked")
        return batch.assign(tokens=tokens)

    @endpoint
    async def total(self, weights: Weights, array: np.ndarray) -> Same[float]:
        assert not array.flags.writeable
        return float(sum(tensor.sum() for tensor in weights.tensors.values()) + array.sum())


class Relay(Actor):
    """Calls another actor from its rank."""

    @endpoint
    async def hand_on(self, batch: Batch, rows: Rows) -> Same[Batch]:
        return await rows.twice(batch)


def held(batch: Batch) -> list[object]:
    """What the tokens are to be fetched by."""
    column = batch._columns["tokens"]
    assert isinstance(column, RemoteColumn)
    return [piece.held for piece in column.missing]


async def test_rows_stay_in_the_store_and_leave_it_and_go_past_the_controller(engine: RayEngine, mesh: Mesh) -> None:
    """What a rank has of Ray's store it hands on in its machine's memory, and what it makes goes back through Ray."""
    one, other = await mesh.spawn(Rows), await (await Mesh.reserve(engine, 2, NO_CORE)).spawn(Rows)
    relay = await mesh.spawn(Relay)
    batch = await one.make(50_000)
    assert isinstance(next(iter(held(batch))), RayRef)
    doubled = await relay.hand_on(batch, other)
    assert isinstance(next(iter(held(doubled))), RayRef)
    assert [int(row[-1]) for row in (await doubled.load()).tokens] == [99_998] * 4

    weights = Weights(1, {f"layer{number}": np.ones(1000, np.float32) for number in range(1000)})
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
    batch = doubled = Batch.of(row=[])
    await until(lambda: stored() < 1_000_000)
    assert max(highest[30:]) < 50_000_000, "a step's columns have 3.2 MB"


class Model(Actor):
    """Each rank has a tensor."""

    @endpoint
    async def weights(self) -> Gather[Weights, EVERY]:
        number = current_rank().index
        return Weights(3, {str(number): np.full(1 << 20, number, np.float32)})

    @endpoint
    async def take(self, weights: Weights) -> Same[list[str]]:
        return [*weights.ways, *(name for name, array in weights.tensors.items() if (array == int(name)).all())]


@pytest.mark.parametrize(
    ("shares", "way"),
    [
        pytest.param(True, "shared memory", marks=pytest.mark.skipif(not FOLDER.is_dir(), reason="nothing is shared")),
        pytest.param(False, "the object store", marks=pytest.mark.wide),
    ],
)
async def test_weights_go_from_rank_to_rank_by_the_shortest_way(
    shares: bool, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RayEngine, "shares_memory", shares)
    engine = RayEngine()
    try:
        made = await (await Mesh.reserve(engine, 2, NO_CORE)).spawn(Model)
        taken = await (await Mesh.reserve(engine, 2, NO_CORE)).spawn(Model)
        weights = await made.weights()
        assert weights.nbytes == 2 << 22
        assert await taken.take(weights) == [way, "0", "1"]
        assert await taken.take(weights) == [way, "0", "1"], "they stay as they are"
        assert (await weights.load()).tensors["1"].max() == 1
    finally:
        await engine.close()
