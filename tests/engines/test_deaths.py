"""What engines whose ranks are processes promise of a death, and of exceptions that cannot travel."""

import asyncio
import os
import signal
import time
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest

from meshrl import (
    Actor,
    Batch,
    Gather,
    Mesh,
    Ragged,
    RankDied,
    RankFailed,
    Resources,
    Same,
    Shard,
    at,
    current_rank,
    each,
    endpoint,
    respawn,
    stop,
)
from meshrl.mesh import Engine

NO_CORE = Resources(cpus=0)

pytestmark = pytest.mark.parametrize("engine", ["processes", "ray"], indirect=True)


@pytest.fixture
async def mesh(engine: Engine) -> Mesh:
    return await Mesh.reserve(engine, 2, NO_CORE)


class Trouble(Exception):
    """Cannot be pickled."""

    def __init__(self, number: int) -> None:
        super().__init__(f"no device {number}")
        self.hold = lambda: self
        self.lock = asyncio.Lock()

    def __reduce__(self) -> str:
        raise TypeError("not me")


class Probe(Actor):
    def __init__(self, start: int = 0) -> None:
        self.count = start

    @endpoint
    async def pid(self) -> Gather[np.ndarray]:
        return np.array([os.getpid()])

    @endpoint
    async def add(self, number: int = 1) -> Same[int]:
        self.count += number
        return self.count

    @endpoint
    async def hang(self, note: str = "/dev/null") -> None:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            Path(note).write_text("cancelled")
            raise

    @endpoint
    async def block(self, begun: str) -> None:
        Path(f"{begun}-{current_rank().index}").touch()
        time.sleep(1000)  # noqa: ASYNC251 -- as a collective does whose peer is gone

    @endpoint
    async def take(self, what: object) -> None: ...

    @endpoint
    async def count_on(self, rows: Shard[Batch], what: object = None) -> AsyncIterator[Gather[Batch]]:
        yield rows
        await asyncio.sleep(1000)

    @endpoint
    async def itself(self) -> Same[object]:
        return weakref.ref(self)  # which can be copied, but not be pickled

    @endpoint
    async def trouble(self) -> None:
        raise Trouble(3)

    @endpoint
    async def make(self, tokens: int) -> Gather[Batch]:
        return Batch.of(tokens=Ragged.of([np.arange(tokens)] * 2, np.int32))

    @endpoint
    async def length(self, batch: Shard[Batch]) -> Gather[np.ndarray]:
        return batch.tokens.lengths


async def pids_of(probe: Probe) -> list[int]:
    return [int(pid) for pid in await probe.pid()]


async def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    with suppress(psutil.NoSuchProcess):  # it may go between the two questions
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_killed_rank_fails_its_call_and_the_mesh(mesh: Mesh, tmp_path: Path) -> None:
    probe, other = await mesh.spawn(Probe), await mesh.spawn(Probe, start=5)
    pids = await pids_of(probe)
    note = tmp_path / "note"
    call = asyncio.create_task(probe.hang(str(note)))
    await probe.add()
    await kill(pids[1])
    with pytest.raises(RankDied) as died:
        await asyncio.wait_for(call, 5)
    error = died.value
    assert (error.actor, error.rank, error.axes, error.endpoint) == ("Probe", 1, {"dp": 1}, "hang")
    assert error.pid == pids[1]
    assert error.host
    while not note.exists():  # noqa: ASYNC110 -- the rank that lives writes it
        await asyncio.sleep(0.01)
    assert await at(probe, dp=0).add() == 2, "its own process lives"
    for refusing in (probe, other, at(other, dp=1)):
        with pytest.raises(RankDied) as refused:
            await refusing.add()
        assert (refused.value.pid, refused.value.rank, refused.value.reason) == (pids[1], 1, error.reason)

    await respawn(probe)
    assert await probe.add() == 1, "the actor is new on the rank that lived, too"
    again = await pids_of(probe)
    assert again[0] == pids[0]
    assert again[1] != pids[1]
    with pytest.raises(RankDied):
        await other.add()
    await respawn(other)
    assert await other.add() == 6


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(2000):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never held")


async def blocked(probe: Probe, folder: Path) -> asyncio.Task[None]:
    """A call in which every rank waits for good."""
    call = asyncio.create_task(probe.block(str(folder / "begun")))
    await until(lambda: len(list(folder.glob("begun-*"))) == 2)
    return call


async def test_a_rank_that_waits_for_a_dead_one_does_not_hold_up_its_mesh(mesh: Mesh, tmp_path: Path) -> None:
    probe = await mesh.spawn(Probe)
    pids = await pids_of(probe)
    call = await blocked(probe, tmp_path)
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(RankDied):
        await asyncio.wait_for(call, 5)
    await respawn(probe)
    assert await probe.add() == 1
    assert not set(pids) & set(await pids_of(probe))


async def test_columns_outlive_their_rank(engine: Engine, mesh: Mesh) -> None:
    probe = await mesh.spawn(Probe)
    batch = await probe.make(50_000)
    for pid in await pids_of(probe):
        await kill(pid)
    assert [len(row) for row in (await batch.select([0, 3]).load()).tokens] == [50_000] * 2
    other = await (await Mesh.reserve(engine, 1, Resources(cpus=0))).spawn(Probe)
    assert (await other.length(batch)).tolist() == [50_000] * 4


async def test_an_exception_that_cannot_be_pickled_arrives_as_text(mesh: Mesh) -> None:
    probe = await mesh.spawn(Probe)
    with pytest.raises(RankFailed, match="Trouble: no device 3") as failed:
        await probe.trouble()
    assert failed.value.__cause__ is None
    assert "raise Trouble(3)" in failed.value.traceback
    assert await probe.add() == 1


async def test_a_result_that_cannot_be_pickled_fails_its_call_alone(mesh: Mesh) -> None:
    probe = await mesh.spawn(Probe)
    with pytest.raises(RankFailed, match=r"cannot pickle 'weakref\.ReferenceType' object"):
        await asyncio.wait_for(probe.itself(), 20)
    assert await probe.add() == 1


class Starts(Probe):
    """Rank 1 dies in its constructor if told to; rank 0 waits for it, as a process group does."""

    def __init__(self, die: bool) -> None:
        super().__init__()
        if die and current_rank().index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if die:
            time.sleep(1000)


async def test_a_death_in_a_constructor_fails_the_spawn_and_the_mesh_can_be_used_again(mesh: Mesh) -> None:
    with pytest.raises(RankDied, match=r"Starts.__init__ on rank 1 \(dp=1\)"):
        await asyncio.wait_for(mesh.spawn(Starts, die=True), 30)
    assert await (await mesh.spawn(Starts, die=False)).add() == 1


async def test_stop_does_not_wait_for_a_rank_that_waits_for_a_dead_one(mesh: Mesh, tmp_path: Path) -> None:
    probe = await mesh.spawn(Probe)
    pids = await pids_of(probe)
    call = await blocked(probe, tmp_path)
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(RankDied):
        await call
    await asyncio.wait_for(stop(probe), 20)


async def test_a_death_in_the_middle_of_a_stream(mesh: Mesh) -> None:
    probe = await mesh.spawn(Probe)
    pids = await pids_of(probe)
    stream = probe.count_on(Batch.of(row=[1, 2]))
    assert len(await anext(stream)) == 1
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(RankDied, match=r"Probe.count_on on rank 1 \(dp=1\)"):
        async for _ in stream:
            pass


class Unreadable:
    """Cannot be unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return _refuse, ()


def _refuse() -> None:
    raise ValueError("not on this machine")


async def test_an_argument_that_cannot_be_read_fails_its_call_alone(mesh: Mesh) -> None:
    probe = await mesh.spawn(Probe)
    with pytest.raises(RankFailed, match="not on this machine"):
        await probe.take(Unreadable())
    with pytest.raises(RankFailed, match="not on this machine"):
        async for _ in probe.count_on(Batch.of(row=[1, 2]), Unreadable()):
            pass
    assert await probe.add() == 1


async def test_an_actor_that_was_stopped_can_be_made_again_after_a_death(mesh: Mesh) -> None:
    probe = await mesh.spawn(Probe, 3)
    pids = await pids_of(probe)
    await stop(probe)
    await kill(pids[0])
    await respawn(probe)
    assert await each(probe.add)() == [4, 4]
