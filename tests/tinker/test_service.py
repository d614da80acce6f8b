"""What the service does when a disk is full, a client is gone, or results are fetched late. Its models do nothing."""

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshrl.data import Batch, Ragged
from meshrl.errors import DataError
from meshrl.remote import Call, Packed
from meshrl.tinker import ServedConfig, queues
from meshrl.tinker.journal import Answered, Asked, Journal, Place, packed
from meshrl.tinker.library import Session
from meshrl.tinker.queues import Busy, ModelQueue, Pending, Room
from meshrl.tinker.requests import Adam, Create, OptimStep
from meshrl.tinker.results import Failure, Plain
from meshrl.tinker.service import Service
from tests.tinker.served import table


class Idle:
    """Models without numbers."""

    most = 1
    full = False

    def adapter(self, model: str) -> str | None:
        return None

    async def create(self, model: object) -> None:
        pass

    async def drop(self, model: str) -> None:
        pass

    async def step(self, model: str, adam: Adam) -> dict[str, float]:
        return {}

    async def read_state(self, model: str, folder: Path, *, optimizer: bool) -> None:
        assert folder.is_dir()

    async def write_state(self, model: str, folder: Path) -> None:
        if self.full:
            raise OSError(28, "No space left on device")
        folder.mkdir()


@asynccontextmanager
async def service(folder: Path, models: Any, room: Room | None = None) -> AsyncGenerator[Service]:
    config = ServedConfig.model_validate(table("tiny", folder, state_every=1))
    made = Service(config, models, folder, room or Room(100, 1 << 30, lambda _: 100))
    made.library.shelf("default").put_session(Session("session", 0.0))
    work = asyncio.create_task(made.run())
    try:
        yield made
        assert not work.done()
    finally:
        work.cancel()
        with suppress(asyncio.CancelledError):
            await work
        made.close()


async def stepped(made: Service, model: str, number: int) -> object:
    made.submit("default", model, number, OptimStep(model, number, Adam()))
    return await made.queue("default", model).result(number, 60)


async def test_a_disk_that_is_full_holds_results_back_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models, left = Idle(), [3]
    models.full = True
    add = Journal.add

    def full(journal: Journal, record: bytes) -> Place:
        if b"answered" in record and left[0]:
            left[0] -= 1
            raise OSError(28, "No space left on device")
        return add(journal, record)

    monkeypatch.setattr(Journal, "add", full)
    monkeypatch.setattr(queues, "_AGAIN", 0.01)
    async with service(tmp_path, models) as made:
        model = made.create("default", Create("session", 0, "tiny"))
        assert isinstance(await stepped(made, model, 1), Plain)
        assert left == [0]
        other = made.create("default", Create("session", 1, "tiny"))  # the first one is parked without a state
        assert isinstance(await stepped(made, other, 1), Plain)
        models.full = False
        assert isinstance(await stepped(made, model, 2), Plain)


async def test_a_request_that_cannot_be_made_ends_nothing(tmp_path: Path) -> None:
    class Broken(Idle):
        async def step(self, model: str, adam: Adam) -> dict[str, float]:
            raise RecursionError

    async with service(tmp_path, Broken()) as made:
        model = made.create("default", Create("session", 0, "tiny"))
        failure = await stepped(made, model, 1)
        assert isinstance(failure, Failure)
        assert (failure.error, failure.category) == ("RecursionError: the log of the server says more", "server")
        made.submit("default", model, 2, Call(model, 2, "step", step={"bogus": 1.0}))
        failure = await made.queue("default", model).result(2, 60)
        assert isinstance(failure, Failure)
        assert "bogus" in failure.error
        assert failure.category == "user"


class Pair(Idle):
    """Two models that make their steps at the same time, of which one fails."""

    most = 2

    def __init__(self) -> None:
        self.begun = asyncio.Barrier(2)

    async def step(self, model: str, adam: Adam) -> dict[str, float]:
        await self.begun.wait()
        if model == "session:train:0":
            raise DataError("no gradients")
        return {"lr": adam.learning_rate}


async def test_steps_of_several_models_are_made_together_and_fail_alone(tmp_path: Path) -> None:
    async with service(tmp_path, Pair()) as made:
        models = [made.create("default", Create("session", number, "tiny")) for number in range(2)]
        for model in models:
            await made.queue("default", model).result(0, 60)
        failed, stepped_on = await asyncio.gather(*(stepped(made, model, 1) for model in models))
        assert failed == Failure("no gradients", "user")
        assert stepped_on == Plain({"metrics": {"lr": 1e-4}, "type": "optim_step"})


async def test_calls_with_rows_count_as_passes_do(tmp_path: Path) -> None:
    rows = Packed.of(Batch.of(tokens=Ragged.of([[1, 2, 3], [4, 5]], np.int32)))
    tenant = {"key_sha256": "0" * 64, "storage_gib": 1e-9}
    config = ServedConfig.model_validate(table("tiny", tmp_path, tenants={"small": tenant}))
    idle: Any = Idle()
    made = Service(config, idle, tmp_path, Room(100, 1 << 30, lambda _: 100))
    made.library.shelf("small").put_session(Session("session", 0.0))
    model = made.create("small", Create("session", 0, "tiny"))
    with pytest.raises(Busy, match="delete some checkpoints"):
        made.submit("small", model, 1, Call(model, 1, "logprobs", rows))
    made.submit("small", model, 1, Call(model, 1, "step"))
    made.close()
    assert Pending(1, Call(model, 1, "logprobs", rows), 0).cost == 5


@pytest.mark.parametrize("cut", [False, True])
async def test_what_came_after_a_state_is_read_without_what_came_before(cut: bool, tmp_path: Path) -> None:
    journal = Journal(tmp_path, keeps=True)
    steps = [Asked(number, OptimStep("m", number, Adam())) for number in range(3)]
    for each in steps:
        journal.add(packed(each))
    for number in range(2):
        journal.add(packed(Answered(number, Plain({}))))
    journal.begin(1, -1, [] if cut else [packed(steps[2])])
    journal.add(packed(Answered(2, Plain({}))))
    queue = ModelQueue("m", "default", journal, Room(10, 1 << 20, lambda _: 10))
    queue.restore(1)
    if not cut:
        (tmp_path / "journal-0000000000").unlink()
    assert [each.number for each in queue.applied()] == [2]
    journal.close()


async def test_models_that_clients_are_done_with_keep_no_file_open(tmp_path: Path) -> None:
    async with service(tmp_path, Idle()) as made:
        for number in range(8):
            model = made.create("default", Create("session", number, "tiny"))
            assert isinstance(await stepped(made, model, 1), Plain)
            made.unload("default", model)
        links = map(os.path.realpath, Path("/proc/self/fd").iterdir())  # other threads may close theirs meanwhile
        assert len([each for each in links if each.startswith(f"{tmp_path}/") and "journal-" in each]) <= 2
        model = "session:train:0"
        assert isinstance(await made.queue("default", model).result(1, 60), Plain)
        assert isinstance(await stepped(made, model, 2), Plain)


async def test_requests_that_wait_for_one_that_never_comes_go_with_their_session(tmp_path: Path) -> None:
    room = Room(100, 10_000, lambda name: 3 if name == "default" else 100, 0.5)
    async with service(tmp_path, Idle(), room) as made:
        model = made.create("default", Create("session", 0, "tiny"))
        assert await made.queue("default", model).result(0, 60)
        for number in (2, 3, 4):
            made.submit("default", model, number, OptimStep(model, number, Adam()))
        with pytest.raises(Busy, match="3 requests of this key wait"):
            room.take("default", 1)
        made.finish("default", "session", "success")
        room.take("default", 4000)
        with pytest.raises(Busy, match="of this key wait, and it has no room for 2000 more"):
            room.take("default", 2000)
        room.take("other", 5000)


async def test_a_result_that_nobody_has_asked_for_outlives_states(tmp_path: Path) -> None:
    async with service(tmp_path, Idle()) as made:
        model = made.create("default", Create("session", 0, "tiny"))
        for number in range(1, 6):
            made.submit("default", model, number, OptimStep(model, number, Adam()))
        queue = made.queue("default", model)
        assert isinstance(await queue.result(5, 60), Plain)
        assert [queue.has(number) for number in range(6)] == [True] * 6
        assert isinstance(await queue.result(1, 60), Plain)
