"""Meshes over three hosts: where ranks are, what goes over whose cable, and how calls end when a host is in trouble."""

import signal
import subprocess
import time
from subprocess import PIPE, STDOUT

import pytest

from meshrl.testing.cluster import Cluster, Host
from tests.cluster.jobs import MIB, answer, begin, calls, crowded, do, places, rows_between
from tests.cluster.training_jobs import trained


def megabytes(before: list[tuple[int, int]], cluster: Cluster) -> list[tuple[float, float]]:
    """What each host has sent and received meanwhile, in MiB."""
    now = [host.traffic() for host in cluster.hosts]
    return [((a - c) / MIB, (b - d) / MIB) for (a, b), (c, d) in zip(now, before, strict=True)]


def left(host: Host) -> list[str]:
    """Ranks and what they keep on a host."""
    line = "cat /proc/[0-9]*/cmdline | tr '\\0' '\\n' | grep -a ^ray::Rank; ls /dev/shm /tmp | grep meshrl"
    return host.run(["sh", "-c", f"{line}; true"]).split()


def nothing_is_left(cluster: Cluster) -> bool:
    until = time.monotonic() + 20
    while any(map(left, cluster.hosts)) and time.monotonic() < until:
        time.sleep(0.2)
    return not any(map(left, cluster.hosts))


def test_spread_ranks_are_on_hosts_with_clocks_of_their_own(three: Cluster) -> None:
    """Each is the first of its host, and finds the others."""
    hosts, told, ahead = do(three, places)
    assert len(set(hosts)) == 2
    first = three.hosts[int(hosts[0].removeprefix("node")) - 1]
    assert told == [f"0 1 {first.address}"] * 2
    assert abs(ahead[0] - ahead[1]) > 5
    assert nothing_is_left(three)


def test_rows_go_from_host_to_host_and_past_the_controller(three: Cluster) -> None:
    before = [host.traffic() for host in three.hosts]
    last, _ = do(three, rows_between, "node2", "node3", 32)
    (_, came), (sent, _), (_, received) = megabytes(before, three)
    assert last == 2 * (2 * MIB - 1)
    assert 32 <= sent < 34
    assert 32 <= received < 34
    assert came < 34, "it reads the result, and nothing else"
    assert nothing_is_left(three)


def test_cores_that_are_left_on_two_hosts_are_not_taken_for_those_of_one(three: Cluster) -> None:
    assert do(three, crowded) == ["1"]


def test_a_sound_network_is_not_needed(healed: Cluster) -> None:
    _, second, third = healed.hosts
    second.slow(delay=0.02, loss=0.01)
    third.slow(rate=2e8)
    assert do(healed, rows_between, "node2", "node3", 8)[0] == 2 * (MIB // 2 - 1)


def begun(cluster: Cluster, host: str, seconds: float) -> "subprocess.Popen[str]":
    """A controller that calls a rank of a host again and again."""
    controller = cluster.hosts[0].start(begin(cluster, calls, host, seconds), stdout=PIPE, stderr=STDOUT)
    assert controller.stdout
    while (line := controller.stdout.readline()) != "ready\n":
        assert line, "it ended"
    return controller


def test_a_call_waits_for_a_network_that_comes_back(healed: Cluster) -> None:
    controller = begun(healed, "node2", 8)
    healed.hosts[1].cut()
    time.sleep(3)
    healed.hosts[1].heal()
    error, _, longest = answer(controller.communicate(timeout=60)[0])
    assert error == ""
    assert longest >= 2


def test_a_controller_that_is_killed_takes_its_ranks_along(three: Cluster) -> None:
    controller = begun(three, "node2", 60)
    assert left(three.hosts[1])
    controller.send_signal(signal.SIGKILL)
    controller.communicate()
    until = time.monotonic() + 20
    while "ray::RankProcess" in left(three.hosts[1]) and time.monotonic() < until:
        time.sleep(0.2)
    assert "ray::RankProcess" not in left(three.hosts[1])


@pytest.fixture
def own_names(three: Cluster) -> Cluster:
    """Hosts whose own name leads to 127.0.1.1, as Debian's installer writes it."""
    for host in three.hosts:
        host.run(["sh", "-c", f"(echo 127.0.0.1 localhost; echo 127.0.1.1 {host.name}) > /tmp/names"])
        host.run(["mount", "--bind", "/tmp/names", "/etc/hosts"])  # noqa: S108 -- the host's own
    return three


def test_fsdp_over_two_hosts_has_the_bits_of_one_host(own_names: Cluster) -> None:
    apart = do(own_names, trained, {"train": 1})
    together = do(own_names, trained, {"node1": 1})
    assert sorted(apart["hosts"]) == ["node1", "node2"]
    assert together["hosts"] == ["node1", "node1"]
    assert apart["weights"] == together["weights"]
    assert apart["metrics"] == together["metrics"]


def test_a_host_is_added_and_one_comes_back(three: Cluster) -> None:
    added = three.add()
    assert do(three, rows_between, added.name, "node2", 1)[0] == 2 * (MIB // 16 - 1)
    added.kill()
    added.boot()
    assert do(three, rows_between, "node2", added.name, 1)[0] == 2 * (MIB // 16 - 1)
