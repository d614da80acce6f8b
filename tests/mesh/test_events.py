import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from structlog.testing import capture_logs

import meshrl as rl
from meshrl.errors import RankFailed
from meshrl.events import Call, Event, EventLog, Gauge, Span, Step, gauge, sink
from meshrl.mesh import free_cores
from meshrl.run import MeshConfig
from meshrl.testing import Deadlock, simulate


class Clocked(rl.Actor):
    @rl.endpoint
    async def now(self) -> rl.Gather[NDArray[np.float64]]:
        return np.array([asyncio.get_running_loop().time()])

    @rl.endpoint
    async def rows(self, batch: rl.Shard[rl.Batch]) -> rl.Gather[rl.Batch]:
        return batch

    @rl.endpoint
    async def times(self, count: int, pause: float) -> AsyncIterator[rl.Gather[NDArray[np.float64]]]:
        for _ in range(count):
            await asyncio.sleep(pause)
            yield np.array([asyncio.get_running_loop().time()])

    @rl.endpoint
    async def fail(self, pause: float) -> None:
        await asyncio.sleep(pause)
        raise ValueError("as asked")


def read(folder: Path) -> list[Event]:
    decoder = msgspec.json.Decoder(Event)
    lines = (folder / "events.jsonl").read_bytes().splitlines(keepends=True)
    assert all(line.endswith(b"\n") for line in lines)
    return [decoder.decode(line) for line in lines]


def calls(events: list[Event]) -> dict[str, tuple[Call, list[Span]]]:
    spans = sorted((event for event in events if isinstance(event, Span)), key=lambda span: span.rank)
    found = [event for event in events if isinstance(event, Call)]
    return {call.endpoint: (call, [span for span in spans if span.call == call.id]) for call in found}


def config(folder: Path) -> rl.RunConfig:
    return rl.RunConfig(name="mine", folder=str(folder))


async def test_ranks_run_within_their_calls_and_are_noted_while_the_script_waits(tmp_path: Path) -> None:
    async with rl.Run(config(tmp_path)) as run:
        assert isinstance(sink.get(), EventLog)
        clocked = await (await run.mesh(2, rl.Resources(cpus=1))).spawn(Clocked)
        await clocked.rows(rl.Batch.of(tokens=rl.Ragged.of([[1, 2], [3], [4]], np.int32)))
        written = dict[str, tuple[Call, list[Span]]]()
        while "rows" not in written:
            await asyncio.sleep(0.05)
            written = calls(read(run.folder))
        assert [span.rank for span in written["rows"][1]] == [0, 1]
        ran = await clocked.now() - run.recorder.began
        async for _ in rl.at(clocked, dp=0).times(1000, 0):
            break
        seen = [value - run.recorder.began async for value in clocked.times(3, 0.001)]
        await rl.each(rl.at(clocked, dp=1).rows)(rl.Batch.of(prompt=["a", "b"]))
        with pytest.raises(RankFailed):
            await clocked.fail(0)
    assert sink.get() is None
    events = read(run.folder)
    noted = [event for event in events if isinstance(event, Call)]
    assert [(call.endpoint, call.rows, call.tokens, call.error) for call in noted] == [
        ("rows", 3, 4, None),
        ("now", None, None, None),
        ("times", None, None, None),  # a stream that is left has not failed
        ("times", None, None, None),
        ("rows", 2, None, None),
        ("fail", None, None, "RankFailed"),
    ]
    assert [event.rank for event in events if isinstance(event, Span) and event.call == noted[2].id] == [0]
    found = calls(events)
    for name in ("now", "times"):
        call, spans = found[name]
        assert [(span.mesh, span.rank, span.actor, span.endpoint) for span in spans] == [
            ("1", rank, "Clocked", name) for rank in range(2)
        ]
        assert all(0 <= call.began <= span.began <= span.ended <= call.ended for span in spans)
    assert all(span.began <= time <= span.ended for span, time in zip(found["now"][1], ran, strict=True))
    streams = found["times"][1]
    assert min(span.began for span in streams) <= min(seen) <= max(seen) <= max(span.ended for span in streams)
    assert [span.rank for span in found["rows"][1]] == [1]


async def test_meshes_have_their_names_and_cores(tmp_path: Path) -> None:
    meshes = {"side": MeshConfig(ranks=2, axes={"dp": 1, "tp": 2}, cpus=0)}
    async with rl.Run(config(tmp_path).model_copy(update={"meshes": meshes})) as run:
        for cpus in (1, 0, None):
            await run.mesh(1, rl.Resources(cpus=cpus))
        reward = await run.spawn(rl.Reward, rl.RewardConfig(backend="fake", mesh="side"))
        await reward.score(rl.Batch.of(completion=["a"], answer=["a"]))
    events = read(run.folder)
    _, spans = calls(events)["score"]
    assert [(span.mesh, span.rank) for span in spans] == [("side", 0), ("side", 1)]
    cores = {event.name: event.value for event in events if isinstance(event, Gauge)}
    assert cores == {"cores of 1": 1, "cores of 3": max(1, free_cores() - 1)}


@pytest.mark.parametrize("wanted", [3, 9])
def test_steps_cover_the_run_also_one_that_breaks_off_in_virtual_time(tmp_path: Path, wanted: int) -> None:
    async def script() -> rl.Run:
        async with rl.Run(config(tmp_path)) as run:
            clocked = await (await run.mesh(1, rl.Resources(cpus=0))).spawn(Clocked)
            async for step in run.steps(wanted):
                with pytest.raises(RankFailed):
                    await clocked.fail(3600)
                await run.record(rl.Metrics({}))
                if (step, wanted) == (2, 9):
                    break
        return run

    with capture_logs():
        run = simulate(script)
    events = read(run.folder)
    steps = [event for event in events if isinstance(event, Step)]
    assert steps == [Step(0, 0, 3600), Step(1, 3600, 7200), Step(2, 7200, 10800)]
    assert [event.ended - event.began for event in events if isinstance(event, Span)] == [3600] * 3
    lines = [msgspec.json.decode(line) for line in (run.folder / "metrics.jsonl").read_bytes().splitlines()]
    assert [(line["seconds"], line["step_s"]) for line in lines] == [(3600, 3600), (7200, 3600), (10800, 3600)]


def test_what_is_unwritten_keeps_no_simulation_alive(tmp_path: Path) -> None:
    async def script() -> None:
        async with rl.Run(config(tmp_path)):
            gauge("depth", 1.0)
            await asyncio.Event().wait()

    with pytest.raises(Deadlock, match="no timer will change that"):
        simulate(script)
    assert [event.name for event in read(tmp_path / "mine") if isinstance(event, Gauge)] == ["depth"]


def test_the_newest_events_are_kept_and_no_more_also_where_the_folder_was_renamed(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    log = EventLog(first / "events.jsonl", most=4096)
    first.rename(second)
    log.moved(second)
    for number in range(1000):
        log.emit(Gauge("number", 0.0, float(number)))
        if number % 7 == 0:
            log.flush()
    log.close()
    files = [second / "events-before.jsonl", second / "events.jsonl"]
    assert sorted(second.iterdir()) == files
    assert sum(file.stat().st_size for file in files) <= 4096
    lines = [line for file in files for line in file.read_text("utf-8").splitlines()]
    assert len(lines) > 20
    assert '"value":999.0' in lines[-1]
