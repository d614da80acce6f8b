"""Hundreds of steps, of which some fail, are cancelled or left: nothing grows with their number."""

import asyncio
import gc
import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from typing import NamedTuple, cast

import numpy as np
import psutil
import pytest

from meshrl import Batch, Gather, Mesh, Shard, endpoint
from meshrl.engines.processes import ProcessEngine
from meshrl.errors import RankFailed
from tests.processes.conftest import NO_CORE, Numbered, segments

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]

MIB = 1 << 20
ATTEMPTS = 3
"""What leaks grows each time; what an allocator keeps of earlier tests in this process comes once."""


class Rows(Numbered):
    @endpoint
    async def make(self) -> Gather[Batch]:
        return Batch.of(rewards=np.arange(8, dtype=np.float32))

    @endpoint
    async def twice(self, batch: Shard[Batch], *, fail: bool = False) -> Gather[Batch]:
        await asyncio.sleep(0)
        if fail:
            raise ValueError("as asked")
        return batch.assign(rewards=batch.rewards * 2)

    @endpoint
    async def again(self, batch: Shard[Batch]) -> AsyncIterator[Gather[Batch]]:
        for _ in range(3):
            yield batch.assign(rewards=batch.rewards + 1)


async def step(number: int, one: Rows, other: Rows) -> None:
    batch = await one.make()
    how = number % 5
    if how == 0:
        with pytest.raises(RankFailed):
            await other.twice(batch, fail=True)
    elif how == 1:
        call = asyncio.create_task(other.twice(batch))
        for _ in range(number // 5 % 7):
            await asyncio.sleep(0)
        call.cancel()
        with suppress(asyncio.CancelledError):
            await call
    elif how == 2:
        stream = cast("AsyncGenerator[Batch]", other.again(batch))
        assert len(await anext(stream)) == 8, "one rank's"
        await stream.aclose()
    else:
        doubled = await other.twice(batch)
        if how == 3:
            assert (await doubled.load()).rewards.sum() == 2 * 2 * 28


class Size(NamedTuple):
    descriptors: int
    threads: int
    segments: int
    memory: int


async def sizes(pids: list[int], ranks: list[Rows]) -> list[Size]:
    gc.collect()
    for rows in [*ranks] * 10:
        await rows.pid()
    found = [psutil.Process(pid) for pid in pids]
    return [Size(of.num_fds(), of.num_threads(), len(segments(of.pid)), of.memory_info().rss) for of in found]


async def test_nothing_grows_with_the_steps(engine: ProcessEngine) -> None:
    meshes = [await Mesh.reserve(engine, 2, NO_CORE) for _ in range(2)]
    one, other = [await mesh.spawn(Rows) for mesh in meshes]
    pids = [os.getpid(), *[int(pid) for rows in (one, other) for pid in await rows.pid()]]
    for number in range(300):
        await step(number, one, other)
    for attempt in range(ATTEMPTS):
        before = await sizes(pids, [one, other])
        for number in range(500):
            await step(number, one, other)
        after = await sizes(pids, [one, other])
        made = sum(each.segments for each in after) - sum(each.segments for each in before)  # mapped anywhere
        where = f"processes {pids}: {before} and then {after}"
        for then, now in zip(before, after, strict=True):
            assert now.descriptors <= then.descriptors + 4 + made, where
            assert now.threads <= then.threads, where
            assert now.segments <= then.segments + 4, where
        if all(now.memory <= then.memory + 4 * MIB for then, now in zip(before, after, strict=True)):
            break
        assert attempt + 1 < ATTEMPTS, f"memory grows again and again: {where}"
    for mesh in meshes:
        await mesh.stop()
