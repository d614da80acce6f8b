import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from typing import NoReturn

import numpy as np
import pytest
from numpy.typing import NDArray

import meshrl as rl
from meshrl.errors import MeshStopped
from meshrl.mesh import Same
from tests.processes.conftest import until


class Threads(rl.Actor):
    @rl.endpoint
    async def threads(self) -> Same[int]:
        return rl.current_rank().threads


class Rows(rl.Actor):
    @rl.endpoint
    async def come_inside(self, rows: rl.Shard[rl.Batch]) -> Same[bool]:
        return isinstance(rows.stored["rewards"], np.ndarray)


@pytest.fixture
async def mesh() -> AsyncIterator[rl.Mesh]:
    before = set(threading.enumerate())
    engine = rl.LocalEngine(cores=4)
    yield await rl.Mesh.reserve(engine, 2, rl.Resources(cpus=1))
    await engine.close()
    assert set(threading.enumerate()) == before


async def test_a_sharded_column_comes_with_the_call_where_each_rank_has_few_bytes_of_it() -> None:
    engine = rl.LocalEngine(inline_bytes=64)
    rows = await (await rl.Mesh.reserve(engine, 2, rl.Resources(cpus=0))).spawn(Rows)
    assert await rows.come_inside(rl.Batch.of(rewards=np.zeros(32, np.float32)))
    assert not await rows.come_inside(rl.Batch.of(rewards=np.zeros(33, np.float32)))
    await engine.close()


async def test_two_meshes_work_at_the_same_time(mesh: rl.Mesh) -> None:
    """Each waits for the other: this would never end if the ranks shared a thread."""
    barrier = threading.Barrier(2)

    class Meets(rl.Actor):
        @rl.endpoint
        async def meet(self) -> None:
            barrier.wait()

    one, other = await mesh.spawn(Meets), await mesh.spawn(Meets)
    for _ in range(2):
        await asyncio.gather(rl.at(one, dp=0).meet(), rl.at(other, dp=1).meet())
        await asyncio.gather(rl.respawn(one), rl.respawn(one))  # of which no thread is left, as the fixture sees


async def test_a_stop_that_is_cancelled_goes_on(mesh: rl.Mesh) -> None:
    begins, ends = threading.Event(), threading.Event()

    class Busy(rl.Actor):
        @rl.endpoint
        async def work(self) -> None:
            begins.set()
            ends.wait()  # a rank may block its own thread

    busy = await mesh.spawn(Busy)
    call = asyncio.create_task(busy.work())
    await until(begins.is_set)
    stopping = asyncio.create_task(rl.stop(busy))
    for _ in range(10):
        await asyncio.sleep(0)  # it has come as far as the thread
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    ends.set()
    with contextlib.suppress(MeshStopped):
        await call
    with pytest.raises(MeshStopped):
        await busy.work()


async def test_threads_follow_the_resources_and_never_exceed_the_free_cores() -> None:
    engine = rl.LocalEngine(cores=4)
    default = rl.Resources()
    for asked, granted in (rl.Resources(cpus=2), 2), (default, 2), (default, 1), (rl.Resources(cpus=64), 1):
        probe = await (await rl.Mesh.reserve(engine, 1, asked)).spawn(Threads)
        assert await probe.threads() == granted
    await engine.close()


async def test_cancelling_spawn_leaves_no_thread() -> None:
    begins, ends = threading.Event(), threading.Event()

    class Slow(rl.Actor):
        def __init__(self) -> None:
            begins.set()
            ends.wait()

    engine = rl.LocalEngine()
    before = threading.active_count()
    spawning = asyncio.create_task((await rl.Mesh.reserve(engine, 2)).spawn(Slow))
    await until(begins.is_set)
    spawning.cancel()
    ends.set()
    with pytest.raises(asyncio.CancelledError):
        await spawning
    assert threading.active_count() == before


class Paced(rl.Actor):
    """Ranks without a core share the caller's loop, and those that do not pause even a task."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    @rl.endpoint
    async def note(
        self, what: str, pause: float | None = None, *, cancels: bool = False, uncancels: bool = False
    ) -> rl.Gather[NDArray[np.int64]]:
        task = asyncio.current_task()
        assert task is not None
        if cancels:
            task.cancel()
        if uncancels:
            task.uncancel()
        self.seen.append(f"{what} begins")
        if pause is not None:
            try:
                await asyncio.sleep(pause)
            except asyncio.CancelledError:
                self.seen.append(f"{what} is cancelled")
                for _ in range(100):
                    await asyncio.sleep(0)
                raise
        assert asyncio.current_task() is task
        return np.array([rl.current_rank().index])

    @rl.endpoint
    async def hurried(self) -> Same[str]:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await asyncio.Event().wait()
        return "late"

    @rl.endpoint
    async def said(self) -> Same[list[str]]:
        return self.seen


@pytest.fixture
async def paced() -> AsyncIterator[Paced]:
    engine = rl.LocalEngine()
    yield await (await rl.Mesh.reserve(engine, 3, rl.Resources(cpus=0))).spawn(Paced)
    await engine.close()


async def test_ranks_on_one_loop_keep_the_order_and_their_own_rank(paced: Paced) -> None:
    calls = [paced.note("a", 0), paced.note("b"), paced.note("c", 0), paced.note("d")]
    found = await asyncio.gather(*calls)
    assert [ranks.tolist() for ranks in found] == [[0, 1, 2]] * 4
    assert await paced.said() == [f"{name} begins" for name in "abcd"]
    assert await paced.hurried() == "late"


async def test_ranks_on_one_loop_are_cancelled_each_for_itself(paced: Paced) -> None:
    long = asyncio.create_task(paced.note("long", 3600))
    await asyncio.sleep(0)  # it is sent; when the cancellation comes, the first rank has begun and the last has not
    long.cancel()
    await asyncio.wait({long})
    for uncancels in (False, True):
        calls = [paced.note("itself", cancels=True, uncancels=uncancels), paced.note("after", 0)]
        await asyncio.gather(*calls)
    first, *_, last = await rl.each(paced.said)()
    assert first == ["long begins", "long is cancelled", *["itself begins", "after begins"] * 2]
    assert last == ["itself begins", "after begins"] * 2


async def test_ranks_on_one_loop_begin_whatever_makes_the_loops_tasks(paced: Paced) -> None:
    def eager(*_: object, **__: object) -> NoReturn:
        raise AssertionError("an eager task would run a call before it is known")

    asyncio.get_running_loop().set_task_factory(eager)  # as Python 3.12 has one
    try:
        await paced.note("quick", 0)
    finally:
        asyncio.get_running_loop().set_task_factory(None)


async def test_a_stop_reaches_calls_that_have_not_begun_and_waits_for_others_to_end(paced: Paced) -> None:
    before = asyncio.all_tasks()
    calls = [asyncio.create_task(paced.note("begun", 3600))]
    await paced.said()
    calls += [asyncio.create_task(paced.note(str(number), 3600)) for number in range(3)]
    await asyncio.sleep(0)
    await rl.stop(paced)
    assert asyncio.all_tasks() <= before.union(calls), "no rank runs anything"
    for call in calls:
        with pytest.raises(MeshStopped):
            await call
