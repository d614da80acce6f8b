"""Handles that come and go, values that break where they are read, and much under way at once."""

import asyncio
import gc
from functools import wraps
from pathlib import Path
from random import Random
from types import FunctionType
from typing import Any, Self

import numpy as np
import psutil
import pytest

from meshrl import Actor, Batch, Mesh, at, endpoint, overlong_penalty
from meshrl.engines.processes import ProcessEngine
from meshrl.errors import RankFailed
from meshrl.mesh import CollectiveActor, Same
from tests.processes.conftest import NO_CORE, Breaks, Numbered, until, wait_until

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]


class Other(Actor):
    @endpoint
    async def hello(self) -> None: ...


class Late(Batch):
    """Takes a while to be read."""

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
    """What has the name of meshrl's own."""
    return 2 * overlong_penalty(*arguments)


def nameless() -> FunctionType:
    """A function of no module."""
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
    """They are more than a socket takes, and come in pieces that begin and end anywhere."""
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
