"""Microseconds for an empty endpoint call on the local engine, with 2 and with 8 ranks.

    python bench/calls.py --json F [--rounds N]

One caller, one call after the other, each awaited; the median of all calls of all rounds. Beside it the limit of
asyncio: a coroutine that does nothing, run in the loop of one other thread by `run_coroutine_threadsafe` and awaited.
`each`: a result of every rank; `Gather`: an array of one number a rank, joined; `Shard + Gather`: a batch of 8 rows of
4 tokens, split over the ranks and joined again. The caller's loop is meshrl's, as under `meshrl run`; once it is
asyncio's own. A few seconds.
"""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from bench.harness import Figure, arguments, at_most, figure, median, report
from meshrl import Actor, Batch, Gather, LocalEngine, Mesh, Ragged, Resources, Shard, each, endpoint
from meshrl.engines.loop import RankLoop

CALLS: Final = 200
"""Calls in one turn."""
LIMIT: Final = "one thread's loop"
Call = Callable[[], Awaitable[object]]


class Idle(Actor):
    """Does nothing, in several shapes."""

    @endpoint
    async def nothing(self) -> None:
        """No argument, no result."""

    @endpoint
    async def numbers(self) -> Gather[NDArray[np.int64]]:
        """One number a rank."""
        return np.ones(1, np.int64)

    @endpoint
    async def rows(self, batch: Shard[Batch]) -> Gather[Batch]:
        """The rank's own rows."""
        return batch


def main() -> None:
    options = arguments(__doc__, rounds=15).parse_args()
    figures: list[Figure] = []
    for suffix, make_loop in {"": RankLoop, ", asyncio's own loop": asyncio.new_event_loop}.items():
        with asyncio.Runner(loop_factory=make_loop) as runner:
            times = {name: median(values) for name, values in runner.run(measure(options.rounds)).items()}
        limit = times.pop(LIMIT)
        for name, value in times.items():
            if name == "nothing, 2 ranks":
                figures.append(at_most(name + suffix, value, "us", target=100, peer=limit))
            elif not suffix:
                figures.append(figure(name, value, "us", limit))
    report("calls", figures, options.json)


async def measure(rounds: int) -> Mapping[str, list[float]]:
    """Microseconds of each call, by what was called."""
    engine = LocalEngine()
    calls: dict[str, Call] = {}
    for ranks in (2, 8):
        mesh = await Mesh.reserve(engine, ranks, Resources(cpus=1))
        calls |= variants(await mesh.spawn(Idle), f"{ranks} ranks")
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    calls[LIMIT] = lambda: asyncio.wrap_future(asyncio.run_coroutine_threadsafe(empty(), loop))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        for name in calls if number % 2 == 0 else reversed(calls):
            took = await turn(calls[name])
            times[name] += took if number else []  # the first round warms up
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
    await engine.close()
    return times


def variants(idle: Idle, label: str) -> dict[str, Call]:
    """What is called of an actor."""
    rows = Batch.of(tokens=Ragged.of([[1, 2, 3, 4]] * 8, np.int32))
    return {
        f"nothing, {label}": idle.nothing,
        f"each, {label}": each(idle.nothing),
        f"Gather, {label}": idle.numbers,
        f"Shard + Gather, {label}": lambda: idle.rows(rows),
    }


async def turn(call: Call) -> list[float]:
    """Microseconds of each of CALLS calls."""
    times: list[float] = []
    for _ in range(CALLS):
        began = time.perf_counter_ns()
        await call()
        times.append((time.perf_counter_ns() - began) / 1000)
    return times


async def empty() -> None:
    """What the limit runs."""


if __name__ == "__main__":
    main()
