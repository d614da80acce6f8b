"""What is left of a cluster when a mesh goes, and of ranks when a cluster does."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np
import psutil
import pytest
import ray

from meshrl import (
    Actor,
    CollectiveActor,
    DataLost,
    Mesh,
    MeshStopped,
    RankDied,
    Resources,
    Run,
    RunConfig,
    current_rank,
    endpoint,
    respawn,
)
from meshrl.engines.ray import RayEngine
from tests.engines.test_deaths import Probe, kill, pids_of, until

if TYPE_CHECKING:
    from meshrl.engines.ray.channel import RayChannel

NO_CORE = Resources(cpus=0)

T = TypeVar("T")


class Meets(Actor, CollectiveActor):
    """Rank 1 dies in a collective, and rank 0 fails of that at once."""

    def agree(self, work: Callable[[], T]) -> list[T]:
        return [work()]

    @endpoint
    async def meet(self) -> None:
        if current_rank().index == 1:
            os._exit(1)
        raise RuntimeError("connection closed by peer")


def present() -> set[object]:
    """The placement groups of this test's cluster, and the processes of its ranks."""
    groups = ray.util.placement_group_table().items()
    found: set[object] = {name for name, group in groups if group["state"] != "REMOVED"}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            title = "".join(process.cmdline()[:1])  # of its class, or of the call that began last
            if title.startswith("ray::") and not title.startswith("ray::IDLE"):
                found.add(process.pid)
    return found


@pytest.fixture
def before(ray_cluster: None) -> set[object]:
    """What was there before the test: other tests on this cluster keep ranks for the whole session."""
    return present()


async def nothing_is_left(before: set[object], *pids: int) -> bool:
    for _ in range(200):
        if present() <= before and not any(map(psutil.pid_exists, pids)):
            return True
        await asyncio.sleep(0.05)
    return False


@pytest.mark.usefixtures("from_afar")
async def test_a_death_elsewhere_is_told_for_the_failure_that_it_causes(
    engine: RayEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The news of it waits for the last output, which comes from the other machine."""
    monkeypatch.setattr("meshrl.engines.hosting.caller.boot", lambda: "another machine")
    slots = await engine.reserve(2, NO_CORE)
    meets = await Mesh(engine, slots).spawn(Meets)
    fetched = asyncio.Event()

    async def last_output() -> None:
        await asyncio.sleep(0.5)
        fetched.set()

    cast("RayChannel", slots[1].process.channel).farewell = last_output
    with pytest.raises(RankDied, match="rank 1") as died:
        await meets.meet()
    assert fetched.is_set()
    assert "connection closed by peer" in str(died.value.__cause__)


async def test_a_mesh_leaves_nothing_behind(engine: RayEngine, before: set[object]) -> None:
    mesh = await Mesh.reserve(engine, 2, NO_CORE)
    probe = await mesh.spawn(Probe)
    pids = await pids_of(probe)
    call = asyncio.create_task(probe.hang())
    await probe.add()
    await until(lambda: set(pids) < present() - before)  # the title of a process is not whole while it is written
    await mesh.stop()
    with pytest.raises(MeshStopped):
        await call
    with pytest.raises(MeshStopped):
        await probe.add()
    with pytest.raises(MeshStopped, match="its mesh is stopped"):
        await respawn(probe)
    with pytest.raises(MeshStopped, match="its mesh is stopped"):
        await mesh.spawn(Probe)
    assert await nothing_is_left(before, *pids)
    await mesh.stop()


def stored() -> float:
    """Bytes in the object store."""
    free, total = (found["object_store_memory"] for found in (ray.available_resources(), ray.cluster_resources()))
    return float(total - free)


async def test_a_run_that_ends_by_a_death_leaves_nothing_behind(before: set[object], tmp_path: Path) -> None:
    pids: list[int] = []

    async def train() -> None:
        async with Run(RunConfig(folder=str(tmp_path), engine="ray")) as run:
            probe = await (await run.mesh(2, NO_CORE)).spawn(Probe)
            pids.extend(await pids_of(probe))
            batch = await probe.make(500_000)
            await kill(pids[1])
            await probe.take(batch)

    with pytest.raises(RankDied):
        await train()
    assert await nothing_is_left(before, *pids)
    await until(lambda: stored() <= 1_000_000)  # the batch had 8 MB


async def test_a_start_that_is_cancelled_leaves_nothing_behind(engine: RayEngine, before: set[object]) -> None:
    reserving = asyncio.create_task(Mesh.reserve(engine, 2, NO_CORE))
    await until(lambda: not present() <= before)
    reserving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reserving
    assert await nothing_is_left(before)


async def test_a_closed_engine_joins_no_other_cluster(
    from_afar: None, mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = await mesh.spawn(Probe)
    batch = await probe.make(50_000)
    with monkeypatch.context() as patched:
        patched.setattr(ray, "is_initialized", lambda: False)
        with pytest.raises(MeshStopped, match="the engine is closed"):
            await probe.take(np.zeros(100_000))
        with pytest.raises(DataLost, match="the engine is closed"):
            await batch.load()


SCRIPT = """
import asyncio, os
from meshrl import Actor, Gather, Mesh, Resources, endpoint
from meshrl.engines.ray import RayEngine
from tests.engines.test_deaths import Probe, kill, pids_of, until
import numpy as np

class Mine(Actor):
    @endpoint
    async def pid(self) -> Gather[np.ndarray]:
        return np.array([os.getpid(), os.getppid()])

async def main():
    engine = RayEngine()
    mine = await (await Mesh.reserve(engine, 2, Resources(cpus=0))).spawn(Mine)
    print("pids", *await mine.pid(), flush=True)
    {end}

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "status"),
    [("await asyncio.sleep(100)", -9), ("raise SystemExit(3)", 3)],
)
def test_a_controller_takes_its_ranks_with_it(tmp_path: Path, end: str, status: int) -> None:
    """Killed, or failed and never closed: its own cluster ends too. Its classes are a script's own."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("{end}", end))
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment) as started:
        assert started.stdout is not None
        found = next((line for line in started.stdout if line.startswith("pids")), "")
        if status == -9:
            started.kill()
        started.communicate(timeout=60)
    assert started.returncode == status
    pids = [int(word) for word in found.split()[1:]]
    assert len(pids) == 4
    deadline = time.monotonic() + 30
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < deadline, f"of {pids} some still run"
        time.sleep(0.1)
