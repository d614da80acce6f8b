import time

from tests.cluster.jobs import MIB, begun, calls, crowded, do, places, rows_between, traffic
from tests.support.cluster import Cluster, Host


def left(host: Host) -> list[str]:
    line = "cat /proc/[0-9]*/cmdline | tr '\\0' '\\n' | grep -a ^ray::Rank; ls /dev/shm /tmp | grep meshrl"
    return host.run(["sh", "-c", f"{line}; true"]).split()


def nothing_is_left(cluster: Cluster) -> None:
    while any(map(left, cluster.hosts)):
        time.sleep(0.2)


def test_spread_ranks_are_on_hosts_with_clocks_of_their_own(three: Cluster) -> None:
    hosts, told, ahead = do(three, places)
    assert len(set(hosts)) == 2
    first = three.hosts[int(hosts[0].removeprefix("node")) - 1]
    assert told == [f"0 1 {first.address}"] * 2
    assert abs(ahead[0] - ahead[1]) > 5
    nothing_is_left(three)
    assert do(three, crowded) == ["1"], "cores that are left on two hosts are not those of one"


def test_rows_go_from_host_to_host_and_past_the_controller(healed: Cluster) -> None:
    before = traffic(healed)
    assert do(healed, rows_between, "node2", "node3", 32) == 2 * (2 * MIB - 1)
    (_, came), (sent, _), (_, received) = traffic(healed) - before
    assert 32 <= sent < 34
    assert 32 <= received < 34
    assert came < 34, "it reads the result, and nothing else"
    nothing_is_left(healed)
    _, second, third = healed.hosts  # and a sound network is not needed
    second.slow(delay=0.02, loss=0.01)
    third.slow(rate=2e8)
    assert do(healed, rows_between, "node2", "node3", 8) == 2 * (MIB // 2 - 1)


def test_a_controller_that_is_killed_takes_its_ranks_along(three: Cluster) -> None:
    controller = begun(three, calls, "node2")
    assert left(three.hosts[1])
    controller.kill()
    controller.communicate()
    while "ray::RankProcess" in left(three.hosts[1]):
        time.sleep(0.2)
