import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, cast

import numpy as np
import pytest

import meshrl as rl
from meshrl.data import RemoteColumn
from meshrl.errors import ContractError, DataError, MeshStopped, RankFailed
from meshrl.mesh import Engine, Same
from tests.engines.conftest import Reserve, on_ray_too, where_columns_stay

pytestmark = pytest.mark.asyncio(loop_scope="session")


class Probe(rl.Actor):
    def __init__(self, fail_on: int = -1) -> None:
        if rl.current_rank().index == fail_on:
            raise OSError("no such device")
        self.log: list[int] = []
        self.ended = ""
        self.made = 0

    @rl.endpoint
    async def note(self, number: int) -> Same[list[int]]:
        self.log.append(number)
        return self.log

    @rl.endpoint
    async def write(self, what: list[int] | np.ndarray | rl.Batch) -> None:
        (what.rewards if isinstance(what, rl.Batch) else what)[0] = 9

    @rl.endpoint
    async def array(self) -> Same[dict[str, np.ndarray]]:
        return {"zeros": np.zeros(3)}

    @rl.endpoint
    async def hang(self) -> None:
        self.ended = "running"
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.ended = "cancelled"
            raise

    @rl.endpoint
    async def state(self) -> Same[str]:
        return self.ended

    @rl.endpoint
    async def fail_on(self, rank: int) -> None:
        if rl.current_rank().index == rank:
            raise ValueError(f"bad row {rank}")
        await self.hang()

    @rl.endpoint
    async def count(self, last: int = 10**9) -> AsyncIterator[rl.Gather[np.ndarray]]:
        try:
            while self.made < last:
                self.made += 1
                yield np.array([self.made])
            raise ValueError("stream broke")
        finally:
            self.ended = "closed"

    @rl.endpoint
    async def leave(self) -> None:
        async def child() -> None:
            raise SystemExit(3)

        await asyncio.gather(child(), child())

    @rl.endpoint
    async def yielded(self) -> Same[int]:
        return self.made


async def until(probe: Probe, state: str) -> None:
    while set(await rl.each(probe.state)()) != {state}:  # noqa: ASYNC110 -- the state is on the ranks
        await asyncio.sleep(0.001)


@on_ray_too
async def test_calls_start_in_the_order_they_were_made(mesh: rl.Mesh) -> None:
    probe, rollouts = await mesh.spawn(Probe), await mesh.spawn(Rollouts)
    results = await asyncio.gather(*(probe.note(number) for number in range(20)))
    assert results[-1] == list(range(20))
    batch = await rollouts.make(4, 20_000)  # a large argument is fetched, and what comes later does not overtake it
    await asyncio.gather(rollouts.same(batch), rollouts.numbers(np.ones(3)), rollouts.same(batch))
    assert await rollouts.order() == ["same", "numbers", "same"]


async def test_a_rank_cannot_change_the_callers_values(mesh: rl.Mesh) -> None:
    probe = await mesh.spawn(Probe)
    numbers = [1]
    await probe.write(numbers)
    assert numbers == [1]
    small, large = np.zeros(3), np.zeros(100_000)
    for what in (small, large, rl.Batch.of(rewards=np.zeros(2, np.float32))):
        with pytest.raises(RankFailed, match="read-only"):
            await probe.write(what)
    small[:] = large[:] = 1
    with pytest.raises(ValueError, match="read-only"):
        (await probe.array())["zeros"][0] = 1
    first = await probe.note(1)
    first.append(99)
    assert await probe.note(2) == [1, 2]


async def test_cancelling_a_call_cancels_it_on_the_ranks(mesh: rl.Mesh) -> None:
    probe = await mesh.spawn(Probe)
    call = asyncio.create_task(probe.hang())
    await until(probe, "running")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await until(probe, "cancelled")


async def test_an_exception_says_where_and_cancels_the_other_ranks(mesh: rl.Mesh) -> None:
    probe = await mesh.spawn(Probe)
    with pytest.raises(RankFailed) as caught:
        await probe.fail_on(1)
    error = caught.value
    assert (error.actor, error.rank, error.axes, error.endpoint) == ("Probe", 1, {"dp": 1}, "fail_on")
    assert "Probe.fail_on on rank 1 (dp=1) failed: ValueError: bad row 1" in str(error)
    assert 'raise ValueError(f"bad row {rank}")' in error.traceback
    assert "meshrl/engines" not in error.traceback
    assert isinstance(error.__cause__, ValueError)
    while await rl.at(probe, dp=0).state() == "running":  # noqa: ASYNC110 -- on the rank; or it never began
        await asyncio.sleep(0.001)


async def test_what_fails_leaves_its_rank_to_others(mesh: rl.Mesh) -> None:
    with pytest.raises(RankFailed, match=r"Probe.__init__ on rank 1 \(dp=1\) failed: OSError: no such device"):
        await mesh.spawn(Probe, fail_on=1)
    probe = await mesh.spawn(Probe)
    with pytest.raises(RankFailed, match="SystemExit"):
        await probe.leave()
    with pytest.raises(ContractError, match=r"Probe.note: an argument cannot be sent to a rank"):
        await cast("Any", probe).note(threading.Lock())
    assert await probe.note(1) == [1]


async def test_a_stopped_actor_ends_its_calls_and_streams_and_refuses_others(mesh: rl.Mesh) -> None:
    probe, other = await mesh.spawn(Probe), await mesh.spawn(Probe)
    call = asyncio.create_task(probe.hang())
    read, left = [cast("AsyncGenerator[np.ndarray]", rl.at(probe, dp=0).count()) for _ in range(2)]
    for stream in (read, left):
        await anext(stream)
    await rl.stop(probe)
    with pytest.raises(MeshStopped, match=r"Probe.hang was called on rank \d, but the actor is stopped"):
        await call
    with pytest.raises(MeshStopped):
        [value async for value in read]
    await left.aclose()  # which is quiet
    with pytest.raises(MeshStopped):
        await probe.note(1)
    assert await other.note(1) == [1]


async def test_an_actor_can_be_made_again(mesh: rl.Mesh) -> None:
    probe, other = await mesh.spawn(Probe), await mesh.spawn(Probe)
    await asyncio.gather(probe.note(1), other.note(1))
    running = asyncio.create_task(probe.hang())
    await until(probe, "running")
    await rl.respawn(probe)
    with pytest.raises(MeshStopped):
        await running
    assert await probe.note(2) == [2]
    assert await other.note(2) == [1, 2]
    await rl.stop(probe)
    await asyncio.gather(rl.respawn(probe), rl.respawn(probe))
    assert await rl.each(probe.note)(3) == [[3], [3]]


@on_ray_too
async def test_a_stream_waits_for_its_reader_closes_with_it_and_says_where_it_fails(mesh: rl.Mesh) -> None:
    probe = await mesh.spawn(Probe)
    one = rl.at(probe, dp=0)
    stream = cast("AsyncGenerator[np.ndarray]", one.count())
    assert [(await anext(stream)).tolist() for _ in range(3)] == [[1], [2], [3]]
    for _ in range(20):  # the rank turns to each: time enough to yield as many
        assert await one.yielded() <= 5
    await stream.aclose()
    await until(one, "closed")
    failing = aiter(rl.at(probe, dp=1).count(last=1))
    assert (await anext(failing)).tolist() == [1]
    with pytest.raises(RankFailed, match=r"Probe.count on rank 1 \(dp=1\) failed: ValueError: stream"):
        await anext(failing)


def layers() -> rl.Weights:
    return rl.Weights(7, {f"layer{number}": np.full((64, 64), number, np.float32) for number in range(16)})


class Rollouts(rl.Actor):
    def __init__(self) -> None:
        self.called: list[str] = []

    @rl.endpoint
    async def order(self) -> Same[list[str]]:
        return self.called

    @rl.endpoint
    async def write_rows(self, batch: rl.Shard[rl.Batch]) -> None:
        for row in batch.objects("row"):
            cast("dict[str, int]", row)["number"] = -1

    @rl.endpoint
    async def make(self, rows: int, length: int) -> rl.Gather[rl.Batch]:
        first = rl.current_rank().index * rows
        return rl.Batch.of(
            tokens=rl.Ragged.of([np.full(length, first + row) for row in range(rows)], np.int32),
            prompt=[f"{first + row}" * length for row in range(rows)],
            rewards=np.arange(first, first + rows, dtype=np.float32),
        )

    @rl.endpoint
    async def doubled(self, batch: rl.Shard[rl.Batch]) -> rl.Gather[rl.Batch]:
        tokens = rl.Ragged(np.multiply(batch.tokens.values, 2), batch.tokens.offsets)
        return batch.assign(tokens=tokens, rewards=batch.rewards * 2)

    @rl.endpoint
    async def same(self, batch: rl.Shard[rl.Batch]) -> rl.Gather[rl.Batch]:
        self.called.append("same")
        return batch

    @rl.endpoint
    async def stream(self, batch: rl.Shard[rl.Batch]) -> AsyncIterator[rl.Gather[rl.Batch]]:
        for row in range(len(batch)):
            yield batch.select([row])

    @rl.endpoint
    async def numbers(self, values: np.ndarray) -> Same[float]:
        self.called.append("numbers")
        return float(values.sum())

    @rl.endpoint
    async def weights(self) -> Same[rl.Weights]:
        return layers()

    @rl.endpoint
    async def fingerprint(self, weights: rl.Weights) -> Same[str]:
        return weights.fingerprint()


class Asks(rl.Actor):
    @rl.endpoint
    async def ask(self, other: Rollouts, batch: rl.Shard[rl.Batch]) -> rl.Gather[rl.Batch]:
        return await other.doubled(batch)


@pytest.mark.parametrize("engine", ["local", "by reference", "processes", "ray"], indirect=True)
async def test_large_columns_stay_on_the_ranks_until_they_are_loaded(engine: Engine, mesh: rl.Mesh) -> None:
    rollouts = await mesh.spawn(Rollouts)
    batch = await rollouts.make(4, 20_000)
    assert {"tokens", "prompt"} <= set(batch.elsewhere)
    if engine.inline_bytes:
        assert batch.rewards.tolist() == list(range(8)), "small columns come with the reply"
    assert batch.lengths.tolist() == [20_000] * 8
    with pytest.raises(DataError, match=r"batch.load\('tokens'\)"):
        _ = batch.tokens
    assert [row[0] for row in (await batch.load("tokens")).tokens] == list(range(8))
    one = await batch.select([6]).load()
    assert one.objects("prompt") == ("6" * 20_000,)


@where_columns_stay
async def test_rows_go_from_mesh_to_mesh_in_any_split(mesh: rl.Mesh, reserve: Reserve) -> None:
    one, other, asks = await mesh.spawn(Rollouts), await (await reserve(3)).spawn(Rollouts), await mesh.spawn(Asks)
    batch = await one.make(5, 20_000)
    shuffled = batch.select(np.array([9, 0, 4, 4, 7]))
    for made in await other.doubled(shuffled), await asks.ask(other, shuffled):
        doubled = await made.load()
        assert doubled.rewards.tolist() == [18, 0, 8, 8, 14]
        assert [(row[0], len(row)) for row in doubled.tokens] == [(number, 20_000) for number in (18, 0, 8, 8, 14)]
        assert doubled.objects("prompt")[0] == "9" * 20_000
    returned = await other.same(await one.same(batch))
    assert await returned.load() == await batch.load()
    streamed = rl.Batch.join([chunk async for chunk in other.stream(batch.part(np.arange(10)))])
    assert await streamed.load() == await batch.load()
    assert await (await other.same(await batch.load("tokens"))).load() == await batch.load(), "loading binds nothing"
    for seed in range(4):
        batch = await one.same(batch.select(np.random.default_rng(seed).permutation(10)))
    column = batch.stored["tokens"]
    assert isinstance(column, RemoteColumn)
    assert len(column.pieces) == 2, "pieces do not multiply on the way"


@where_columns_stay
async def test_python_values_are_not_shared_with_ranks(mesh: rl.Mesh) -> None:
    rollouts = await mesh.spawn(Rollouts)
    mine = rl.Batch.of(row=[{"number": row, "text": "x" * 70_000} for row in range(4)])
    held = await rollouts.same(mine)
    assert held.elsewhere, "what is inside dictionaries counts"
    loaded = await held.load()
    for batch in (mine, held, loaded, rl.Batch.concat([held, mine]), rl.Batch.concat([loaded, mine])):
        await rollouts.write_rows(batch)
    for batch in (mine, loaded, await held.load()):
        assert [cast("dict[str, int]", row)["number"] for row in batch.objects("row")] == [0, 1, 2, 3]


@where_columns_stay
async def test_what_is_replicated_may_be_large(mesh: rl.Mesh) -> None:
    rollouts = await mesh.spawn(Rollouts)
    assert await rollouts.numbers(np.ones(100_000)) == 100_000
    weights = await rollouts.weights()
    with pytest.raises(DataError, match=r"weights of version 7 .* lie on the rank that made them"):
        _ = weights.tensors
    assert await weights.load() == layers()
    for each in (weights, layers().with_version(8)):
        assert await rollouts.fingerprint(each) == layers().fingerprint()
