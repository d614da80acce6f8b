"""Hosts that are silent, with Ray's own slow checks: what is told within `run.patience`, and what costs only time."""

import subprocess
import time
from collections.abc import Iterator
from subprocess import PIPE, STDOUT

import pytest

from meshrl.mesh import PATIENCE
from meshrl.testing.cluster import Cluster
from tests.cluster.jobs import answer, begin
from tests.cluster.silence_jobs import left, lost, waited

LATE = 20.0
"""Seconds on a busy machine. Ray takes a minute and more."""


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    """Three hosts whose nodes Ray gives up after a minute, as it does by itself."""
    with Cluster(3) as cluster:
        yield cluster


def ready(controller: "subprocess.Popen[str]") -> None:
    assert controller.stdout
    while (line := controller.stdout.readline()) != "ready\n":
        assert line, "it ended"


def test_a_short_cut_and_a_bad_network_cost_time_and_no_work(three: Cluster) -> None:
    first, second, _ = three.hosts
    controller = first.start(begin(three, waited, second.name), stdout=PIPE, stderr=STDOUT)
    ready(controller)
    second.cut()
    time.sleep(PATIENCE / 2)
    second.heal()
    second.slow(delay=0.05, loss=0.02)
    said = controller.communicate(timeout=300)[0]
    second.heal()
    assert answer(said) == 101, said


def test_what_lay_on_a_host_that_is_cut_off_is_lost_and_its_rank_ends(three: Cluster) -> None:
    first, second, third = three.hosts
    controller = first.start(begin(three, lost, first.name, second.name, third.name), stdout=PIPE, stderr=STDOUT)
    ready(controller)
    second.cut()
    said = controller.communicate(timeout=100)[0]
    pid, (*rows, call) = answer(said)
    for error, seconds in rows:
        assert f"the column `tokens` cannot be read from {second.name} ({second.address})" in error, said
        assert PATIENCE / 2 <= seconds <= PATIENCE + LATE, said
    assert call[0].startswith("RankDied"), said
    for error, _ in (*rows, call):
        assert f"nothing was heard of its host ({second.address}) for {PATIENCE:g} s" in error, said
    second.run(["sh", "-c", f"for i in $(seq 300); do test -e /proc/{pid} || exit 0; sleep 0.1; done; exit 1"])
    second.heal()


def test_a_run_whose_head_is_gone_ends_with_an_error(three: Cluster) -> None:
    """The last test on these hosts."""
    first, second, third = three.hosts
    controller = third.start(begin(three, left, second.name), stdout=PIPE, stderr=STDOUT)
    ready(controller)
    first.kill()
    said = controller.communicate(timeout=60)[0]
    assert controller.returncode == 1, (controller.returncode, said)
    for error, seconds in answer(said):
        assert "Ray's head is gone, without which no rank can be used" in error, said
        assert seconds <= PATIENCE + LATE, said
