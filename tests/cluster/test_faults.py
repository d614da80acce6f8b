"""Hosts that die while a mesh has ranks there. Ray is told to find that out in seconds, or never."""

from collections.abc import Callable, Iterator
from subprocess import PIPE, STDOUT

import pytest

from meshrl.testing.cluster import Cluster
from tests.cluster.jobs import answer, begin, do, hosts_of, revived
from tests.cluster.stream_jobs import streamed

QUICKLY = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "4",
}
NEVER = {"RAY_health_check_failure_threshold": "1000"}


@pytest.fixture(scope="module")
def two() -> Iterator[Cluster]:
    with Cluster(2, environment=QUICKLY) as cluster:
        yield cluster


@pytest.mark.parametrize("cause", ["killed", "cut off", "killed and booted at once"])
def test_a_mesh_is_made_again_on_a_host_that_has_come_back(two: Cluster, cause: str) -> None:
    """Also where Ray does not know yet that the host has died."""
    head, host = two.hosts
    controller = head.start(begin(two, revived, host.name), stdout=PIPE, stderr=STDOUT)
    assert controller.stdout
    while (line := controller.stdout.readline()) != "ready\n":
        assert line, "it ended"
    if cause == "cut off":
        host.cut()
    else:
        host.kill()
    if cause != "killed and booted at once":
        while not (line := controller.stdout.readline()).startswith("RankDied"):
            assert line, "it ended"
    if cause == "cut off":
        host.kill()  # Ray's node there would end itself
    host.boot()
    said = controller.communicate(timeout=100)[0]
    assert answer(said) == [host.name], said


def streams(cluster: Cluster, steps: list[str], changes: list[Callable[[], object]]) -> None:
    """Change the hosts whenever those draw that a step names, until the last do."""
    controller = cluster.hosts[0].start(begin(cluster, streamed, *steps), stdout=PIPE, stderr=STDOUT)
    assert controller.stdout
    for step, change in zip(steps, changes, strict=False):
        said: list[str] = []
        while (line := controller.stdout.readline()) != f"{step}\n":
            said.append(line)
            assert line, "".join(said)
        change()
    rest = controller.communicate(timeout=100)[0]
    assert answer(rest) >= len(steps), rest


@pytest.mark.timeout(300)
def test_samplers_shrink_and_grow_with_the_hosts_that_are_there() -> None:
    """The run begins with one of two; a host joins, and one dies and comes back."""
    resources = [{}, {"rollout": 1}, {"rollout": 1}]
    with Cluster(2, resources=resources, environment=QUICKLY) as cluster:
        second = cluster.hosts[1]
        steps = ["node2", "node2 node3", "node3", "node2 node3"]
        streams(cluster, steps, [cluster.add, second.kill, second.boot])


@pytest.mark.timeout(300)
def test_samplers_move_to_hosts_that_answer_though_ray_takes_the_others_for_living() -> None:
    """Also back to one that answers again. Ray itself would wait for them for ever."""
    with Cluster(3, resources=[{}, *[{"rollout": 1}] * 3], environment=NEVER) as cluster:
        _, second, third = cluster.hosts
        steps = ["node2 node3", "node3", "node3 node4", "node4", "node3 node4"]
        streams(cluster, steps, [second.cut, cluster.add, third.cut, third.heal])
        assert sorted(do(cluster, hosts_of, 2, {"rollout": 1})) == ["node3", "node4"]
        assert f"{second.address} does not answer" in do(cluster, hosts_of, 3, {"rollout": 1})
