"""Jobs that wait for hosts of which nothing is heard."""

import asyncio
import os
from collections.abc import Awaitable

import numpy as np

from meshrl import Gather, Mesh, endpoint
from meshrl.engines.ray import RayEngine
from meshrl.errors import MeshrlError
from tests.cluster.jobs import MIB, Traveller, on, say


class Worker(Traveller):
    """Counts what it has done, and says which process it is."""

    def __init__(self) -> None:
        self._done = 0

    @endpoint
    async def work(self) -> Gather[np.ndarray]:
        self._done += 1
        return np.array([self._done])

    @endpoint
    async def pid(self) -> Gather[np.ndarray]:
        return np.array([os.getpid()])


async def told(call: Awaitable[object]) -> str:
    """The error of a call."""
    try:
        await call
    except MeshrlError as failure:
        return f"{type(failure).__name__}: {failure}"
    return ""


async def made(engine: RayEngine, host: str) -> Worker:
    return await (await Mesh.reserve(engine, 1, on(host))).spawn(Worker)


async def waited(engine: RayEngine, host: str) -> object:
    """Calls on a host that is away for some seconds, and slow and lossy afterwards: how many it has counted."""
    worker = await made(engine, host)
    say("ready")
    for _ in range(100):
        await worker.work()
        await asyncio.sleep(0.1)
    return int((await worker.work())[0])


async def lost(engine: RayEngine, here: str, cut: str, elsewhere: str) -> object:
    """What is told of rows on a host that is cut off: here, on a rank here, and on one elsewhere; its process."""
    maker, near, far = [await made(engine, host) for host in (cut, here, elsewhere)]
    batches = [await maker.make(4, MIB // 4) for _ in range(3)]
    pid = int((await maker.pid())[0])
    say("ready")
    await asyncio.sleep(5)
    waits = batches[0].load(), near.twice(batches[1]), far.twice(batches[2]), maker.clock()
    return pid, await asyncio.gather(*map(told, waits))


async def left(engine: RayEngine, host: str) -> object:
    """What is told of a call, and of a reservation, when the head goes."""
    worker = await made(engine, host)
    say("ready")

    async def work() -> None:
        while True:
            await worker.work()
            await asyncio.sleep(0.05)

    async def reserve() -> None:
        await asyncio.sleep(5)
        await Mesh.reserve(engine, 1, on(host))

    return await asyncio.gather(told(work()), told(reserve()))
