"""A column that a rank makes where others read it: no byte of it is copied on its way."""

import asyncio
import os
from pathlib import Path

import numpy as np
import pytest

from meshrl import Actor, Batch, Gather, Mesh, Ragged, at, endpoint
from meshrl.engines.processes import ProcessEngine
from meshrl.mesh import Same, empty, is_in_place, pool
from tests.processes.conftest import NO_CORE, killed, segments, wait_until

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]

COUNT = 1 << 18
NBYTES = COUNT * 8


class Rows(Actor):
    @endpoint
    async def pid(self) -> Same[int]:
        return os.getpid()

    @endpoint
    async def make(self, value: float) -> Gather[Batch]:
        hidden = empty((COUNT, 2), np.float32)
        assert is_in_place(hidden)
        hidden[:] = value
        return Batch.of(hidden=hidden)

    @endpoint
    async def touch(self, note: str) -> None:
        Path(note).touch()

    @endpoint
    async def under_another_name(self, batch: Batch) -> Gather[Batch]:
        return Batch.of(states=batch["hidden"])

    @endpoint
    async def token_columns(self) -> Gather[Batch]:
        offsets = np.arange(COUNT + 1)
        tokens, mask = [Ragged(np.ones(COUNT, dtype), offsets) for dtype in (np.int32, bool)]
        return Batch.of(tokens=tokens, loss_mask=mask)

    @endpoint
    async def total(self, batch: Batch) -> Same[float]:
        return float(batch.row("states").sum(dtype=np.float64))


def memory_of(pid: int) -> int:
    return sum(path.stat().st_size for path in segments(pid))


def few(nbytes: int) -> bool:
    """Whether these are what goes with columns, and no copy of one."""
    return nbytes < NBYTES / 8


async def test_a_column_is_made_and_handed_on_without_a_copy(engine: ProcessEngine) -> None:
    maker, taker = [await (await Mesh.reserve(engine, 1, NO_CORE)).spawn(Rows) for _ in range(2)]
    named = await taker.under_another_name(await maker.make(3.0))
    assert few(memory_of(await maker.pid()) - NBYTES)
    assert few(memory_of(await taker.pid()))
    for value in (4.0, 5.0):
        await maker.make(value)  # in other memory
    assert (await named.load()).row("states").min() == 3.0
    await killed(await maker.pid())
    assert await taker.total(named) == 6.0 * COUNT  # it outlives the rank that made it


async def test_results_that_wait_for_their_reader_are_not_written_again(mesh: Mesh, tmp_path: Path) -> None:
    one, note = at(await mesh.spawn(Rows), dp=0), tmp_path / "note"
    calls = asyncio.gather(one.make(1.0), one.make(2.0), one.touch(str(note)))
    await asyncio.sleep(0)  # they are sent
    wait_until(note.exists)  # without reading what is answered
    *made, _ = await calls
    assert [(await batch.load()).row("hidden").max() for batch in made] == [1, 2]


async def test_what_columns_share_is_copied_once(mesh: Mesh) -> None:
    one = at(await mesh.spawn(Rows), dp=0)
    batch = await one.token_columns()
    assert few(memory_of(await one.pid()) - COUNT * (4 + 1 + 8))
    assert batch.elsewhere


async def test_what_a_reader_joins_is_handed_on_as_it_lies_there(
    engine: ProcessEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "hands_on", True)  # as `make_engine` does
    makers, taker = [await (await Mesh.reserve(engine, n, NO_CORE)).spawn(Rows) for n in (2, 1)]
    pids = [await at(makers, dp=rank).pid() for rank in range(2)]
    made = await (await makers.make(3.0)).load()
    assert is_in_place(made.row("hidden"))
    assert not made.row("hidden").flags.writeable
    here = memory_of(os.getpid())
    named = await taker.under_another_name(made)
    assert few(memory_of(await taker.pid()))
    assert few(memory_of(os.getpid()) - here)
    assert await taker.total(named) == 12.0 * COUNT

    named = await taker.under_another_name(await makers.make(3.0))
    joined = memory_of(await taker.pid())
    assert few(joined - 2 * NBYTES), "it joins them once"
    await killed(*pids)
    assert await taker.total(named) == 12.0 * COUNT
    assert memory_of(await taker.pid()) == joined
