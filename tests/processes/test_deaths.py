import asyncio
from pathlib import Path

import numpy as np
import psutil
import pytest
from numpy.typing import NDArray

from meshrl import Batch, Gather, Mesh, Shard, endpoint, respawn
from meshrl.engines.processes import ProcessEngine
from meshrl.errors import MeshStopped
from tests.processes.conftest import NO_CORE, Numbered, killed, running, segments, until

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]

ROWS = 100_000


class Rows(Numbered):
    def __init__(self) -> None:
        self.kept: Batch | None = None

    @endpoint
    async def make(self, value: int) -> Gather[Batch]:
        return Batch.of(rewards=np.full(ROWS, float(value)))

    @endpoint
    async def same(self, batch: Shard[Batch]) -> Gather[NDArray[np.float32]]:
        return batch.rewards

    @endpoint
    async def keep(self, batch: Shard[Batch]) -> None:
        self.kept = batch

    @endpoint
    async def linger(self, note: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            Path(note).touch()
            await asyncio.Event().wait()


async def test_columns_of_a_killed_rank_are_read_while_a_batch_names_them(engine: ProcessEngine, mesh: Mesh) -> None:
    rows = await mesh.spawn(Rows)
    pids = (await rows.pid()).tolist()
    batch, spare = await rows.make(1), await rows.make(2)
    first = batch.select([0])
    left = segments(*pids)
    assert len(left) == 4
    del spare
    await killed(*pids)

    other = await (await Mesh.reserve(engine, 1, NO_CORE)).spawn(Rows)
    assert (await other.same(batch)).sum() == 2 * ROWS
    assert (await batch.load()).rewards.sum() == 2 * ROWS
    await until(lambda: sum(path.exists() for path in left) == 2)  # what no batch names goes with its rank
    del batch
    await until(lambda: sum(path.exists() for path in left) == 1)
    assert (await first.load()).rewards.tolist() == [1]
    del first
    await until(lambda: not any(path.exists() for path in left))


async def test_what_a_killed_reader_had_leased_is_written_again(engine: ProcessEngine) -> None:
    maker, reader = [await (await Mesh.reserve(engine, 1, NO_CORE)).spawn(Rows) for _ in range(2)]
    (pid,) = (await maker.pid()).tolist()
    batch = await maker.make(1)
    await reader.keep(batch)
    del batch
    leased = len(segments(pid))
    batch = await maker.make(2)
    assert len(segments(pid)) == leased + 1, "what is leased is not written again"
    await killed(*(await reader.pid()).tolist())
    again = await maker.make(3)
    assert len(segments(pid)) == leased + 1
    assert (await batch.load()).rewards[0] == 2
    assert (await again.load()).rewards[0] == 3


async def test_a_mesh_stopped_while_it_is_made_again_gets_no_processes(engine: ProcessEngine, tmp_path: Path) -> None:
    mesh = await Mesh.reserve(engine, 2, NO_CORE)
    rows = await mesh.spawn(Rows)
    pids = (await rows.pid()).tolist()
    parent = psutil.Process(pids[0]).parent()
    assert parent is not None
    others = {child.pid for child in parent.children()} - set(pids)
    lingering = asyncio.create_task(rows.linger(str(tmp_path / "note")))
    await rows.pid()
    again = asyncio.create_task(respawn(rows))
    await until((tmp_path / "note").exists)  # it waits for calls that do not end
    await mesh.stop()
    with pytest.raises(MeshStopped, match="cannot be respawned on rank 0: its mesh is stopped"):
        await again
    with pytest.raises(MeshStopped):
        await lingering
    await until(lambda: not running(pids))
    assert set(running(child.pid for child in parent.children())) <= others
