"""What engines whose ranks are processes promise of a death, and of exceptions that cannot travel."""

import asyncio
import os
import signal
import time
import weakref
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

import meshrl as rl
from meshrl.errors import RankDied, RankFailed
from meshrl.mesh import CollectiveActor, Same, is_away
from meshrl.testing import FakePolicy, FakeSampler, Witness
from tests.engines.conftest import Reserve, on_processes
from tests.overlap.streams import POLICY, SAMPLER, prompts
from tests.processes.conftest import Breaks, Numbered, killed, until

pytestmark = pytest.mark.asyncio(loop_scope="session")


class Trouble(Exception):
    def __reduce__(self) -> str:
        raise TypeError("not me")


class Probe(Numbered):
    def __init__(self, start: int = 0, *, die: bool = False) -> None:
        """`die`: rank 1 does, and rank 0 waits for it, as a process group does."""
        if die and rl.current_rank().index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if die:
            time.sleep(10**6)
        self.count = start

    @rl.endpoint
    async def add(self, number: int = 1) -> Same[int]:
        self.count += number
        return self.count

    @rl.endpoint
    async def note_its_end(self, note: str) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            Path(note).write_text("cancelled")
            raise

    @rl.endpoint
    async def block(self, begun: str) -> None:
        Path(f"{begun}-{rl.current_rank().index}").touch()
        time.sleep(10**6)  # noqa: ASYNC251 -- as a collective does whose peer is gone

    @rl.endpoint
    async def count_on(self, rows: rl.Shard[rl.Batch], what: object = None) -> AsyncIterator[rl.Gather[rl.Batch]]:
        yield rows
        await asyncio.Event().wait()

    @rl.endpoint
    async def itself(self) -> Same[object]:
        return weakref.ref(self)  # which can be copied, but not be pickled

    @rl.endpoint
    async def trouble(self) -> None:
        raise Trouble("no device 3")


class Together(Probe, CollectiveActor):
    def agree(self, work):  # type: ignore[no-untyped-def]  # nothing that they wait for
        return [work()]

    @rl.endpoint
    async def touch(self, note: str) -> None:
        Path(note).touch()


class SlowSampler(FakeSampler, Numbered):
    async def generate(self, prompts: rl.Batch, sampling: rl.Sampling) -> AsyncIterator[rl.Batch]:
        async for chunk in super().generate(prompts, sampling):
            yield chunk.assign(pid=np.full(len(chunk), os.getpid()))
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("engine", ["processes", "ray"], indirect=True)
async def test_a_killed_rank_fails_its_call_and_the_mesh(mesh: rl.Mesh, tmp_path: Path) -> None:
    probe, other, together = await mesh.spawn(Probe), await mesh.spawn(Probe, start=5), await mesh.spawn(Together)
    pids = (await probe.pid()).tolist()
    note = tmp_path / "note"
    call = asyncio.create_task(probe.note_its_end(str(note)))
    stream = probe.count_on(rl.Batch.of(row=[1, 2]))
    assert len(await anext(stream)) == 1
    await killed(pids[1])
    with pytest.raises(RankDied) as died:
        await call
    error = died.value
    assert (error.actor, error.rank, error.axes, error.endpoint) == ("Probe", 1, {"dp": 1}, "note_its_end")
    assert error.pid == pids[1]
    assert error.host
    with pytest.raises(RankDied, match=r"Probe.count_on on rank 1 \(dp=1\)"):
        async for _ in stream:
            pass
    await until(note.exists)  # the rank that lives writes it
    with pytest.raises(RankDied):
        await together.touch(str(tmp_path / "begun"))
    assert await rl.at(probe, dp=0).add() == 1, "its own process lives"
    assert not (tmp_path / "begun").exists(), "no rank begins what it would wait in for the dead one"
    for refusing in (probe, other, rl.at(other, dp=1)):
        with pytest.raises(RankDied) as refused:
            await refusing.add()
        assert (refused.value.pid, refused.value.rank, refused.value.reason) == (pids[1], 1, error.reason)

    await rl.respawn(probe)
    assert await probe.add() == 1, "the actor is new on the rank that lived, too"
    again = (await probe.pid()).tolist()
    assert again[0] == pids[0]
    assert again[1] != pids[1]
    with pytest.raises(RankDied):
        await other.add()
    await rl.respawn(other)
    assert await other.add() == 6

    await rl.stop(probe)
    await killed(again[0])
    await rl.respawn(probe)
    assert await rl.each(probe.add)() == [1, 1], "also one that had been stopped"


@on_processes
async def test_ranks_that_wait_for_a_dead_one_hold_nobody_up(
    reserve: Reserve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshrl.engines.remote.engine.GRACE", 0.5)

    async def blocked(probe: Probe, name: str) -> list[int]:
        pids: list[int] = (await probe.pid()).tolist()
        call = asyncio.create_task(probe.block(str(tmp_path / name)))
        await until(lambda: len(list(tmp_path.glob(f"{name}-*"))) == 2)
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(RankDied):
            await call
        return pids

    async def is_made_again() -> None:
        probe = await (await reserve(2)).spawn(Probe)
        pids = await blocked(probe, "respawned")
        await rl.respawn(probe)
        assert await probe.add() == 1
        assert not set(pids) & set((await probe.pid()).tolist())

    async def is_stopped() -> None:
        probe = await (await reserve(2)).spawn(Probe)
        await blocked(probe, "stopped")
        await rl.stop(probe)

    async def is_spawned() -> None:
        mesh = await reserve(2)
        with pytest.raises(RankDied, match=r"Probe.__init__ on rank 1 \(dp=1\)"):
            await mesh.spawn(Probe, die=True)
        assert await (await mesh.spawn(Probe)).add() == 1

    await asyncio.gather(is_made_again(), is_stopped(), is_spawned())


@on_processes
async def test_what_cannot_travel_fails_its_call_alone(mesh: rl.Mesh) -> None:
    probe = await mesh.spawn(Probe)
    with pytest.raises(RankFailed, match="Trouble: no device 3") as failed:
        await probe.trouble()
    assert failed.value.__cause__ is None
    assert 'raise Trouble("no device 3")' in failed.value.traceback
    with pytest.raises(RankFailed, match=r"cannot pickle 'weakref\.ReferenceType' object"):
        await probe.itself()
    with pytest.raises(RankFailed, match="of no name"):
        async for _ in probe.count_on(rl.Batch.of(row=[1, 2]), Breaks("text")):
            pass
    assert await probe.add() == 1


@on_processes
async def test_a_stream_outlives_a_killed_replica(reserve: Reserve) -> None:
    mesh = await reserve(2, rl.Resources(cpus=0, min_ranks=1))
    sampler, witness = await mesh.spawn(SlowSampler, SAMPLER), Witness(FakePolicy(POLICY))
    pids = (await sampler.pid()).tolist()
    drawn_by: set[int] = set()
    steps = 0
    await rl.publish(witness, sampler)
    stream = rl.rollouts(sampler, witness.prompts(prompts(200, 4)), rl.Sampling(n=2), ahead=1, retries=0)
    async with stream:
        async for drawn in stream:
            batch = await drawn.load()
            drawn_by.update(batch.row("pid").tolist())
            await witness.update(batch, rl.CrossEntropy())
            await rl.publish(witness, stream)
            steps += 1
            if steps == 2:
                os.kill(pids[1], signal.SIGKILL)
                beside = await rl.rollout(sampler, next(prompts(1, 3)), rl.Sampling())
                assert len(beside) == 3, "as an evaluation draws"
            if len(drawn_by) == 3:
                break
    witness.check(ahead=1, n=2, dropped=None)
    assert pids[0] in drawn_by
    assert not is_away(sampler)
    again = (await sampler.pid()).tolist()
    assert again[0] == pids[0]
    assert again[1] not in pids
    assert {*pids, again[1]} == drawn_by
