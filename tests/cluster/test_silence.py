"""Hosts that are silent, with Ray's own slow checks: what is told after `run.patience`, and what costs only time."""

import time
from collections.abc import Iterator

import pytest

from meshrl.mesh import PATIENCE
from tests.cluster.jobs import answered, begun, left, lost, waited
from tests.support.cluster import Cluster


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    """Three hosts whose nodes Ray gives up after a minute, as it does by itself."""
    with Cluster(3) as cluster:
        yield cluster


def test_a_short_cut_and_a_bad_network_cost_time_and_no_work(three: Cluster) -> None:
    second = three.hosts[1]
    controller = begun(three, waited, second.name)
    second.cut()
    time.sleep(PATIENCE / 2)
    second.heal()
    second.slow(delay=0.05, loss=0.02)
    assert answered(controller) == 101
    second.heal()


def test_what_lay_on_a_host_that_is_cut_off_is_lost_and_its_rank_ends(three: Cluster) -> None:
    first, second, third = three.hosts
    controller = begun(three, lost, first.name, second.name, third.name)
    second.cut()
    pid, (*rows, call) = answered(controller)
    for error in rows:
        assert f"the column `tokens` cannot be read from {second.name} ({second.address})" in error
    assert call.startswith("RankDied")
    for error in (*rows, call):
        assert f"nothing was heard of its host ({second.address}) for {PATIENCE:g} s" in error
    second.run(["sh", "-c", f"while test -e /proc/{pid}; do sleep 0.1; done"])
    second.heal()


def test_a_run_whose_head_is_gone_ends_with_an_error(three: Cluster) -> None:
    """The last test on these hosts."""
    first, second, third = three.hosts
    controller = begun(three, left, second.name, host=third)
    first.kill()
    for error in answered(controller, status=1):
        assert "Ray's head is gone, without which no rank can be used" in error
