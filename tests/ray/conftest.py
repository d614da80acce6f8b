"""Tests of what only Ray has: processes that die, placement, the object store."""

from collections.abc import AsyncIterator

import pytest

from meshrl import Mesh, Resources
from meshrl.engines.ray import RayEngine

NO_CORE = Resources(cpus=0)


@pytest.fixture
async def engine(ray_cluster: None) -> AsyncIterator[RayEngine]:
    made = RayEngine()
    yield made
    await made.close()


@pytest.fixture
async def mesh(engine: RayEngine) -> Mesh:
    """Two ranks that need no core."""
    return await Mesh.reserve(engine, 2, NO_CORE)
