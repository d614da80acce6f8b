"""The local engine: real overlap, order, isolation, cancellation, failures, and no thread left behind."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, cast

import numpy as np
import pytest

from meshrl import (
    Actor,
    Batch,
    ContractError,
    Gather,
    LocalEngine,
    Mesh,
    MeshStopped,
    RankFailed,
    Resources,
    Same,
    at,
    current_rank,
    endpoint,
    stop,
)
from meshrl.engines.loop import RankLoop


class Probe(Actor):
    def __init__(self, fail_on: int = -1) -> None:
        if current_rank().index == fail_on:
            raise OSError("no such device")
        self.log: list[int] = []
        self.ended = ""
        self.made = 0

    @endpoint
    async def note(self, number: int) -> Same[list[int]]:
        self.log.append(number)
        return self.log

    @endpoint
    async def write(self, values: np.ndarray, table: dict[str, list[int]]) -> None:
        values[:] = 9
        table["a"].append(9)

    @endpoint
    async def write_batch(self, batch: Batch) -> None:
        batch.rewards[0] = 9

    @endpoint
    async def hang(self) -> None:
        self.ended = "running"
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.ended = "cancelled"
            raise

    @endpoint
    async def state(self) -> Same[str]:
        return self.ended

    @endpoint
    async def fail_on(self, rank: int) -> None:
        if current_rank().index == rank:
            raise ValueError(f"bad row {rank}")
        await self.hang()

    @endpoint
    async def count(self) -> AsyncIterator[Gather[np.ndarray]]:
        try:
            while True:
                self.made += 1
                yield np.array([self.made])
        finally:
            self.ended = "closed"

    @endpoint
    async def count_then_fail(self) -> AsyncIterator[Gather[np.ndarray]]:
        yield np.array([1])
        raise ValueError("stream broke")

    @endpoint
    async def leave(self) -> None:
        async def child() -> None:
            raise SystemExit(3)

        await asyncio.gather(child(), child())

    @endpoint
    async def threads(self) -> Same[int]:
        return current_rank().threads

    @endpoint
    async def made_(self) -> Same[int]:
        return self.made


async def until(probe: Probe, state: str) -> None:
    while await probe.state() != state:  # noqa: ASYNC110 -- the state is on another thread
        await asyncio.sleep(0.001)


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    before = set(threading.enumerate())
    engine = LocalEngine(cores=4)
    yield await Mesh.reserve(engine, 2, Resources(cpus=1))
    await engine.close()
    assert set(threading.enumerate()) == before


async def test_calls_start_in_the_order_they_were_made(mesh: Mesh) -> None:
    probe = await mesh.spawn(Probe)
    results = await asyncio.gather(*(probe.note(number) for number in range(20)))
    assert results[-1] == list(range(20))


async def test_a_rank_cannot_change_the_callers_values(mesh: Mesh) -> None:
    probe = await mesh.spawn(Probe)
    values, table, batch = np.zeros(3), {"a": [1]}, Batch.of(rewards=np.zeros(2, np.float32))
    await probe.write(values, table)
    assert values.tolist() == [0, 0, 0]
    assert table == {"a": [1]}
    with pytest.raises(RankFailed, match="read-only"):
        await probe.write_batch(batch)
    first = await probe.note(1)
    first.append(99)
    assert await probe.note(2) == [1, 2]


async def test_two_meshes_work_at_the_same_time(mesh: Mesh) -> None:
    """Each waits for the other: this would never end if the ranks shared a thread."""
    barrier = threading.Barrier(2, timeout=30)

    class Meets(Actor):
        @endpoint
        async def meet(self) -> None:
            _barriers[0].wait()

    _barriers[:] = [barrier]
    one, other = await mesh.spawn(Meets), await mesh.spawn(Meets)
    first, second = at(one, dp=0), at(other, dp=1)
    await asyncio.gather(first.meet(), second.meet())


_barriers: list[threading.Barrier] = []


async def test_cancelling_a_call_cancels_it_on_the_ranks(mesh: Mesh) -> None:
    probe = await mesh.spawn(Probe)
    call = asyncio.create_task(probe.hang())
    await until(probe, "running")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await until(probe, "cancelled")


async def test_an_exception_says_where_and_cancels_the_other_ranks(mesh: Mesh) -> None:
    probe = await mesh.spawn(Probe)
    with pytest.raises(RankFailed) as caught:
        await probe.fail_on(1)
    error = caught.value
    assert (error.actor, error.rank, error.axes, error.endpoint) == ("Probe", 1, {"dp": 1}, "fail_on")
    assert "Probe.fail_on on rank 1 (dp=1) failed: ValueError: bad row 1" in str(error)
    assert 'raise ValueError(f"bad row {rank}")' in error.traceback
    assert "engines" not in error.traceback
    assert isinstance(error.__cause__, ValueError)
    await until(at(probe, dp=0), "cancelled")


async def test_a_failed_constructor_fails_spawn_and_leaves_nothing(mesh: Mesh) -> None:
    before = threading.active_count()
    with pytest.raises(RankFailed, match=r"Probe.__init__ on rank 1 \(dp=1\) failed: OSError: no such device"):
        await mesh.spawn(Probe, fail_on=1)
    assert threading.active_count() == before
    assert await (await mesh.spawn(Probe)).note(1) == [1]


async def test_a_stopped_actor_refuses_calls_and_ends_the_running_ones(mesh: Mesh) -> None:
    probe, other = await mesh.spawn(Probe), await mesh.spawn(Probe)
    call = asyncio.create_task(probe.hang())
    await probe.state()
    await stop(probe)
    with pytest.raises(MeshStopped, match=r"Probe.hang was called on rank \d, but the actor is stopped"):
        await call
    with pytest.raises(MeshStopped):
        await probe.note(1)
    assert await other.note(1) == [1]


async def test_a_stream_waits_for_its_reader_and_closes_with_it(mesh: Mesh) -> None:
    probe = await mesh.spawn(Probe)
    stream = at(probe, dp=0).count()
    seen = [await anext(stream) for _ in range(3)]
    assert [value.tolist() for value in seen] == [[1], [2], [3]]
    await asyncio.sleep(0.05)
    assert await at(probe, dp=0).made_() <= 5
    await cast("AsyncGenerator[np.ndarray]", stream).aclose()
    await until(at(probe, dp=0), "closed")


async def test_a_stream_that_fails_says_where(mesh: Mesh) -> None:
    probe = at(await mesh.spawn(Probe), dp=1)
    stream = aiter(probe.count_then_fail())
    assert (await anext(stream)).tolist() == [1]
    with pytest.raises(RankFailed, match=r"Probe.count_then_fail on rank 1 \(dp=1\) failed: ValueError: stream broke"):
        await anext(stream)


async def test_stopping_ends_a_stream(mesh: Mesh) -> None:
    probe = at(await mesh.spawn(Probe), dp=0)
    stream = aiter(probe.count())
    await anext(stream)
    await stop(probe)
    with pytest.raises(MeshStopped):
        [value async for value in stream]


async def test_a_rank_outlives_a_task_that_exits(mesh: Mesh) -> None:
    probe = await mesh.spawn(Probe)
    with pytest.raises(RankFailed, match="SystemExit"):
        await probe.leave()
    assert await probe.note(1) == [1]


async def test_a_stop_that_is_cancelled_goes_on(mesh: Mesh) -> None:
    class Busy(Actor):
        @endpoint
        async def work(self) -> None:
            time.sleep(0.2)  # noqa: ASYNC251 -- a rank may block its own thread

    busy = await mesh.spawn(Busy)
    call = asyncio.create_task(busy.work())
    await asyncio.sleep(0.01)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(stop(busy), 0.02)
    with contextlib.suppress(MeshStopped):
        await call
    with pytest.raises(MeshStopped):
        await busy.work()


async def test_closing_a_stream_of_a_stopped_actor_is_quiet(mesh: Mesh) -> None:
    probe = at(await mesh.spawn(Probe), dp=0)
    stream = cast("AsyncGenerator[np.ndarray]", probe.count())
    await anext(stream)
    await stop(probe)
    await stream.aclose()


async def test_an_argument_that_cannot_be_copied_is_refused(mesh: Mesh) -> None:
    probe = await mesh.spawn(Probe)
    with pytest.raises(ContractError, match=r"Probe.note: an argument cannot be sent to a rank"):
        await cast("Any", probe).note(threading.Lock())


async def test_threads_follow_the_resources_and_never_exceed_the_free_cores() -> None:
    engine = LocalEngine(cores=4)
    granted = []
    for count, resources in [(1, Resources(cpus=2)), (1, Resources()), (1, Resources()), (1, Resources(cpus=64))]:
        probe = await (await Mesh.reserve(engine, count, resources)).spawn(Probe)
        granted.append(await probe.threads())
    assert granted == [2, 2, 1, 1]
    await engine.close()


async def test_cancelling_spawn_leaves_no_thread() -> None:
    class Slow(Actor):
        def __init__(self) -> None:
            time.sleep(0.2)

    engine = LocalEngine()
    before = threading.active_count()
    spawning = asyncio.create_task((await Mesh.reserve(engine, 2)).spawn(Slow))
    await asyncio.sleep(0.05)
    spawning.cancel()
    with pytest.raises(asyncio.CancelledError):
        await spawning
    assert threading.active_count() == before


def test_the_rank_loop_wakes_for_threads_files_and_timers() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        woken = asyncio.Event()
        threading.Timer(0.01, lambda: loop.call_soon_threadsafe(woken.set)).start()
        await asyncio.wait_for(woken.wait(), 30)
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        assert await asyncio.wait_for(reader.read(), 30) == b""
        woken.clear()
        threading.Timer(0.01, lambda: loop.call_soon_threadsafe(woken.set)).start()
        await asyncio.wait_for(woken.wait(), 30)
        writer.close()
        server.close()
        await server.wait_closed()

    with asyncio.Runner(loop_factory=RankLoop) as runner:
        runner.run(main())
