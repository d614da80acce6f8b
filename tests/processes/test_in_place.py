"""A column that a rank makes where others read it: no byte of it is copied on its way."""

import os

import numpy as np
import pytest

from meshrl import Actor, Batch, Gather, Mesh, Ragged, Same, at, endpoint
from meshrl.engines.local import LocalEngine
from meshrl.engines.processes import ProcessEngine
from meshrl.mesh import empty, is_in_place, pool
from tests.processes.conftest import NO_CORE
from tests.processes.test_deaths import killed

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]

COUNT = 1 << 18


class Rows(Actor):
    @endpoint
    async def pid(self) -> Same[int]:
        return os.getpid()

    @endpoint
    async def make(self, value: float) -> Gather[Batch]:
        hidden = empty((COUNT, 2), np.float32)
        hidden[:] = value
        return Batch.of(hidden=hidden)

    @endpoint
    async def is_in_place(self) -> Same[bool]:
        return is_in_place(empty(COUNT, np.float32))

    @endpoint
    async def under_another_name(self, batch: Batch) -> Gather[Batch]:
        return Batch.of(states=batch["hidden"])

    @endpoint
    async def token_columns(self) -> Gather[Batch]:
        offsets = np.arange(COUNT + 1)
        return Batch.of(
            tokens=Ragged(np.ones(COUNT, np.int32), offsets), loss_mask=Ragged(np.ones(COUNT, bool), offsets)
        )

    @endpoint
    async def total(self, batch: Batch) -> Same[float]:
        return float(batch.row("states").sum(dtype=np.float64))

    @endpoint
    async def copied(self) -> Same[int]:
        return pool.copied

    @endpoint
    async def gathered(self) -> Same[int]:
        return pool.gathered


async def test_a_column_is_made_and_handed_on_without_a_copy(engine: ProcessEngine) -> None:
    maker, taker = [await (await Mesh.reserve(engine, 1, NO_CORE)).spawn(Rows) for _ in range(2)]
    named = await taker.under_another_name(await maker.make(3.0))
    assert await maker.copied() == await taker.copied() == 0
    for value in (4.0, 5.0):
        await maker.make(value)  # in other memory
    assert (await named.load()).row("states").min() == 3.0
    await killed(await maker.pid())
    assert await taker.total(named) == 6.0 * COUNT  # it outlives the rank that made it


async def test_what_columns_share_is_copied_once(mesh: Mesh) -> None:
    maker = await mesh.spawn(Rows)
    before = await maker.copied()
    await maker.token_columns()
    assert await maker.copied() - before == COUNT * (4 + 1 + 8) + 8


async def test_where_ranks_are_threads_it_is_an_array_as_any(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "hands_on", False)  # as `make_engine("local")` does, whatever ran here before
    assert await (await mesh.spawn(Rows)).is_in_place()
    engine = LocalEngine()
    rows = await (await Mesh.reserve(engine, 1)).spawn(Rows)
    assert not await rows.is_in_place()
    await engine.close()


async def test_what_a_reader_joins_is_handed_on_as_it_lies_there(
    engine: ProcessEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the controller and on a rank: nobody copies it again, and it outlives those that made the pieces."""
    monkeypatch.setattr(pool, "hands_on", True)  # as `make_engine` does
    makers, taker = [await (await Mesh.reserve(engine, n, NO_CORE)).spawn(Rows) for n in (2, 1)]
    pids = [await at(makers, dp=rank).pid() for rank in range(2)]
    for joins in ("controller", "rank"):
        made = await makers.make(3.0)
        if joins == "controller":
            made = await made.load()
            assert is_in_place(made.row("hidden"))
            assert not made.row("hidden").flags.writeable
        before, gathered = pool.copied, await taker.gathered()
        named = await taker.under_another_name(made)
        assert await taker.gathered() - gathered == (0 if joins == "controller" else 2 * 2 * COUNT * 8)
        assert pool.copied == before
        assert await taker.total(named) == 12.0 * COUNT
    before = await taker.gathered()
    for pid in pids:
        await killed(pid)
    assert await taker.total(named) == 12.0 * COUNT
    assert await taker.gathered() == before
