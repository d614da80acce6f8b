"""When an engine gives its GPU's memory back, and takes it again. The engine is stood in for: no GPU is needed."""

import sys
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest

from meshrl_inference.messages import Done, Generate, Leave, Load, Row, Rows, Start, encode, to_sampler
from meshrl_inference.worker import Worker

TAGS = {"weights", "kv_cache"}


class Steps:
    """An engine, as far as memory goes: a row ends after two steps, and from 100 on never."""

    version, tokens, steps = "stand-in", 100, 0

    def __init__(self, told: Connection) -> None:
        self.told = told
        self.processes = list[BaseProcess]()
        self.rows: dict[int, int] = {}
        self.left: list[Done] = []
        self.asleep = set[str]()

    def note(self, what: str) -> None:
        self.told.send_bytes(encode(Rows([Done(-1, b"", b"", [], what)])))

    @property
    def decodes(self) -> bool:
        return bool(self.rows)

    def sleep(self) -> None:
        assert not self.rows
        self.asleep.update(TAGS)
        self.note("sleep")

    def wake(self, names: list[str]) -> None:
        assert set(names) <= self.asleep
        self.asleep.difference_update(names)
        self.note(f"wake {' '.join(names)}")

    def add(self, order: Generate, salt: str) -> None:
        self.rows.update({row.number: 2 if row.number < 100 else sys.maxsize for row in order.rows})

    def leave(self, rows: list[int], *, told: bool) -> None:
        for number in rows:
            del self.rows[number]

    def take(self, order: Load) -> str:
        assert "weights" not in self.asleep
        self.note("take")
        return ""

    def read(self, probe: list[list[int]], salt: str) -> list[float]:
        assert not self.asleep
        self.note("read")
        return [0.0] * sum(len(each) - 1 for each in probe)

    def step(self, orders: Connection) -> None:
        assert not self.asleep
        self.rows = {number: left - 1 for number, left in self.rows.items()}
        ended = [number for number, left in self.rows.items() if not left]
        self.left += [Done(number, b"", b"", [], "length") for number in ended]
        for number in ended:
            del self.rows[number]


class Sampler:
    """The sampler's end of the connection."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def hear(self, count: int) -> list[str]:
        """What the engine did and said next."""
        heard: list[str] = []
        while len(heard) < count:
            answer = to_sampler.decode(self.connection.recv_bytes())
            if isinstance(answer, Rows):
                heard += [each.reason if each.number < 0 else f"row {each.number}" for each in answer.done]
            else:
                heard.append(type(answer).__name__)
        return heard

    def load(self, *probe: list[int]) -> None:
        self.connection.send_bytes(encode(Load(1, [], recompute=True, probe=list(probe))))

    def generate(self, *numbers: int) -> None:
        rows = [Row(number, np.array([1], np.int32).tobytes(), 2, 0) for number in numbers]
        self.connection.send_bytes(encode(Generate(rows, 1.0, 1.0, 0, [], [])))


@pytest.fixture(params=[True])
def sampler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Sampler]:
    """Of an engine that sleeps, unless a test asks for one that does not."""
    ours, theirs = Pipe()
    naming = MagicMock(return_value=SimpleNamespace(held=lambda dtype: {}))
    monkeypatch.setattr("meshrl_inference.naming.Naming", naming)
    start = Start(str(tmp_path), "float32", 8, 4, 1, 1, [], None, 0.5, eager=False, sleep=request.param, own={})

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
    sampler.connection.send_bytes(encode(Leave([100, 101], told=False)))  # nobody wants its rows
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


@pytest.mark.parametrize("sampler", [False], indirect=True)
def test_it_stays_awake_unless_told(sampler: Sampler) -> None:
    sampler.generate(0)
    sampler.load()
    assert sampler.hear(4) in (["Ready", "take", "Loaded", "row 0"], ["Ready", "row 0", "take", "Loaded"])
