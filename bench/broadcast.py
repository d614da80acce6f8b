"""Send 512 MiB from the controller to every rank of 2 and of 4, in milliseconds, against one copy of the bytes.

    python bench/broadcast.py --json F [--mib 512] [--rounds N] [--engine processes|ray]

Sends the bytes as one array, and as a model's weights in tensors of 2 MiB. Each rank reads one byte of every page, and
the bytes are checked. The ranks reserve no core. The reference copy is made by one thread into warm memory. Bare Ray is
measured too: one `ray.put` of the array, and actors that do the same. All contestants are called from one process in
turns. The first two turns warm up. About a minute.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, Protocol, cast

import numpy as np
import ray
from numpy.typing import NDArray

from bench.harness import (
    Figure,
    add_engine,
    arguments,
    copier,
    figure,
    median,
    report,
    start_ray,
    take_turns,
    with_allocator,
    within,
)
from meshrl import Actor, Mesh, Resources, Sum, Weights, endpoint
from meshrl.engines import make_engine
from meshrl.engines.local import RankLoop
from meshrl.mesh import Engine

RANKS: Final = (2, 4)
MOST: Final = {2: 1.1, 4: 1.5}
"""Allowed time, in copies of the bytes."""
PAGE: Final = 4096
TENSOR: Final = 2**21
"""Bytes per weight tensor."""


class Receiver(Actor):
    """Reads a byte of every page that it receives."""

    @endpoint
    async def array(self, values: NDArray[np.uint8]) -> Sum[int]:
        """Receive one array."""
        return touched(values)

    @endpoint
    async def weights(self, weights: Weights) -> Sum[int]:
        """Receive many arrays."""
        return sum(touched(values) for values in weights.tensors.values())


class BareReceiver:
    """The same as a Ray actor."""

    def array(self, values: NDArray[np.uint8]) -> int:
        """Receive one array."""
        return touched(values)


class BareMethod(Protocol):
    """A method of a Ray actor."""

    def remote(self, values: object) -> "ray.ObjectRef[int]":
        """Send a call."""
        ...


class BareHandle(Protocol):
    """Ray's handle of a `BareReceiver`."""

    array: BareMethod


def touched(values: NDArray[np.generic]) -> int:
    """The sum of the first bytes of all pages."""
    return int(values.reshape(-1).view(np.uint8)[::PAGE].sum(dtype=np.int64))


def main() -> None:
    parser = arguments(__doc__, rounds=9)
    parser.add_argument("--mib", type=int, default=512, help="how much (default: 512)")
    add_engine(parser)
    options = parser.parse_args()
    with_allocator()
    start_ray()
    try:
        with asyncio.Runner(loop_factory=RankLoop) as runner:
            times = measure(runner, make_engine(options.engine), options.mib * 2**20, options.rounds)
    finally:
        ray.shutdown()
    copied = times.pop("copy")
    figures: list[Figure] = []
    for name, wall in times.items():
        numbers = (f"{name}, {options.mib} MiB, against one copy", wall * 1e3, "ms", copied * 1e3)
        most = next(target for ranks, target in MOST.items() if name.endswith(f"{ranks} ranks"))
        figures.append(figure(*numbers) if name.startswith("bare") else within(*numbers, target=most))
    report(f"broadcast on {options.engine}", figures, options.json)


def measure(runner: asyncio.Runner, engine: Engine, nbytes: int, rounds: int) -> dict[str, float]:
    """Seconds of each way."""
    array = (np.arange(nbytes, dtype=np.uint32) // PAGE % 251).astype(np.uint8)
    tensors = {f"{start}": array[start : start + TENSOR].copy() for start in range(0, nbytes, TENSOR)}
    weights, truth = Weights(0, tensors), touched(array)
    turns: dict[str, Callable[[], float]] = {"copy": copier(nbytes)}
    for ranks in RANKS:
        receiver = runner.run(spawn(engine, ranks))
        turns[f"array, {ranks} ranks"] = partial(timed, runner, partial(receiver.array, array), ranks * truth)
        turns[f"weights, {ranks} ranks"] = partial(timed, runner, partial(receiver.weights, weights), ranks * truth)
        made = ray.remote(num_cpus=0)(BareReceiver)
        bare = [cast("BareHandle", made.remote()) for _ in range(ranks)]
        turns[f"bare Ray, array, {ranks} ranks"] = partial(bare_timed, bare, array, ranks * truth)
    take_turns(turns, 2)
    times = {name: median(values) for name, values in take_turns(turns, rounds).items()}
    runner.run(engine.close())
    return times


async def spawn(engine: Engine, ranks: int) -> Receiver:
    """Spawn an actor on this number of ranks."""
    mesh = await Mesh.reserve(engine, ranks, Resources(cpus=0))
    return await mesh.spawn(Receiver)


def timed(runner: asyncio.Runner, call: Callable[[], Awaitable[int]], truth: int) -> float:
    """Seconds of one call."""

    async def once() -> int:
        return await call()

    began = time.perf_counter()
    total = runner.run(once())
    wall = time.perf_counter() - began
    assert total == truth
    return wall


def bare_timed(actors: list[BareHandle], array: NDArray[np.uint8], truth: int) -> float:
    """Seconds of one put and one call of each actor."""
    began = time.perf_counter()
    put = ray.put(array)
    total = sum(ray.get([actor.array.remote(put) for actor in actors]))
    wall = time.perf_counter() - began
    assert total == truth
    return wall


if __name__ == "__main__":
    main()
