"""Events of ranks that are processes: measured there, on the clock of the caller."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from meshrl import Actor, Gather, Run, RunConfig, endpoint
from meshrl.engines.ray import RayEngine
from meshrl.engines.remote import clock_ahead
from meshrl.errors import RankFailed
from meshrl.events import Call, Event, Span
from meshrl.testing import simulate
from tests.ray.conftest import NO_CORE


class Clocked(Actor):
    """Tells the clock of its machine."""

    @endpoint
    async def now(self) -> Gather[NDArray[np.float64]]:
        return np.array([time.monotonic()])

    @endpoint
    async def times(self, count: int) -> AsyncIterator[Gather[NDArray[np.float64]]]:
        for _ in range(count):
            yield np.array([time.monotonic()])

    @endpoint
    async def fail(self) -> None:
        raise ValueError("as asked")


async def test_ranks_run_within_their_calls(engine: RayEngine, tmp_path: Path) -> None:
    async with Run(RunConfig(name="mine", folder=str(tmp_path)), engine=engine) as run:
        clocked = await (await run.mesh(2, NO_CORE)).spawn(Clocked)
        ran = await clocked.now() - run.recorder.began
        async for _ in clocked.times(10_000):
            break
        with pytest.raises(RankFailed):
            await clocked.fail()
    decoder = msgspec.json.Decoder(Event)
    events = [decoder.decode(line) for line in (run.folder / "events.jsonl").read_bytes().splitlines()]
    noted = [event for event in events if isinstance(event, Call)]
    assert [(call.endpoint, call.error) for call in noted] == [("now", None), ("times", None), ("fail", "RankFailed")]
    for call in noted:
        spans = [event for event in events if isinstance(event, Span) and event.call == call.id]
        assert sorted((span.mesh, span.actor, span.endpoint, span.rank) for span in spans) == [
            ("1", "Clocked", call.endpoint, rank) for rank in range(2)
        ]
        for span in spans:
            assert call.began <= span.began <= span.ended <= call.ended
            assert call.endpoint != "now" or span.began <= ran[span.rank] <= span.ended


def test_another_machines_clock_is_read_from_its_quickest_answer() -> None:
    delays = iter([4.0, 2.0, 0.5, 3.0, 1.0])

    async def ask() -> float:
        await asyncio.sleep(0.25)
        theirs = asyncio.get_running_loop().time() + 100
        await asyncio.sleep(next(delays))
        return theirs

    assert simulate(lambda: clock_ahead(ask)) == 100 - 0.125  # half of what the way back takes longer
