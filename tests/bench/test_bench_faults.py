"""The faults of bench/soak.py: a seed determines them, and they become figures. No run is broken here."""

import random
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

import pytest

import bench.faults
from bench.faults import Broken, faults
from meshrl.run import Audit
from meshrl.testing.cluster import Cluster, Host


class FakeHost(Host):
    """It has a sampler, whose process is found at the `looks`-th look. It notes what is done to it."""

    def __init__(self, name: str, done: list[str], looks: int) -> None:
        self.name = name
        self.done = done
        self.looks = self.left = looks

    @property
    def is_on(self) -> bool:
        return True

    def run(self, command: Sequence[str], timeout: float | None = None) -> str:
        if "pgrep" in command[-1]:
            return "4711"
        self.left -= 1
        if self.left:
            return ""
        self.left = self.looks
        self.done.append(f"pkill {self.name}")
        return "killed"

    def cut(self, other: Host | None = None) -> None:
        self.done.append(f"cut {self.name}")

    def kill(self) -> None:
        self.done.append(f"kill {self.name}")


class FakeBroken(Broken):
    """It waits without a pause."""

    def __init__(self, looks: int) -> None:
        self.done: list[str] = []
        self.cluster = Cluster.__new__(Cluster)
        self.cluster.hosts = [FakeHost(f"node{number}", self.done, looks) for number in range(1, 6)]

    def wait_until(self, so: Callable[[], bool], what: str, seconds: float = 0) -> None:
        while not so():
            pass


def done(seed: int, looks: int) -> list[str]:
    run = FakeBroken(looks)
    for fault in islice(faults(random.Random(seed)), 12):
        if "sampler" in fault.name or "host" in fault.name:
            fault.break_it(run)
    return run.done


def test_a_seed_determines_the_faults_however_long_they_wait() -> None:
    assert len(done(0, looks=1)) == 8
    assert done(0, looks=1) == done(0, looks=3) != done(1, looks=1)


@pytest.mark.parametrize("times", [{}, {"a host dies": [(1.0, 4.0), (3.0, 6.0)]}])
def test_each_repair_is_a_figure_and_none_is_needed(
    monkeypatch: pytest.MonkeyPatch, times: dict[str, list[tuple[float, float]]]
) -> None:
    audit = Audit(Path(), "finished", 5, 0, 40, 40, {}, 0, 0, [], [], 1, 2, [])
    monkeypatch.setattr(bench.faults, "audit_run", lambda _: audit)
    used = [{"threads": 10.0} for each in times.values() for _ in each]
    found = {each.name: each.value for each in bench.faults._figures(Path(), times, used)}
    assert found["faults"] == len(used)
    shown = [value for name, value in found.items() if name.startswith("  time ")]
    assert shown == [value for each in times.values() for both in each for value in both]
