"""An engine's process, stood in for: the GPUs of its ranks, mapped memory, when it sleeps, and what SGLang adds."""

import asyncio
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import AsyncMock, MagicMock

import numpy as np
import pytest
import torch

from meshrl import Actor, current_rank, each, endpoint
from meshrl.errors import ConfigError
from meshrl.mesh import Rank, Same
from meshrl_inference.engine_side import protocol
from meshrl_inference.engine_side.arguments import with_args
from meshrl_inference.engine_side.loading import mapped
from meshrl_inference.engine_side.worker import Worker
from meshrl_inference.group import RankGpus, gather_gpus, join_gpus
from meshrl_sglang.transfer import read_back
from tests.backends.material import Warm, on_ranks


def test_an_engine_has_the_gpus_of_its_ranks_in_their_order_or_ranks_that_cannot_share_it_are_told() -> None:
    assert join_gpus({0: RankGpus("a", ("3",)), 1: RankGpus("a", ("0",))}) == ["3", "0"]
    assert join_gpus({0: RankGpus("a", ()), 1: RankGpus("a", ())}) == []
    for one, other, message in (
        (RankGpus("a 1", ("0",)), RankGpus("b 1", ("0",)), "rank 2 is on a; rank 5 is on b: use a smaller tp"),
        (RankGpus("a 1", ("0",)), RankGpus("a 2", ("0",)), "on one machine"),  # machines of one name
        (RankGpus("a", ("0",)), RankGpus("a", ("0",)), "rank 2 has 0; rank 5 has 0: set gpus = 1"),
        (RankGpus("a", ("0",)), RankGpus("a", ()), "rank 2 has 0; rank 5 has none: set gpus = 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            join_gpus({2: one, 5: other})
    assert gather_gpus(Rank(1, 2, {"dp": 0, "tp": 1}, {"dp": 1, "tp": 2})) == []
    with pytest.raises(ConfigError, match=r"2 engines of 2 ranks each.*set run.engine = 'ray'"):
        gather_gpus(Rank(0, 4, {"dp": 0, "tp": 0}, {"dp": 2, "tp": 2}))


class Engines(Actor):
    def __init__(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CUDA_VISIBLE_DEVICES", f"GPU-{current_rank().index}")
            self.gpus = gather_gpus(current_rank())

    @endpoint
    async def told(self) -> Same[list[str]]:
        return self.gpus


@on_ranks
async def test_the_first_rank_along_tp_is_told_the_gpus_of_the_others(warm: Warm) -> None:
    for shape, expected in (
        ({"dp": 2, "tp": 2}, [["GPU-0", "GPU-1"], [], ["GPU-2", "GPU-3"], []]),
        ({"tp": 2, "dp": 2}, [["GPU-0", "GPU-2"], ["GPU-1", "GPU-3"], [], []]),
    ):
        mesh = (await warm(4)).shape(**shape)
        actors = await asyncio.gather(*(mesh.spawn(Engines) for _ in range(2)))
        for actor in actors:
            assert await each(actor.told)() == expected


def test_memory_that_is_written_again_under_another_name_is_mapped_once_and_let_go_when_removed(tmp_path: Path) -> None:
    def maps() -> int:
        return Path("/proc/self/maps").read_text().count(str(tmp_path))

    file = tmp_path / "one"
    file.write_bytes(b"old bytes")
    memory = mapped(str(file))
    assert memory[:] == b"old bytes"
    file = file.rename(tmp_path / "other")
    with file.open("r+b") as opened:
        opened.write(b"new bytes")
    assert mapped(str(file)) is memory
    assert memory[:] == b"new bytes"
    del memory
    for name in ("two", "three"):
        file.unlink()
        file = tmp_path / name
        file.write_bytes(b"bytes")
        mapped(str(file))
        assert maps() == 1


class Steps:
    """An engine, as far as memory goes: a row ends after two steps, and from 100 on never."""

    version, tokens, steps, cache_use = "stand-in", 100, 0, 0.0

    def __init__(self, told: Connection) -> None:
        self.told, self.processes, self.finished = told, list[BaseProcess](), list[protocol.FinishedRow]()
        self.rows, self.asleep = dict[int, int](), set[str]()

    def note(self, what: str) -> None:
        self.told.send_bytes(protocol.encode(protocol.Rows([protocol.FinishedRow(-1, b"", b"", [], what)])))

    @property
    def decodes(self) -> bool:
        return bool(self.rows)

    def sleep(self) -> None:
        assert not self.rows
        self.asleep |= {"weights", "kv_cache"}
        self.note("sleep")

    def wake(self, names: list[str]) -> None:
        assert set(names) <= self.asleep
        self.asleep.difference_update(names)
        self.note(f"wake {' '.join(names)}")

    def add(self, order: protocol.Generate, salt: str) -> None:
        self.rows.update({row.number: 2 if row.number < 100 else sys.maxsize for row in order.rows})

    def abort(self, rows: list[int], *, wanted: bool) -> None:
        for number in rows:
            del self.rows[number]

    def load(self, order: protocol.Load) -> protocol.Outcome:
        assert "weights" not in self.asleep
        self.note("take")
        return protocol.IN_SHARED_MEMORY

    def drop(self, adapter: str) -> None:
        self.note(f"drop {adapter}")

    def read(self, probe: list[list[int]], salt: str, adapter: str) -> list[float]:
        assert not self.asleep
        self.note("read")
        return [0.0] * sum(len(each) - 1 for each in probe)

    def step(self, orders: Connection) -> None:
        assert not self.asleep
        self.rows = {number: left - 1 for number, left in self.rows.items()}
        ended = [number for number, left in self.rows.items() if not left]
        self.finished += [protocol.FinishedRow(number, b"", b"", [], "length") for number in ended]
        for number in ended:
            del self.rows[number]


class Sampler(NamedTuple):
    connection: Connection

    def hear(self, count: int) -> list[str]:
        heard: list[str] = []
        while len(heard) < count:
            answer = protocol.to_sampler.decode(self.connection.recv_bytes())
            if isinstance(answer, protocol.Rows):
                heard += [each.reason if each.number < 0 else f"row {each.number}" for each in answer.done]
            else:
                heard.append(type(answer).__name__)
        return heard

    def load(self, *probe: list[int]) -> None:
        self.connection.send_bytes(protocol.encode(protocol.Load(1, [], recompute=True, probe=list(probe))))

    def generate(self, *numbers: int) -> None:
        rows = [protocol.Row(number, np.array([1], np.int32).tobytes(), 2, 0) for number in numbers]
        self.connection.send_bytes(protocol.encode(protocol.Generate(rows, 1.0, 1.0, 0, [], [])))


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        ({"max_num_batched_token": 9}, "no argument of vLLM 1: did you mean 'max_num_batched_tokens'"),
        ({"xyz": 9}, "no argument of vLLM 1: its documentation"),
        ({"model": "other"}, "'model' = 'other', which meshrl itself sets to 'mine'"),
    ],
    ids=str,
)
def test_arguments_that_an_engine_does_not_take_are_told(args: dict[str, object], complaint: str) -> None:
    known = {"model", "max_num_batched_tokens"}
    assert with_args({"model": "mine", "max_num_batched_tokens": None}, {"max_num_batched_tokens": 9}, known, "") == {
        "model": "mine", "max_num_batched_tokens": 9,
    }  # fmt: skip
    with pytest.raises(ValueError, match=complaint):
        with_args({"model": "mine"}, args, known, "vLLM 1")


@pytest.fixture
def sampler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Sampler]:
    ours, theirs = Pipe()
    naming = MagicMock(return_value=SimpleNamespace(specs=lambda dtype: {}, linear={}))
    monkeypatch.setattr("meshrl_inference.engine_side.loading.Naming", naming)
    start = protocol.Start(str(tmp_path), "float32", 8, 4, 1, 1, [], None, 0.5, eager=False, sleep=True, own={})

    def run() -> None:
        with pytest.raises(EOFError):
            Worker(theirs, Steps(theirs), start).run()

    thread = Thread(target=run)
    thread.start()
    yield Sampler(ours)
    ours.close()
    thread.join()


def test_it_sleeps_before_the_last_rows_are_told_and_wakes_for_others(sampler: Sampler) -> None:
    assert sampler.hear(2) == ["sleep", "Ready"]
    for number in (0, 2):
        sampler.generate(number, number + 1)
        assert sampler.hear(4) == ["wake weights kv_cache", "sleep", f"row {number}", f"row {number + 1}"]
    sampler.generate(100, 101)
    sampler.connection.send_bytes(protocol.encode(protocol.Abort([100, 101], wanted=False)))  # nobody wants its rows
    assert sampler.hear(2) == ["wake weights kv_cache", "sleep"]


def test_new_weights_wake_the_weights_alone_and_their_probe_the_rest(sampler: Sampler) -> None:
    sampler.load()
    assert sampler.hear(5) == ["sleep", "Ready", "wake weights", "take", "Loaded"]
    sampler.load()  # nobody has generated since: they are awake
    assert sampler.hear(2) == ["take", "Loaded"]
    sampler.generate(0)
    assert sampler.hear(3) == ["wake kv_cache", "sleep", "row 0"]
    sampler.load([1, 2])
    assert sampler.hear(6) == ["wake weights", "take", "wake kv_cache", "read", "sleep", "Loaded"]


async def test_a_tensor_that_is_another_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sglang", "sglang.srt", "sglang.srt.managers"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    asked = SimpleNamespace(GetWeightsByNameReqInput=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", asked)
    sent, manager = [("head", torch.arange(6.0).reshape(3, 2))], MagicMock(get_weights_by_name=AsyncMock())
    for told, refused in (
        ([[0.0, 1.0], [2.0, 3.0]], nullcontext()),
        ([[0.0, 1.0], [2.0, 4.0]], pytest.raises(RuntimeError, match="another `head`")),
        (None, pytest.raises(RuntimeError, match="cannot tell `head`")),
    ):
        manager.get_weights_by_name.return_value = told
        with refused:
            await read_back(manager, sent)
        assert manager.get_weights_by_name.await_args.args[0].name == "head"
