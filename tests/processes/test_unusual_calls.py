"""Handles that come and go, values that break where they are read, and much under way at once."""

import asyncio
from functools import wraps
from random import Random
from types import FunctionType

import numpy as np
import psutil
import pytest

from meshrl import Actor, Mesh, endpoint, overlong_penalty
from meshrl.engines.processes import ProcessEngine
from meshrl.errors import RankFailed
from meshrl.mesh import CollectiveActor, Same
from tests.processes.conftest import NO_CORE, Breaks, Numbered

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]


class Other(Actor):
    @endpoint
    async def hello(self) -> None: ...


class Guest(Numbered):
    @endpoint
    async def greet(self, other: Other) -> None:
        await other.hello()

    @endpoint
    async def echo(self, sent: bytes) -> Same[bytes]:
        return sent

    @endpoint
    async def take(self, what: object) -> None: ...

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
