import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from ray.exceptions import RayActorError

from meshrl import Actor, Gather, Run, RunConfig, endpoint
from meshrl.engines.ray import RayEngine, logs
from meshrl.engines.ray.channel import RayChannel
from meshrl.engines.ray.logs import RankLogs, read_on
from meshrl.engines.remote import LogFolder, Place, Process, clock_ahead
from meshrl.errors import RankFailed
from meshrl.events import Call, Event, Span
from meshrl.testing import simulate
from tests.processes.conftest import until
from tests.ray.conftest import NO_CORE


class Clocked(Actor):
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


class FakeReader:
    error: Exception | None = None

    def __init__(self) -> None:
        self.read_on = self

    async def remote(self, files: Sequence[tuple[str, int]]) -> list[tuple[bytes, int]]:
        if self.error:
            raise self.error
        return read_on(files)


def rank(number: int, folder: Path) -> Process:
    (folder / f"{number}.out").touch()
    place = Place(number, "far", "10.0.0.2", "n1", 1, "another boot", files=[str(folder / f"{number}.out")])
    process = Process(f"{folder}-{number}", RayChannel(Mock()), place)
    process.log = LogFolder(folder / "main").of(number)
    return process


async def writes(process: Process, folder: Path, text: str) -> None:
    number = process.known.pid if process.known else 0
    with (folder / f"{number}.out").open("a") as file:
        file.write(text)
    await until(lambda: text in (folder / f"main-{number}.log").read_text())


async def test_a_new_rank_whose_nodes_reader_died_gets_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readers: list[FakeReader] = []

    def make(_: str) -> FakeReader:
        readers.append(FakeReader())
        return readers[-1]

    monkeypatch.setattr(logs, "_reader", make)
    monkeypatch.setattr(logs, "_PAUSE", 0.01)
    monkeypatch.setattr("ray.kill", lambda _: None)
    followed, old, new = RankLogs(), rank(0, tmp_path), rank(1, tmp_path)
    followed.follow(old)
    await writes(old, tmp_path, "once")
    readers[0].error = RayActorError()
    await followed.last("n1")
    followed.follow(new)
    await writes(new, tmp_path, "new")
    await writes(old, tmp_path, "again")
    assert (tmp_path / "main-0.log").read_text().count("once") == 1
    await followed.close()
