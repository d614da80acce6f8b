"""Handles that come and go, values that break where they are read, much under way at once, and hundreds of steps."""

import asyncio
import gc
import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from functools import wraps
from pathlib import Path
from random import Random
from types import FunctionType
from typing import Any, NamedTuple, Self, cast

import numpy as np
import psutil
import pytest

from meshrl import Actor, Batch, Gather, Mesh, Shard, at, endpoint, overlong_penalty
from meshrl.engines.processes import ProcessEngine
from meshrl.errors import RankFailed
from meshrl.mesh import CollectiveActor, Same
from tests.processes.conftest import NO_CORE, Breaks, Numbered, segments, until, wait_until

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]


class Other(Actor):
    @endpoint
    async def hello(self) -> None: ...


class Late(Batch):
    async def load(self, *names: str) -> Self:
        for _ in range(100):
            await asyncio.sleep(0)
        return await super().load(*names)


class Guest(Numbered):
    def __init__(self) -> None:
        self.taken: list[Any] = []

    @endpoint
    async def greet(self, other: Other) -> None:
        await other.hello()

    @endpoint
    async def echo(self, sent: bytes) -> Same[bytes]:
        return sent

    @endpoint
    async def take(self, what: object) -> None:
        self.taken.append(what)

    @endpoint
    async def has(self) -> Same[list[Any]]:
        return self.taken

    @endpoint
    async def block(self, folder: Path) -> None:
        (folder / "begun").touch()
        wait_until((folder / "end").exists)

    @endpoint
    async def give(self, what: str) -> Same[object]:
        return Breaks(what)


class Together(Guest, CollectiveActor):
    def agree(self, work):  # type: ignore[no-untyped-def]  # one rank
        return [work()]


async def test_handles_leave_no_connection_behind(engine: ProcessEngine, mesh: Mesh) -> None:
    guest, other = await mesh.spawn(Guest), await (await Mesh.reserve(engine, 1, NO_CORE)).spawn(Other)
    pid = int((await guest.pid())[0])
    await guest.greet(other)
    before = psutil.Process(pid).num_fds()
    for _ in range(20):
        await guest.greet(other)
    assert psutil.Process(pid).num_fds() == before


@wraps(overlong_penalty)
def doubled(*arguments: int) -> object:
    return 2 * overlong_penalty(*arguments)


def nameless() -> FunctionType:
    return FunctionType((lambda: 7).__code__, {})


async def test_functions_travel_whatever_they_say_of_their_name(mesh: Mesh) -> None:
    guest = await mesh.spawn(Guest)
    for function in (doubled, nameless(), np.mean, overlong_penalty):
        await guest.take(function)


async def test_what_breaks_where_it_is_read_fails_its_call_alone(mesh: Mesh) -> None:
    for kind in (Guest, Together):
        guest = await mesh.shape(dp=1, tp=2).spawn(kind)
        for how in ("exit", "text"):
            for call in (guest.take(Breaks(how)), guest.give(how)):
                with pytest.raises(RankFailed, match=r"SystemExit|ValueError"):
                    await call
            assert len(await guest.pid()) == 1


async def test_bytes_of_any_size_arrive_whole_however_many_are_under_way(mesh: Mesh) -> None:
    guest, random = await mesh.spawn(Guest), Random(0)
    sizes = [3, 5_000_000, 0, 2_000_000, *(random.randrange(3000) for _ in range(300)), 1]
    sent = [random.randbytes(size) for size in sizes]
    assert await asyncio.gather(*map(guest.echo, sent)) == sent


async def test_a_call_does_not_overtake_one_whose_argument_comes_late(mesh: Mesh) -> None:
    guest = at(await mesh.spawn(Guest), dp=0)
    await asyncio.gather(guest.take(Late.of(row=[1])), guest.take(2))
    assert (await guest.has())[1:] == [2]


async def test_arguments_of_a_call_that_goes_on_are_kept_until_they_come(engine: ProcessEngine, tmp_path: Path) -> None:
    guest = await (await Mesh.reserve(engine, 1, NO_CORE)).spawn(Together)
    calls = [asyncio.create_task(guest.block(tmp_path))]
    await until((tmp_path / "begun").exists)
    calls.append(asyncio.create_task(guest.take(np.full(100_000, 1))))
    await asyncio.sleep(0)  # it is sent
    calls[-1].cancel()
    await asyncio.wait({calls.pop()})
    gc.collect()
    calls.append(asyncio.create_task(guest.take(np.full(100_000, 2))))
    await asyncio.sleep(0)
    (tmp_path / "end").touch()
    await asyncio.gather(*calls)
    assert [np.max(array) for array in await guest.has()] == [1, 2]


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
    for number in range(100):
        await step(number, one, other)
    for attempt in range(ATTEMPTS):
        before = await sizes(pids, [one, other])
        for number in range(300):
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
