"""Tests of what only Ray has: placement, the way between machines, code that travels, faults of nodes."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import numpy as np
import pytest
import ray

from meshrl import Actor, Batch, Gather, Mesh, Ragged, Resources, endpoint
from meshrl.engines.ray import RayEngine
from meshrl.engines.ray.channel import RayChannel
from meshrl.mesh import Same

NO_CORE = Resources(cpus=0)


class Probe(Actor):
    """A rank that tells where it is, makes rows, waits and dies."""

    @endpoint
    async def pid(self) -> Gather[np.ndarray]:
        return np.array([os.getpid()])

    @endpoint
    async def hang(self) -> None:
        await asyncio.Event().wait()

    @endpoint
    async def take(self, what: object) -> None: ...

    @endpoint
    async def make(self, tokens: int, rows: int = 2) -> Gather[Batch]:
        return Batch.of(tokens=Ragged.of([np.arange(tokens)] * rows, np.int32))

    @endpoint
    async def die(self) -> Same[int]:
        os.kill(os.getpid(), signal.SIGKILL)
        return 0


def stored() -> int:
    """Bytes in the object store."""
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
    """Two ranks that need no core."""
    return await Mesh.reserve(engine, 2, NO_CORE)
