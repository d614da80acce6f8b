"""The cost of a call for each rank, on 8 to 4,096 fake ranks of the local engine and on 64 processes of this machine.

    python bench/scale.py --json F [--rounds N] [--parts fakes,processes]

Measures an empty call, and one that shards a batch (4 rows per rank, of 4 tokens, and their rewards) and gathers it
again. Each turn is several calls, awaited one after the other. The median turn counts.

fakes      The ranks reserve no core (`Resources(cpus=0)`), so they run in the caller's loop and all of the time is the
           controller's. The time per rank should not grow from 64 to 4,096 ranks.
processes  The ranks are processes that reserve no core, so their work counts as well. The limit is as many processes
           that send a few bytes back over Unix sockets (bench/peers/socket_pong.py).

About a minute and a half.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Final

import numpy as np

from bench.harness import Figure, arguments, at_most, figure, median, report, take_turns, with_allocator, within
from bench.peers.socket_pong import Pongs
from meshrl import Actor, Batch, Gather, Mesh, Ragged, Resources, Shard, endpoint
from meshrl.engines import make_engine
from meshrl.engines.local import RankLoop
from meshrl.mesh import Engine

RANKS: Final = (8, 64, 512, 4096)
PROCESSES: Final = 64
CALLED: Final = 8192
"""Ranks called per turn, in one call or several."""
SHARDED: Final = "Shard + Gather"
LIMIT: Final = f"bare sockets, {PROCESSES} processes"
Call = Callable[[], Awaitable[object]]


class Idle(Actor):
    """Does nothing."""

    @endpoint
    async def nothing(self) -> None:
        """No argument, no result."""

    @endpoint
    async def rows(self, batch: Shard[Batch]) -> Gather[Batch]:
        """Return the rank's rows."""
        return batch


def main() -> None:
    parser = arguments(__doc__, rounds=7)
    parser.add_argument("--parts", default="fakes,processes", help="which parts (default: both)")
    options = parser.parse_args()
    with_allocator()
    parts, figures = options.parts.split(","), list[Figure]()
    with asyncio.Runner(loop_factory=RankLoop) as runner:
        if "fakes" in parts:
            figures += fakes(runner, options.rounds)
        if "processes" in parts:
            figures += processes(runner, options.rounds)
    report("scale", figures, options.json)


def fakes(runner: asyncio.Runner, rounds: int) -> list[Figure]:
    """Measure the controller's time alone."""
    times = measure(runner, make_engine("local"), dict.fromkeys(RANKS, "ranks"), {}, rounds)
    figures: list[Figure] = []
    for name, value in times.items():
        kind, ranks = name.split(", ", 1)
        base = times[f"{kind}, 64 ranks"]
        largest = ranks == f"{RANKS[-1]:,} ranks"
        figures.append(within(name, value, "us/rank", base, 1.25) if largest else figure(name, value, "us/rank", base))
        if largest and kind == SHARDED:
            figures.append(at_most(f"{name}, per rank", value, "us/rank", target=60))
    return figures


def processes(runner: asyncio.Runner, rounds: int) -> list[Figure]:
    """Measure real ranks."""
    with Pongs(PROCESSES) as pongs:
        limit = {LIMIT: partial(pinged, pongs)}
        times = measure(runner, make_engine("processes"), {PROCESSES: "processes"}, limit, rounds)
    peer = times.pop(LIMIT)
    return [figure(name, value, "us/rank", peer) for name, value in times.items()]


def measure(
    runner: asyncio.Runner,
    engine: Engine,
    sizes: Mapping[int, str],
    limits: Mapping[str, Callable[[], float]],
    rounds: int,
) -> dict[str, float]:
    """Microseconds per rank of each call on each number of ranks, and those of the limits, in turns."""
    kinds = {"empty call": empty, SHARDED: sharded}
    idle = {ranks: runner.run(spawn(engine, ranks)) for ranks in sizes}
    turns = {
        f"{name}, {ranks:,} {sizes[ranks]}": partial(turn, runner, kind(actor, ranks), CALLED // ranks)
        for name, kind in kinds.items()
        for ranks, actor in idle.items()
    }
    contestants: dict[str, Callable[[], float]] = {**turns, **limits}
    take_turns(contestants, 1)
    times = {name: median(values) for name, values in take_turns(contestants, rounds).items()}
    runner.run(engine.close())
    return times


async def spawn(engine: Engine, ranks: int) -> Idle:
    """Spawn an actor on this number of ranks."""
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
    """Microseconds per rank."""

    async def several() -> None:
        for _ in range(calls):
            await call()

    began = time.perf_counter()
    runner.run(several())
    return (time.perf_counter() - began) * 1e6 / CALLED


def pinged(pongs: Pongs) -> float:
    """The limit, in microseconds per process."""
    began = time.perf_counter()
    for _ in range(CALLED // PROCESSES):
        pongs.ping()
    return (time.perf_counter() - began) * 1e6 / CALLED


if __name__ == "__main__":
    main()
