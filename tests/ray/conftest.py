from collections.abc import AsyncIterator

import numpy as np
import pytest
import ray

from meshrl import Batch, Gather, Mesh, Ragged, Resources, endpoint
from meshrl.engines.ray import RayEngine
from meshrl.engines.ray.channel import RayChannel
from tests.processes.conftest import Numbered

NO_CORE = Resources(cpus=0)


class Probe(Numbered):
    @endpoint
    async def take(self, what: object) -> None: ...

    @endpoint
    async def make(self, tokens: int, rows: int = 2) -> Gather[Batch]:
        return Batch.of(tokens=Ragged.of([np.arange(tokens)] * rows, np.int32))


def stored() -> int:
    free, total = (each.get("object_store_memory", 0) for each in (ray.available_resources(), ray.cluster_resources()))
    return int(total - free)


@pytest.fixture
def from_afar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks as if they were on another machine: Ray carries the calls, and its store what is large."""
    monkeypatch.setattr(RayChannel, "found", lambda *_: None)


@pytest.fixture
async def engine(ray_cluster: None) -> AsyncIterator[RayEngine]:
    made = RayEngine(patience=60)
    yield made
    await made.close()


@pytest.fixture
async def mesh(engine: RayEngine) -> Mesh:
    return await Mesh.reserve(engine, 2, NO_CORE)
