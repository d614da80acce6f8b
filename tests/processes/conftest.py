"""Tests of what only processes of one machine have: their sockets, their shared memory, their cores and GPUs."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path

import psutil
import pytest_asyncio

from meshrl import Mesh, Resources
from meshrl.engines.processes import ProcessEngine

NO_CORE = Resources(cpus=0)
PATIENCE = 20.0
"""Seconds: far more than it takes on a machine that has something else to do."""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine() -> AsyncIterator[ProcessEngine]:
    """Every column is left where it was made."""
    made = ProcessEngine(inline_bytes=0)
    yield made
    await made.close()


@pytest_asyncio.fixture(loop_scope="module")
async def mesh(engine: ProcessEngine) -> AsyncIterator[Mesh]:
    """Two ranks that need no core."""
    made = await Mesh.reserve(engine, 2, NO_CORE)
    yield made
    await made.stop()


def segments(*pids: int) -> set[Path]:
    """The shared memory that these processes have made."""
    files = [file.path for pid in pids for file in psutil.Process(pid).open_files() if file.mode != "r"]
    return {Path(path) for path in files if "/meshrl-pool-" in path and not path.endswith("(deleted)")}


def running(pids: Iterable[int]) -> list[int]:
    """Those that have not ended. One whose parent does not ask how it ended has."""
    found = []
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
        except psutil.NoSuchProcess:
            continue
    return found


async def until(holds: Callable[[], bool]) -> None:
    """Wait for it, letting others work."""
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, "it never held"
        await asyncio.sleep(0.01)


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait for what other processes do."""
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, "it never held"
        time.sleep(0.01)
