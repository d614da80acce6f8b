"""Handles that come and go, ranks with children, and values that break where they are read."""

import asyncio
import os
import signal
import sys
from functools import wraps
from types import FunctionType

import numpy as np
import psutil
import pytest
from numpy.typing import NDArray

from meshrl import Actor, Gather, Mesh, RankDied, RankFailed, Same, endpoint, overlong_penalty
from meshrl.engines.processes import ProcessEngine
from meshrl.mesh import CollectiveActor
from tests.processes.conftest import NO_CORE

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]


class Other(Actor):
    @endpoint
    async def hello(self) -> None: ...


class Guest(Actor):
    @endpoint
    async def pid(self) -> Gather[NDArray[np.int64]]:
        return np.array([os.getpid()])

    @endpoint
    async def greet(self, other: Other) -> None:
        await other.hello()

    @endpoint
    async def have_a_child(self) -> Same[bool]:
        if os.fork() == 0:
            signal.pause()
        return True

    @endpoint
    async def wait(self) -> None:
        await asyncio.Event().wait()

    @endpoint
    async def take(self, what: object) -> None: ...

    @endpoint
    async def give(self, what: str) -> Same[object]:
        return Breaks(what)


class Together(Guest, CollectiveActor):
    def agree(self, work):  # type: ignore[no-untyped-def]  # one rank
        return [work()]


class Breaks:
    """Raises where it is read."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __reduce__(self) -> tuple[object, ...]:
        return _broken, (self.how,)


def _broken(how: str) -> None:
    if how == "exit":
        sys.exit(3)
    raise ValueError("a file \udcff of no name")


async def test_handles_leave_no_connection_behind(engine: ProcessEngine, mesh: Mesh) -> None:
    guest, other = await mesh.spawn(Guest), await (await Mesh.reserve(engine, 1, NO_CORE)).spawn(Other)
    pid = int((await guest.pid())[0])
    await guest.greet(other)
    before = psutil.Process(pid).num_fds()
    for _ in range(20):
        await guest.greet(other)
    assert psutil.Process(pid).num_fds() == before


async def test_a_killed_rank_whose_child_lives_fails_its_call(engine: ProcessEngine) -> None:
    guest = await (await Mesh.reserve(engine, 1, NO_CORE)).spawn(Guest)
    pid = int((await guest.pid())[0])
    await guest.have_a_child()
    (child,) = psutil.Process(pid).children()
    call = asyncio.ensure_future(guest.wait())
    await guest.pid()
    os.kill(pid, signal.SIGKILL)
    try:
        with pytest.raises(RankDied):
            await asyncio.wait_for(call, 20)
    finally:
        if child.is_running():
            child.kill()


@wraps(overlong_penalty)
def doubled(*arguments: int) -> object:
    """What has the name of meshrl's own."""
    return 2 * overlong_penalty(*arguments)


def nameless() -> FunctionType:
    """A function of no module."""
    return FunctionType((lambda: 7).__code__, {})


async def test_functions_travel_whatever_they_say_of_their_name(engine: ProcessEngine) -> None:
    guest = await (await Mesh.reserve(engine, 1, NO_CORE)).spawn(Guest)
    for function in (doubled, nameless(), np.mean, overlong_penalty):
        await guest.take(function)


@pytest.mark.parametrize("how", ["exit", "text"])
@pytest.mark.parametrize("kind", [Guest, Together])
async def test_what_breaks_where_it_is_read_fails_its_call_alone(
    engine: ProcessEngine, kind: type[Guest], how: str
) -> None:
    guest = await (await Mesh.reserve(engine, 1, NO_CORE)).spawn(kind)
    for call in (guest.take(Breaks(how)), guest.give(how)):
        with pytest.raises(RankFailed, match=r"SystemExit|ValueError"):
            await asyncio.wait_for(call, 20)
    assert len(await asyncio.wait_for(guest.pid(), 20)) == 1
