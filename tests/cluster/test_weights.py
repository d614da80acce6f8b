import subprocess
import time

from meshrl.mesh import PATIENCE
from tests.cluster.broadcast_jobs import broadcast
from tests.cluster.jobs import MIB, answered, begun, do, traffic, ways
from tests.support.cluster import Cluster

COLLECTIVES, STORE = "collectives", "the object store"


def test_each_cable_carries_them_once_each_way_wherever_the_controller_is(three: Cluster) -> None:
    for controller in three.hosts[:2]:
        before = traffic(three)
        assert do(three, ways, "node1", ["node2", "node3"], 32, 1, host=controller) == [[COLLECTIVES] * 2]
        (sent, _), (on, second), (_, third) = traffic(three) - before
        for each in sent, second, on, third:
            assert 32 <= each < 35


def test_a_broadcast_comes_to_each_host_once_however_many_samplers_open_it(three: Cluster) -> None:
    before = traffic(three)
    ways, most = do(three, broadcast, ["node1", "node2", "node3"], 3)
    assert ways == ["broadcast through shared memory"] * 3
    assert most < 1e-4
    lacking = 3 * 32 * 2 / 3  # of three versions, each host has a third
    for _, came in traffic(three) - before:
        assert 2 * lacking <= came < 2.4 * lacking  # FSDP gathers them once for the probe


def started(cluster: Cluster) -> subprocess.Popen[str]:
    for host in cluster.hosts:
        host.slow(rate=1e8)
    controller = begun(cluster, ways, "node1", ["node2", "node3"], 32, 2)
    sent = cluster.hosts[1].traffic()[0]
    while cluster.hosts[1].traffic()[0] < sent + MIB:  # until the second hands them on
        time.sleep(0.05)
    return controller


def test_a_short_cut_on_the_way_costs_time_alone(healed: Cluster) -> None:
    controller = started(healed)
    healed.hosts[1].cut()
    time.sleep(PATIENCE / 3)
    healed.hosts[1].heal()
    assert answered(controller) == [[COLLECTIVES] * 2] * 2


def test_where_a_host_on_the_way_is_cut_off_those_behind_it_have_them_from_the_store(healed: Cluster) -> None:
    """The last test on these hosts."""
    controller = started(healed)
    healed.hosts[1].cut()
    first, (error, way) = answered(controller)
    assert first == [COLLECTIVES] * 2
    assert f"nothing was heard of its host ({healed.hosts[1].address}) for {PATIENCE:g} s" in error
    assert way == STORE
