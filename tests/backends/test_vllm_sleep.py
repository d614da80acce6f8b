"""When a vLLM engine gives its GPU's memory back, and takes it again. vLLM itself is stood in for: no GPU is needed."""

import sys
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from meshrl_vllm import worker
from meshrl_vllm.messages import Done, Generate, Leave, Load, Row, Rows, Start, encode, to_sampler

TAGS = {"weights", "kv_cache"}


class Engine:
    """vLLM's engine, as far as memory goes: a row ends after two steps, and from 100 on never."""

    def __init__(self, told: Connection) -> None:
        self.told = told
        self.left: dict[str, int] = {}
        self.asleep = set[str]()
        self.engine_core = MagicMock()
        self.engine_core.engine_core.model_executor.sleeping_tags = self.asleep
        self.output_processor = SimpleNamespace(request_states=dict[str, SimpleNamespace]())
        self.model_config = MagicMock(**{"get_vocab_size.return_value": 100})
        self.set_weight_version = MagicMock()
        self.reset_prefix_cache = MagicMock()

    def note(self, what: str) -> None:
        self.told.send_bytes(encode(Rows([Done(-1, b"", b"", [], what)])))

    def sleep(self, level: int) -> None:
        assert not self.left
        assert level == 1
        self.asleep.update(TAGS)
        self.note("sleep")

    def wake_up(self, tags: list[str]) -> None:
        assert set(tags) <= self.asleep
        self.asleep.difference_update(tags)
        self.note(f"wake {' '.join(tags)}")

    def add_request(self, number: str, *_: object, **__: object) -> None:
        self.left[number] = 2 if int(number) < 100 else sys.maxsize
        self.output_processor.request_states[number] = SimpleNamespace(external_req_id=number)

    def abort_request(self, numbers: list[str]) -> None:
        for number in numbers:
            del self.left[number]

    def has_unfinished_requests(self) -> bool:
        return bool(self.left)

    def collective_rpc(self, method: str, **_: object) -> None:
        assert "weights" not in self.asleep
        self.note(method)

    def step(self) -> list[SimpleNamespace]:
        assert not self.asleep
        self.left = {number: left - 1 for number, left in self.left.items()}
        done = [number for number, left in self.left.items() if not left]
        for number in done:
            del self.left[number]
        one = SimpleNamespace(weight_versions=(), token_ids=(), logprobs=(), finish_reason="length")
        return [SimpleNamespace(finished=True, outputs=[one], request_id=number) for number in done]


class Sampler:
    """The sampler's end of the connection."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def hear(self, count: int) -> list[str]:
        """What the engine did and said next."""
        heard: list[str] = []
        while len(heard) < count:
            assert self.connection.poll(10), f"nothing comes after {heard}"
            answer = to_sampler.decode(self.connection.recv_bytes())
            if isinstance(answer, Rows):
                heard += [each.reason if each.number < 0 else f"row {each.number}" for each in answer.done]
            else:
                heard.append(type(answer).__name__)
        return heard

    def load(self) -> None:
        self.connection.send_bytes(encode(Load(1, [], recompute=True, probe=[])))

    def generate(self, *numbers: int) -> None:
        rows = [Row(number, np.array([1], np.int32).tobytes(), 2, 0) for number in numbers]
        self.connection.send_bytes(encode(Generate(rows, 1.0, 1.0, 0, [], [])))


@pytest.fixture
def sleeps() -> bool:
    return True


@pytest.fixture
def sampler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sleeps: bool) -> Iterator[Sampler]:
    ours, theirs = Pipe()
    vllm: Any = MagicMock(__version__="stand-in")
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setattr(worker, "_engine", lambda start: Engine(theirs))
    monkeypatch.setattr("meshrl_vllm.naming.Naming", MagicMock(return_value=SimpleNamespace(held=lambda dtype: {})))
    start = Start(str(tmp_path), "float32", 8, 4, 1, 1, [], None, 0.5, eager=False, sleep=sleeps)

    def run() -> None:
        with pytest.raises(EOFError):
            worker.Worker(theirs, start).run()

    thread = Thread(target=run)
    thread.start()
    yield Sampler(ours)
    ours.close()
    thread.join(10)
    assert not thread.is_alive()


LOADED = ["start_weight_update", "update_weights", "finish_weight_update", "Loaded"]


def test_it_sleeps_before_the_last_rows_are_told_and_wakes_for_others(sampler: Sampler) -> None:
    assert sampler.hear(2) == ["sleep", "Ready"]
    for number in (0, 2):
        sampler.generate(number, number + 1)
        assert sampler.hear(4) == ["wake weights kv_cache", "sleep", f"row {number}", f"row {number + 1}"]


def test_new_weights_wake_the_weights_alone(sampler: Sampler) -> None:
    sampler.load()
    assert sampler.hear(7) == ["sleep", "Ready", "wake weights", *LOADED]
    sampler.load()  # nobody has generated since: they are awake
    assert sampler.hear(4) == LOADED
    sampler.generate(0)
    assert sampler.hear(3) == ["wake kv_cache", "sleep", "row 0"]


def test_it_sleeps_when_nobody_wants_its_rows(sampler: Sampler) -> None:
    sampler.generate(100, 101)
    sampler.connection.send_bytes(encode(Leave([100, 101], told=False)))
    assert sampler.hear(4) == ["sleep", "Ready", "wake weights kv_cache", "sleep"]


@pytest.mark.parametrize("sleeps", [False])
def test_it_stays_awake_unless_told(sampler: Sampler) -> None:
    sampler.generate(0)
    sampler.load()
    assert sampler.hear(6) in (["Ready", *LOADED, "row 0"], ["Ready", "row 0", *LOADED])
