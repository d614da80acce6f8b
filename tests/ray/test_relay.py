"""Weights on their way to several machines, by way of each other, and the links that they take.

Each rank is as if on a machine of its own.
"""

import asyncio
import gc
import os

import numpy as np
import pytest

from meshrl import Gather, Mesh, Weights, at, endpoint, respawn
from meshrl.engines.ray import RayEngine, cluster, refs
from meshrl.engines.ray.channel import RayChannel
from meshrl.engines.ray.refs import LARGE, ValueStream, local_forwarders
from meshrl.engines.remote import Place
from meshrl.errors import RankDied
from meshrl.mesh import EVERY, Same, pool
from tests.processes.conftest import Numbered
from tests.ray.conftest import NO_CORE

COLLECTIVES, STORE = "collectives", "the object store"
WORDS = LARGE // 4 + 3


@pytest.fixture(autouse=True)
def _each_rank_has_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the controller sees it; `Model` sees itself so."""

    def found(channel: RayChannel, place: Place) -> None:
        real(channel, place._replace(boot=str(place.pid)))

    real = RayChannel.found
    monkeypatch.setattr(RayChannel, "found", found)


class Model(Numbered):
    def __init__(self, *, has_torch: bool = True) -> None:
        boot = str(os.getpid())
        here = pytest.MonkeyPatch()  # of this process, for good
        here.setattr(cluster, "boot_id", lambda: boot)
        local_forwarders[0] = local_forwarders[0]._replace(machine=local_forwarders[0].machine._replace(boot=boot))
        if not has_torch:
            here.setattr(refs, "available", lambda: False)

    @endpoint
    async def weights(self, number: float) -> Gather[Weights, EVERY]:
        return Weights(1, {"large": np.full(WORDS, number, np.float32), "small": np.ones(3, np.float32)})

    @endpoint
    async def take(self, weights: Weights) -> Same[tuple[float, str]]:
        assert not any(bucket.damaged() for bucket in weights.buckets)
        assert all(bucket.shared().segment and not pool.copied for bucket in weights.buckets)
        (way,) = weights.transports
        return float(weights.tensors["large"][-1]), way

    @endpoint
    async def hands_on(self) -> Same[bool]:
        gc.collect()
        return any(isinstance(each, ValueStream) for each in gc.get_objects())


async def test_weights_come_whole_to_each_machine_also_after_one_on_the_way_died(mesh: Mesh, engine: RayEngine) -> None:
    made = at(await mesh.spawn(Model), dp=0)
    taken = await (await Mesh.reserve(engine, 3, NO_CORE)).spawn(Model)
    for number in range(2):
        assert await taken.take(await made.weights(number)) == (number, COLLECTIVES)
    weights = [await made.weights(number) for number in range(4)]
    together = await asyncio.gather(*(taken.take(each) for each in weights))
    assert together == [(number, COLLECTIVES) for number in range(4)]
    assert (await weights[3].load()).tensors["large"][-1] == 3

    late = await made.weights(5)
    for number in range(2):
        assert await at(taken, dp=number).take(late) == (5, COLLECTIVES)
    last = await made.weights(7)
    assert await at(taken, dp=0).take(last) == (7, COLLECTIVES)
    with pytest.raises(RankDied):
        await at(taken, dp=0).die()
    assert await at(taken, dp=1).take(last) == (7, STORE)
    await respawn(taken)
    assert await taken.take(await made.weights(8)) == (8, COLLECTIVES)

    while await at(taken, dp=1).hands_on():  # noqa: ASYNC110 -- on the rank, for some seconds
        await asyncio.sleep(0.5)  # to look takes a core
    assert await at(taken, dp=2).take(late) == (5, COLLECTIVES)


@pytest.mark.wide
async def test_where_torch_is_not_installed_they_come_by_rays_store(mesh: Mesh, engine: RayEngine) -> None:
    made = at(await mesh.spawn(Model), dp=0)
    taken = await (await Mesh.reserve(engine, 1, NO_CORE)).spawn(Model, has_torch=False)
    assert await taken.take(await made.weights(1)) == (1, STORE)
