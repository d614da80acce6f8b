"""What a call costs the controller for each rank, on 8 to 4,096 fake ranks of the local engine.

    python bench/scale.py --json F [--rounds N]

The ranks have no core of their own (`Resources(cpus=0)`), so they run in the caller's loop and all of the time is the
controller's: an empty call, and one that shards a batch (4 rows a rank, of 4 tokens, and their rewards) and gathers it
again. Each turn is several calls, one awaited after the other; the median turn counts. The time a rank is not to grow
from 64 to 4,096 ranks. About a minute.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

import numpy as np

from bench.harness import Figure, arguments, figure, median, report, take_turns, with_allocator, within
from meshrl import Actor, Batch, Gather, LocalEngine, Mesh, Ragged, Resources, Shard, endpoint
from meshrl.engines.local import RankLoop

RANKS: Final = (8, 64, 512, 4096)
CALLED: Final = 8192
"""Ranks that are called in one turn, in one call or several."""
Call = Callable[[], Awaitable[object]]


class Idle(Actor):
    """Does nothing."""

    @endpoint
    async def nothing(self) -> None:
        """No argument, no result."""

    @endpoint
    async def rows(self, batch: Shard[Batch]) -> Gather[Batch]:
        """The rank's own rows."""
        return batch


def main() -> None:
    options = arguments(__doc__, rounds=7).parse_args()
    with_allocator()
    figures: list[Figure] = []
    with asyncio.Runner(loop_factory=RankLoop) as runner:
        engine = LocalEngine()
        kinds = {"empty call": empty, "Shard + Gather": sharded}
        idle = {ranks: runner.run(spawn(engine, ranks)) for ranks in RANKS}
        turns = {
            f"{name}, {ranks:,} ranks": partial(turn, runner, kind(actor, ranks), CALLED // ranks)
            for name, kind in kinds.items()
            for ranks, actor in idle.items()
        }
        take_turns(turns, 1)
        times = {name: median(values) for name, values in take_turns(turns, options.rounds).items()}
        runner.run(engine.close())
    for name, value in times.items():
        kind, ranks = name.split(", ", 1)
        base = times[f"{kind}, 64 ranks"]
        largest = ranks == f"{RANKS[-1]:,} ranks"
        figures.append(within(name, value, "us/rank", base, 1.5) if largest else figure(name, value, "us/rank", base))
    report("scale", figures, options.json)


async def spawn(engine: LocalEngine, ranks: int) -> Idle:
    """An actor on so many ranks."""
    mesh = await Mesh.reserve(engine, ranks, Resources(cpus=0))
    return await mesh.spawn(Idle)


def empty(idle: Idle, ranks: int) -> Call:
    """A call without arguments."""
    return idle.nothing


def sharded(idle: Idle, ranks: int) -> Call:
    """A call that splits a batch and joins it."""
    rows = 4 * ranks
    tokens = Ragged(np.arange(4 * rows, dtype=np.int32), 4 * np.arange(rows + 1))
    batch = Batch.of(tokens=tokens, rewards=np.zeros(rows, np.float32))
    return lambda: idle.rows(batch)


def turn(runner: asyncio.Runner, call: Call, calls: int) -> float:
    """Microseconds a rank."""

    async def several() -> None:
        for _ in range(calls):
            await call()

    began = time.perf_counter()
    runner.run(several())
    return (time.perf_counter() - began) * 1e6 / CALLED


if __name__ == "__main__":
    main()
