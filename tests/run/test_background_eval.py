"""What is measured beside steps: when it begins, one at a time, and how it ends."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import pytest
from structlog.testing import capture_logs

from meshrl.errors import MeshrlError
from meshrl.run import BackgroundEvaluations, Measurement
from meshrl.testing import simulate


def steps(seconds: float, every: int, wait: bool = False) -> tuple[list[tuple[str, float]], list[int], float]:
    """Six steps of a second each: what happened when, what was recorded, and how long it took."""

    async def script() -> tuple[list[tuple[str, float]], list[int], float]:
        happened: list[tuple[str, float]] = []
        recorded: list[int] = []
        clock = asyncio.get_running_loop().time
        beside = BackgroundEvaluations(lambda step, _: recorded.append(step))

        async def prepare() -> None:
            happened.append(("prepare", clock()))

        async def measure() -> Mapping[str, float]:
            happened.append(("begin", clock()))
            await asyncio.sleep(seconds)
            happened.append(("end", clock()))
            return {}

        beside.measurement = Measurement(every, measure, wait, prepare)
        for done in range(6):
            await beside.turn(done)
            await beside.turn(done)  # also where a loop ends and another begins
            await asyncio.sleep(1)
        await beside.turn(6)
        await beside.settle()
        return happened, recorded, clock()

    return simulate(script)


def test_it_runs_beside_the_steps_which_may_wait() -> None:
    happened, recorded, took = steps(2.5, 3)
    kinds = ["prepare", "begin", "end"]
    assert happened == [(kind, at) for now in (0, 3, 6) for kind, at in zip(kinds, (now, now, now + 2.5), strict=True)]
    assert (recorded, took) == ([0, 3, 6], 8.5)
    assert steps(2.5, 3, wait=True)[1:] == ([0, 3, 6], 6 + 3 * 2.5)


def test_one_at_a_time_and_none_is_left_out() -> None:
    happened, recorded, took = steps(2.5, 2)
    for what in ("prepare", "begin"):
        assert [at for kind, at in happened if kind == what] == [0, 2.5, 5, 7.5]
    assert (recorded, took) == ([0, 2, 4, 6], 10)


async def begun(measure: Callable[[], Coroutine[Any, Any, Mapping[str, float]]]) -> BackgroundEvaluations:
    """Where this has been measured as far as it goes without waiting, after 5 steps."""
    beside = BackgroundEvaluations(lambda *_: None)
    beside.measurement = Measurement(5, measure)
    await beside.turn(5)
    for _ in range(3):
        await asyncio.sleep(0)
    return beside


async def failing() -> Mapping[str, float]:
    raise ValueError("no")


async def test_an_error_is_raised_between_two_steps_and_once_or_told_at_the_end() -> None:
    beside = await begun(failing)
    with pytest.raises(MeshrlError, match=r"^the evaluation after 5 steps failed: ValueError: no$"):
        await beside.turn(6)
    await beside.turn(7)
    await beside.settle()
    await beside.close()
    unseen = await begun(failing)
    with capture_logs() as logs:
        await unseen.close()
    assert [line["event"] for line in logs] == ["the evaluation after 5 steps failed: ValueError: no"]


async def test_one_that_was_cancelled_is_not_passed_over() -> None:
    async def cancelled() -> Mapping[str, float]:
        raise asyncio.CancelledError

    with pytest.raises(MeshrlError, match=r"^the evaluation after 5 steps was cancelled, and has no numbers$"):
        await (await begun(cancelled)).settle()


async def test_what_is_under_way_is_ended_with_the_run() -> None:
    ended = asyncio.Event()

    async def endless() -> Mapping[str, float]:
        try:
            await asyncio.sleep(1e9)
        finally:
            ended.set()
        return {}

    await (await begun(endless)).close()
    assert ended.is_set()
