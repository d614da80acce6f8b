import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np
import psutil
import pytest
import ray

import meshrl as rl
from meshrl.engines.ray import RayEngine
from meshrl.errors import DataLost, MeshStopped, RankDied, RankFailed
from meshrl.mesh import CollectiveActor
from meshrl_torch.train.fsdp.roles import FsdpPolicy
from tests.backends.material import MODEL, updated
from tests.processes.conftest import killed, running, until, wait_until
from tests.ray.conftest import NO_CORE, Probe, stored

if TYPE_CHECKING:
    from meshrl.engines.ray.channel import RayChannel

T = TypeVar("T")


class Meets(rl.Actor, CollectiveActor):
    """Rank 1 dies in a collective, and rank 0 fails of that at once."""

    def agree(self, work: Callable[[], T]) -> list[T]:
        return [work()]

    @rl.endpoint
    async def meet(self) -> None:
        if rl.current_rank().index == 1:
            os._exit(1)
        raise RuntimeError("connection closed by peer")


@pytest.mark.usefixtures("from_afar")
async def test_a_death_elsewhere_is_told_for_what_it_causes(engine: RayEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The news of it waits for the last output, which comes from the other machine."""
    monkeypatch.setattr("meshrl.engines.remote.caller.boot_id", lambda: "another machine")
    slots = await engine.reserve(2, NO_CORE)
    meets = await rl.Mesh(engine, slots).spawn(Meets)
    asked, comes = asyncio.Event(), asyncio.Event()

    async def last_output() -> None:
        asked.set()
        await comes.wait()

    cast("RayChannel", slots[1].process.channel).farewell = last_output
    meeting = asyncio.create_task(meets.meet())
    await asked.wait()
    for _ in range(20):
        await asyncio.sleep(0)
    assert not meeting.done()  # neither the failure of rank 0 nor the death
    comes.set()
    with pytest.raises(RankDied, match="rank 1"):
        await meeting


def present() -> set[object]:
    groups = ray.util.placement_group_table().items()
    found: set[object] = {name for name, group in groups if group["state"] != "REMOVED"}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            title = "".join(process.cmdline()[:1])  # of its class, or of the call that began last
            if title.startswith("ray::") and not title.startswith("ray::IDLE"):
                found.add(process.pid)
    return found


@pytest.mark.usefixtures("ray_cluster")
async def test_a_mesh_a_run_and_a_start_leave_nothing_behind(tmp_path: Path) -> None:
    before = present()
    engine, pids = RayEngine(), list[int]()
    mesh = await rl.Mesh.reserve(engine, 2, NO_CORE)
    probe = await mesh.spawn(Probe)
    pids += (await probe.pid()).tolist()
    call = asyncio.create_task(probe.hang())
    await until(lambda: set(pids) < present() - before)  # the title of a process is not whole while it is written
    await mesh.stop()
    for stopped in (call, probe.pid(), rl.respawn(probe), mesh.spawn(Probe)):
        with pytest.raises(MeshStopped):
            await stopped
    await until(lambda: present() <= before)

    async def train() -> None:
        async with rl.Run(rl.RunConfig(folder=str(tmp_path), engine="ray")) as run:
            probe = await (await run.mesh(2, NO_CORE)).spawn(Probe)
            pids.extend((await probe.pid()).tolist())
            batch = await probe.make(500_000)
            await killed(pids[-1])
            await probe.take(batch)

    with pytest.raises(RankDied):
        await train()
    await until(lambda: present() <= before and stored() <= 1_000_000)  # the batch had 8 MB

    reserving = asyncio.create_task(rl.Mesh.reserve(engine, 2, NO_CORE))
    await until(lambda: not present() <= before)
    reserving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reserving
    await until(lambda: present() <= before and not running(pids))
    await engine.close()


async def test_closed_engines_join_no_cluster(from_afar: None, mesh: rl.Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = await mesh.spawn(Probe)
    batch = await probe.make(50_000)
    with monkeypatch.context() as patched:
        patched.setattr(ray, "is_initialized", lambda: False)
        with pytest.raises(MeshStopped, match="the engine is closed"):
            await probe.take(np.zeros(100_000))
        with pytest.raises(DataLost, match="the engine is closed"):
            await batch.load()


async def until_it_fails(policy: rl.Policy, batch: rl.Batch) -> None:
    while True:  # Ray notices a death a moment later
        await policy.logprobs(batch)


@pytest.mark.wide
async def test_rows_that_one_rank_alone_has_lost_leave_the_others_free(ray_cluster: None, from_afar: None) -> None:
    engine = RayEngine(inline_bytes=0)
    mesh = (await rl.Mesh.reserve(engine, 2, NO_CORE)).shape(dp=2)
    policy, killer = await mesh.spawn(FsdpPolicy, rl.PolicyConfig(model=MODEL)), await mesh.spawn(Probe)
    maker = await (await rl.Mesh.reserve(engine, 2, NO_CORE)).spawn(Probe)
    batch = (await maker.make(9)).assign(loss_mask=rl.Ragged(np.arange(36) % 9 > 2, np.arange(0, 37, 9)))
    with pytest.raises(RankDied):
        await rl.at(maker, dp=1).die()
    with pytest.raises(RankFailed, match=r"DataLost: the columns .* cannot be read from .*: the rank has died"):
        await until_it_fails(policy, batch)
    await updated(policy)
    assert (await policy.weights()).version == 1
    with pytest.raises(RankDied):
        await rl.at(killer, dp=1).die()
    await rl.respawn(policy)
    await updated(policy)
    assert (await policy.weights()).version == 1, "of new ranks, which have begun anew"
    await engine.close()


SCRIPT = """
import asyncio, os
import numpy as np
from meshrl import Actor, Gather, Mesh, Resources, endpoint
from meshrl.engines.ray import RayEngine

class Mine(Actor):
    @endpoint
    async def pid(self) -> Gather[np.ndarray]:
        return np.array([os.getpid(), os.getppid()])

async def main():
    engine = RayEngine()
    mine = await (await Mesh.reserve(engine, 2, Resources(cpus=0))).spawn(Mine)
    print("pids", *await mine.pid(), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.wide
@pytest.mark.slow
@pytest.mark.process
def test_a_controller_that_is_killed_takes_its_ranks_and_its_own_cluster_with_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = ["env", "-u", "RAY_ADDRESS", sys.executable, str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        found = next((line for line in started.stdout if line.startswith("pids")), "")
        started.kill()
        started.communicate()
    pids = [int(word) for word in found.split()[1:]]
    assert len(pids) == 4
    wait_until(lambda: not running(pids))
