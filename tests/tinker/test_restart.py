"""A server that is killed at any await: the next one goes on from what is on disk, with each request applied once."""

import asyncio
import inspect
import shutil
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinker import types

from meshrl import Policy, Run, RunConfig, Sampler
from meshrl.errors import Damaged, DataError
from meshrl.tinker import ServedConfig
from meshrl.tinker.journal import Asked, Journal, packed
from meshrl.tinker.library import Session
from meshrl.tinker.models import Models, WholeModels
from meshrl.tinker.queues import ModelQueue, Room
from meshrl.tinker.requests import Adam, Create, Datum, Load, OptimStep, Pass, Refused, Request, Save, Tensor
from meshrl.tinker.results import Failure, Result
from meshrl.tinker.service import Service
from tests.tinker.served import client, datum, served, table

MODEL = "session:train:0"


def rows(number: int, seed: int | None = None) -> Pass:
    tokens = np.random.default_rng(number if seed is None else seed).integers(0, 11, 6).astype(np.int32)
    weights = Tensor(np.ones(5, np.float32).tobytes(), "float32", (5,))
    targets = Tensor(tokens[1:].astype(np.int64).tobytes(), "int64", (5,))
    inputs = {"target_tokens": targets, "weights": weights}
    return Pass(MODEL, number, "cross_entropy", {}, [Datum(tokens[:-1].tobytes(), inputs)], backward=True)


def asked() -> list[Request]:
    adam = Adam(learning_rate=1e-2)
    return [
        Create("session", 0, "tiny"),
        rows(1),
        OptimStep(MODEL, 2, adam),
        rows(3),
        rows(4),
        OptimStep(MODEL, 5, adam),
        Save(MODEL, 6, "kept"),
        rows(7),
        OptimStep(MODEL, 8, adam),
        Load(f"tinker://{MODEL}/weights/kept", True, MODEL, 9),
        rows(10),
        OptimStep(MODEL, 11, adam),
        Save(MODEL, 12, "end"),
    ]


@asynccontextmanager
async def models(model: str, folder: Path) -> AsyncGenerator[tuple[Models, ServedConfig]]:
    config = ServedConfig.model_validate(table(model, folder, state_every=2))
    async with Run(RunConfig(name="models", folder=str(folder))) as run:
        policy, sampler = await run.spawn(Policy, config.policy), await run.spawn(Sampler, config.sampler)
        made = WholeModels(policy, sampler, folder / "scratch")
        await made.open()
        yield made, config


async def results(
    made: Models, config: ServedConfig, folder: Path, requests: Sequence[Request] | None = None, first: int = 0
) -> list[Result | None]:
    """All requests, one after the other, of a server over a folder. The results: None for one that was removed."""
    service = Service(config, made, folder, Room(100, 1 << 30, lambda _: 100))
    service.library.shelf("default").put_session(Session("session", 0.0))
    work = asyncio.create_task(service.run())
    found: list[Result | None] = []
    for number, request in enumerate(asked() if requests is None else requests, first):
        if isinstance(request, Create):
            service.create("default", request)
        else:
            service.submit("default", MODEL, number, request)
        queue = service.queue("default", MODEL)
        found.append(await queue.result(number, 60) if queue.has(number) else None)
    work.cancel()
    with suppress(asyncio.CancelledError):
        await work
    service.close()
    return found


class Photographed:
    """Models that copy a folder before and after each of their calls, in which alone the server awaits something."""

    def __init__(self, models: Models, folder: Path, to: Path) -> None:
        self._models, self._folder, self._to = models, folder, to

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._models, name)
        if not inspect.iscoroutinefunction(value):
            return value

        async def call(*arguments: Any, **named: Any) -> Any:
            self._take()
            try:
                return await value(*arguments, **named)
            finally:
                self._take()

        return call

    def _take(self) -> None:
        shutil.copytree(self._folder, self._to / f"{len(list(self._to.iterdir())):03}")


@pytest.mark.parametrize("stride", [4, pytest.param(1, marks=pytest.mark.wide)])
async def test_a_server_that_is_killed_at_any_await_applies_each_request_once(
    stride: int, model: str, tmp_path: Path
) -> None:
    (tmp_path / "kills").mkdir()
    (tmp_path / "first").mkdir()
    async with models(model, tmp_path / "run") as (made, config):
        photographed: Any = Photographed(made, tmp_path / "first", tmp_path / "kills")
        right = await results(photographed, config, tmp_path / "first")
        kills = sorted((tmp_path / "kills").iterdir())
        assert len(kills) >= 30
        for kill in kills[::stride]:
            found = await results(made, config, kill)
            assert all(each in (None, known) for each, known in zip(found, right, strict=True)), kill.name
            assert found[-1] is not None
            for name in ("kept", "end"):
                state = f"default/models/{MODEL}/weights/{name}/state"
                files = [path for path in (tmp_path / "first" / state).iterdir() if path.suffix == ".safetensors"]
                assert files
                assert all(path.read_bytes() == (kill / state / path.name).read_bytes() for path in files), kill.name


class Failing:
    """Models of which one call fails after all, though it was made."""

    def __init__(self, models: Models, name: str, count: int) -> None:
        self._models, self._name, self._left = models, name, count

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._models, name)
        if name != self._name:
            return value

        async def call(*arguments: Any, **named: Any) -> Any:
            found = await value(*arguments, **named)
            self._left -= 1
            if not self._left:
                raise OSError(5, "Input/output error")
            return found

        return call


async def test_a_request_that_failed_has_changed_nothing(model: str, tmp_path: Path) -> None:
    adam = Adam(learning_rate=1e-2)
    begin: list[Request] = [Create("session", 0, "tiny"), rows(1)]

    def step(number: int) -> list[Request]:
        return [OptimStep(MODEL, number, adam), Save(MODEL, number + 1, f"after-{number}")]

    for name in ("right", "failed"):
        (tmp_path / name).mkdir()

    def saved(folder: str, name: str) -> list[bytes]:
        files = sorted((tmp_path / folder / f"default/models/{MODEL}/weights/{name}/state").glob("*.safetensors"))
        assert files
        return [each.read_bytes() for each in files]

    async with models(model, tmp_path / "run") as (made, config):
        await results(made, config, tmp_path / "right", [*begin, rows(2), *step(3)])
        failing: Any = Failing(made, "forward_backward", 2)
        found = await results(failing, config, tmp_path / "failed", [*begin, rows(2), rows(3, seed=2), *step(4)])
        assert [isinstance(each, Failure) for each in found] == [False, False, True, False, False, False]
        assert saved("failed", "after-4") == saved("right", "after-3")
        found = await results(made, config, tmp_path / "failed", [Save(MODEL, 6, "again"), rows(7), *step(8)], 6)
        assert not any(isinstance(each, Failure) for each in found)
        assert saved("failed", "again") == saved("right", "after-3")
        failing = Failing(made, "read_state", 1)
        found = await results(
            failing, config, tmp_path / "failed", [Save(MODEL, 10, "lost"), Save(MODEL, 11, "end")], 10
        )
        assert [isinstance(each, Failure) for each in found] == [True, False]
        assert saved("failed", "end") == saved("failed", "after-8")


async def test_a_request_that_could_not_be_read_again_is_not_kept(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    queue = ModelQueue(MODEL, "default", journal, Room(1, 1 << 20, lambda _: 1))
    with pytest.raises(DataError, match="request 1 cannot be kept"):
        queue.add(1, Refused(MODEL, 2**31, "bad"))
    assert not list(journal.records())
    assert queue.add(1, Refused(MODEL, 1, "good")), "nothing was taken for the other"
    journal.close()


def test_a_client_goes_on_with_a_server_that_began_again(model: str, tmp_path: Path) -> None:
    tokens, adam = [1, 5, 3, 8], types.AdamParams(learning_rate=1e-2)
    row = datum(tokens, weights=[1.0] * 3)

    def losses(urls: Iterator[str]) -> list[float]:
        url = next(urls)
        training = client(url).create_lora_training_client("tiny").result()
        sampling = training.save_weights_and_get_sampling_client().result()
        found = [training.forward_backward([row], "cross_entropy").result().metrics["loss:sum"]]
        training.optim_step(adam).result()
        assert next(urls) == url
        for _ in range(2):
            found.append(training.forward_backward([row], "cross_entropy").result().metrics["loss:sum"])
            training.optim_step(adam).result()
        drawn = sampling.sample(types.ModelInput.from_ints(tokens), 1, types.SamplingParams(max_tokens=3)).result()
        assert len(drawn.sequences) == 1
        return found

    def once(config: dict[str, Any]) -> Iterator[str]:
        with served(config) as url:
            yield url
            yield url

    def twice(config: dict[str, Any]) -> Iterator[str]:
        with served(config) as url:
            yield url
        config["tinker"]["port"] = int(url.rpartition(":")[2])
        with served(config) as url:
            yield url

    assert losses(twice(table(model, tmp_path / "a"))) == losses(once(table(model, tmp_path / "b")))


@pytest.mark.parametrize("damage", ["cut", "changed"])
async def test_a_journal_whose_end_was_cut_is_read_and_one_that_was_changed_is_not(damage: str, tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for number in range(3):
        journal.add(packed(Asked(number, rows(number))))
    journal.close()
    (path,) = tmp_path.iterdir()
    raw = bytearray(path.read_bytes())
    if damage == "cut":
        path.write_bytes(raw[:-5])
        again = Journal(tmp_path)
        again.add(packed(Asked(7, rows(7))))
        assert [record.number for record, _ in again.records()] == [0, 1, 7]
        again.close()
    else:
        raw[40] ^= 1
        path.write_bytes(raw)
        with pytest.raises(Damaged, match="at byte 0 of"):
            Journal(tmp_path)
