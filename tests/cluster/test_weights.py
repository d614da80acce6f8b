"""Weights from host to host: by whose cable they go, and what is told when one on the way is in trouble."""

import subprocess
import time
from subprocess import PIPE, STDOUT

from meshrl.mesh import PATIENCE
from meshrl.testing.cluster import Cluster
from tests.cluster.broadcast_jobs import broadcast
from tests.cluster.jobs import MIB, answer, begin, do
from tests.cluster.weights_jobs import ways

COLLECTIVES, STORE = "collectives", "the object store"
LATE = 20.0
"""Seconds on a busy machine."""


def test_each_cable_carries_them_once_each_way_wherever_the_controller_is(three: Cluster) -> None:
    for controller in three.hosts[:2]:
        before = [host.traffic() for host in three.hosts]
        (answers,) = do(three, ways, "node1", ["node2", "node3"], 32, 1, host=controller)
        assert [way for way, _ in answers] == [COLLECTIVES] * 2
        (sent, _), (on, second), (_, third) = (
            ((a - c) / MIB, (b - d) / MIB)
            for (a, b), (c, d) in zip([host.traffic() for host in three.hosts], before, strict=True)
        )
        for each in sent, second, on, third:
            assert 32 <= each < 35


def test_a_broadcast_comes_to_each_host_once_however_many_samplers_open_it(three: Cluster) -> None:
    before = [host.traffic() for host in three.hosts]
    ways, most = do(three, broadcast, ["node1", "node2", "node3"], 3)
    assert ways == ["broadcast through shared memory"] * 3
    assert most < 1e-4
    lacking = 3 * 32 * 2 / 3  # of three versions, each host has a third
    for host, (_, came) in zip(three.hosts, before, strict=True):
        assert 2 * lacking <= (host.traffic()[1] - came) / MIB < 2.4 * lacking  # FSDP gathers them once for the probe


def started(cluster: Cluster) -> "subprocess.Popen[str]":
    """A controller whose weights begin to go over slow cables, by way of the second host to the third."""
    for host in cluster.hosts:
        host.slow(rate=1e8)
    job = begin(cluster, ways, "node1", ["node2", "node3"], 32, 2)
    controller = cluster.hosts[0].start(job, stdout=PIPE, stderr=STDOUT)
    assert controller.stdout
    while (line := controller.stdout.readline()) != "ready\n":
        assert line, "it ended"
    time.sleep(1)
    return controller


def test_where_a_host_on_the_way_is_cut_off_those_behind_it_have_them_from_the_store(healed: Cluster) -> None:
    controller = started(healed)
    healed.hosts[1].cut()
    said = controller.communicate(timeout=100)[0]
    first, ((error, seconds), (way, later)) = answer(said)
    assert [each for each, _ in first] == [COLLECTIVES] * 2, said
    assert f"nothing was heard of its host ({healed.hosts[1].address}) for {PATIENCE:g} s" in error, said
    assert PATIENCE / 2 <= seconds <= PATIENCE + LATE, said
    assert way == STORE, said
    assert later <= PATIENCE + LATE, said


def test_a_short_cut_on_the_way_costs_time_alone(healed: Cluster) -> None:
    controller = started(healed)
    healed.hosts[1].cut()
    time.sleep(PATIENCE / 3)
    healed.hosts[1].heal()
    said = controller.communicate(timeout=100)[0]
    assert [[way for way, _ in each] for each in answer(said)] == [[COLLECTIVES] * 2] * 2, said


def test_where_a_host_on_the_way_dies_those_behind_it_have_them_from_the_store(healed: Cluster) -> None:
    """The last test on these hosts."""
    controller = started(healed)
    healed.hosts[1].kill()
    said = controller.communicate(timeout=100)[0]
    _, ((error, _), (way, _)) = answer(said)
    healed.hosts[1].boot()
    assert error.startswith("RankDied"), said
    assert way == STORE, said
