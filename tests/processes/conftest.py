"""Tests of what only processes of one machine have: their sockets, their shared memory, their cores and GPUs."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path

import numpy as np
import psutil
import pytest
import pytest_asyncio
from numpy.typing import NDArray

from meshrl import Actor, Gather, Mesh, Resources, endpoint
from meshrl.engines.processes import ProcessEngine

NO_CORE = Resources(cpus=0)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[ProcessEngine]:
    """One for a file's tests, which imports its `MODULES` once. Every column is left where it was made."""
    made = ProcessEngine(getattr(request.module, "MODULES", ()), inline_bytes=0)
    yield made
    await made.close()


@pytest_asyncio.fixture(loop_scope="module")
async def mesh(engine: ProcessEngine) -> AsyncIterator[Mesh]:
    made = await Mesh.reserve(engine, 2, NO_CORE)
    yield made
    await made.stop()


class Numbered(Actor):
    @endpoint
    async def pid(self) -> Gather[NDArray[np.int64]]:
        return np.array([os.getpid()])

    @endpoint
    async def hang(self) -> None:
        await asyncio.Event().wait()

    @endpoint
    async def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Breaks:
    def __init__(self, how: str) -> None:
        self.how = how

    def __reduce__(self) -> tuple[object, ...]:
        return _broken, (self.how,)


def _broken(how: str) -> None:
    if how == "exit":
        sys.exit(3)
    raise ValueError("a file \udcff of no name")


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        subprocess, "Popen", next(kind for kind in subprocess.Popen.mro() if kind.__module__ == "subprocess")
    )


def segments(*pids: int) -> set[Path]:
    files = [file.path for pid in pids for file in psutil.Process(pid).open_files() if file.mode != "r"]
    return {Path(path) for path in files if "/meshrl-" in path and not path.endswith("(deleted)")}


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


async def killed(*pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    await until(lambda: not running(pids))


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 -- what other processes do
        await asyncio.sleep(0.01)


def wait_until(holds: Callable[[], bool]) -> None:
    while not holds():
        time.sleep(0.01)


def made_now(make: Callable[[], ProcessEngine]) -> tuple[ProcessEngine, list[int]]:
    before = {child.pid for child in psutil.Process().children()}
    engine = make()
    return engine, [child.pid for child in psutil.Process().children() if child.pid not in before]
