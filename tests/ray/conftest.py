"""Tests of what only Ray has: placement, the way between machines, code that travels, faults of nodes."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable

import numpy as np
import psutil
import pytest

from meshrl import Actor, Batch, Gather, Mesh, Ragged, Resources, Same, endpoint
from meshrl.engines.ray import RayEngine
from meshrl.engines.ray.channel import RayChannel

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
    async def make(self, tokens: int) -> Gather[Batch]:
        return Batch.of(tokens=Ragged.of([np.arange(tokens)] * 2, np.int32))

    @endpoint
    async def die(self) -> Same[int]:
        os.kill(os.getpid(), signal.SIGKILL)
        return 0


async def until(there: Callable[[], bool]) -> None:
    """Wait for what is seen from outside alone."""
    while not there():  # noqa: ASYNC110 -- of processes and of Ray's tables
        await asyncio.sleep(0.05)


def ended(pid: int) -> bool:
    """Whether a process has, or nobody has asked yet how."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


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
