import asyncio
import gc
import threading
from collections.abc import AsyncIterator
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrl import Actor, Gather, LocalEngine, Mesh, Resources, endpoint
from meshrl.events import waiting
from meshrl.testing import Deadlock, LeftRunning, simulate


@given(st.lists(st.floats(0, 1e6), min_size=1), st.none() | st.integers())
def test_sleepers_wake_in_the_order_of_their_times(delays: list[float], seed: int | None) -> None:
    async def sleeper(delay: float) -> None:
        await asyncio.sleep(delay)
        woken.append((delay, asyncio.get_running_loop().time()))

    async def main() -> None:
        await asyncio.gather(*map(sleeper, delays))

    woken: list[tuple[float, float]] = []
    simulate(main, seed=seed)
    assert woken == [(delay, delay) for delay in sorted(delays)]


def raced(seed: int | None) -> list[int]:
    order: list[int] = []

    async def racer(number: int) -> None:
        for _ in range(3):
            await asyncio.sleep(1)
            order.append(number)

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(5):
                tasks.create_task(racer(number))

    simulate(main, seed=seed)
    return order


def test_a_seed_gives_an_order_and_seeds_differ() -> None:
    assert raced(None) == list(range(5)) * 3
    assert raced(3) == [0, 2, 3, 1, 4, 2, 0, 4, 1, 3, 3, 1, 4, 2, 0], "this order, in any process"
    orders = [raced(seed) for seed in range(20)]
    assert orders == [raced(seed) for seed in range(20)]
    assert len({tuple(order) for order in orders}) == 20
    assert all(sorted(order) == sorted([*range(5)] * 3) for order in orders)


@given(st.integers())
def test_what_asyncio_promises_holds_under_any_seed(seed: int) -> None:
    """First steps in the order of creation, plain callbacks in that of call_soon, those of a future in order."""

    async def step(number: int) -> None:
        steps.append(number)

    async def follow(future: asyncio.Future[None], number: int) -> None:
        await future
        followers.append(number)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        tasks = [asyncio.create_task(follow(future, number)) for number in range(3)]
        await asyncio.sleep(0)
        future.add_done_callback(lambda _: followers.append(3))
        future.set_result(None)
        tasks += [asyncio.create_task(step(number)) for number in range(5)]
        for number in range(5):
            loop.call_soon(plain.append, number)
        await asyncio.gather(*tasks)

    steps: list[int] = []
    plain: list[int] = []
    followers: list[int] = []
    simulate(main, seed=seed)
    assert steps == plain == [0, 1, 2, 3, 4]
    assert followers == [0, 1, 2, 3]


def test_a_deadlock_says_who_waits_for_what_and_where() -> None:
    async def trainer(queue: asyncio.Queue[int]) -> None:
        with waiting("trainer", "a batch", lambda: f"{queue.qsize()} of 8 groups are ready"):
            await queue.get()

    async def numbers(event: asyncio.Event) -> AsyncIterator[int]:
        await event.wait()
        yield 1

    async def reader(event: asyncio.Event) -> None:
        async for _ in numbers(event):
            pass

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(trainer(asyncio.Queue()), name="the trainer")
            tasks.create_task(reader(asyncio.Event()), name="the reader")

    with pytest.raises(Deadlock) as failure:
        simulate(main, seed=1)
    text = str(failure.value)
    assert "nothing can run" in text
    assert "trainer waits for a batch: 0 of 8 groups are ready" in text
    line = numbers.__code__.co_firstlineno + 1
    assert f"the reader stands at {__file__}:{line} in " in text
    assert "main.<locals>" not in text


def test_spinning_and_running_too_long_are_deadlocks(monkeypatch: pytest.MonkeyPatch) -> None:
    async def spin() -> None:
        for _ in range(10**9):
            await asyncio.sleep(0)

    async def forever() -> None:
        for _ in range(10**9):
            await asyncio.sleep(10)

    monkeypatch.setattr("meshrl.testing.clock._SPIN", 1000, raising=False)  # found sooner
    with pytest.raises(Deadlock, match="while the time stood still"):
        simulate(spin)
    with pytest.raises(Deadlock, match=r"at 25 s of virtual time the time limit of 25 s is reached"):
        simulate(forever, time_limit=25)


_kept: list[LocalEngine] = []
"""What a simulation that failed has left running, which ends with this process."""


def test_other_threads_and_real_files_are_refused_in_words() -> None:
    class Slow(Actor):
        @endpoint
        async def nothing(self) -> None:
            pass

    engine = LocalEngine()

    async def threads() -> None:
        mesh = await Mesh.reserve(engine, 1, Resources(cpus=1))
        await (await mesh.spawn(Slow)).nothing()

    async def files() -> None:
        await asyncio.open_connection("127.0.0.1", 9)

    with pytest.raises(Deadlock, match=r"meshrl-rank.*Resources\(cpus=0\)"):
        simulate(threads)
    _kept.append(engine)
    with pytest.raises(Deadlock, match="a file, a socket or a process"):
        simulate(files)


def test_what_is_left_running_is_an_error() -> None:
    async def sleeper() -> None:
        await asyncio.sleep(5)

    kept: list[object] = []

    async def careless() -> None:
        kept.append(asyncio.create_task(sleeper(), name="the sleeper"))
        await asyncio.sleep(1)

    async def numbers() -> AsyncIterator[int]:
        yield 1
        yield 2

    async def half() -> None:
        kept.append(stream := numbers())
        await anext(stream)

    async def failing() -> None:
        raise ValueError("unlucky")

    async def blind() -> None:
        task = asyncio.create_task(failing())
        await asyncio.sleep(1)
        del task

    async def finishing() -> None:
        kept.append(asyncio.create_task(asyncio.sleep(0)))

    gc.freeze()  # collections pass over what other tests have left
    with pytest.raises(LeftRunning, match=r"the sleeper stands at .*test_clock.py:\d+ in .*sleeper"):
        simulate(careless)
    with pytest.raises(LeftRunning, match=r"async generators have not: .*numbers"):
        simulate(half)
    with pytest.raises(LeftRunning, match="unlucky"):
        simulate(blind)
    simulate(finishing)
    gc.unfreeze()


def test_a_failure_is_told_that_a_cycle_has_held_for_long() -> None:
    class Box:
        def __init__(self, held: object) -> None:
            self.held, self.itself = held, self

    async def numbers() -> AsyncIterator[int]:
        yield 1
        yield 2

    async def failing() -> None:
        raise ValueError("unlucky")

    async def careless() -> None:
        lost: Box | None = Box(asyncio.create_task(failing()))
        for _ in range(60_000):  # until a collection has run
            await asyncio.sleep(0.001)
        del lost
        stream = numbers()
        Box(stream)
        await anext(stream)

    gc.freeze()
    with pytest.raises(LeftRunning, match="unlucky"):
        simulate(careless)
    gc.unfreeze()


def test_time_outs_threads_of_functions_and_meshes_without_cores_work() -> None:
    class Echo(Actor):
        @endpoint
        async def slowly(self, rows: int) -> AsyncIterator[Gather[np.ndarray]]:
            for row in range(rows):
                await asyncio.sleep(60)
                yield np.array([row])

    async def main() -> tuple[list[int], float]:
        with suppress(TimeoutError):
            async with asyncio.timeout(3600):
                await asyncio.sleep(7200)
        assert await asyncio.to_thread(threading.get_ident) == threading.get_ident()
        for _ in range(300):  # timers that are cancelled
            await asyncio.wait_for(asyncio.sleep(0.5), 100)
        engine = LocalEngine()
        echo = await (await Mesh.reserve(engine, 2, Resources(cpus=0))).spawn(Echo)
        rows = [int(value[0]) async for value in echo.slowly(3)]
        await engine.close()
        return rows, asyncio.get_running_loop().time()

    assert simulate(main, seed=5) == ([0, 0, 1, 1, 2, 2], 3750 + 180)


async def test_a_simulation_runs_where_a_loop_runs_as_in_a_notebook() -> None:
    async def day() -> float:
        await asyncio.sleep(86_400)
        return asyncio.get_running_loop().time()

    assert simulate(day) == 86_400
