"""Tests of what only Ray has: processes that die, placement, the object store."""

from collections.abc import AsyncIterator

import pytest

from meshrl import Mesh, Resources
from meshrl.engines.ray import RayEngine
from meshrl.engines.ray.channel import RayChannel

NO_CORE = Resources(cpus=0)


@pytest.fixture
def from_afar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks as if they were on another machine: Ray carries the calls, and its store what is large."""
    monkeypatch.setattr(RayChannel, "found", lambda *_: None)


@pytest.fixture
async def engine(ray_cluster: None) -> AsyncIterator[RayEngine]:
    made = RayEngine()
    yield made
    await made.close()


@pytest.fixture
async def mesh(engine: RayEngine) -> Mesh:
    """Two ranks that need no core."""
    return await Mesh.reserve(engine, 2, NO_CORE)
