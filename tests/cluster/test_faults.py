"""Hosts that die while a mesh has ranks there. Ray is told to find that out in seconds, or never."""

from collections.abc import Callable, Iterator

import pytest

from tests.cluster.jobs import answered, begun, do, hosts_of, revived, wait_for
from tests.cluster.stream_jobs import streamed
from tests.support.cluster import Cluster

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


@pytest.mark.parametrize("cause", ["cut off", "killed and booted at once"])
def test_a_mesh_is_made_again_on_a_host_that_has_come_back(two: Cluster, cause: str) -> None:
    host = two.hosts[1]
    controller = begun(two, revived, host.name)
    if cause == "cut off":
        host.cut()
        wait_for(controller, "RankDied")
    host.kill()  # Ray's node there would end itself
    host.boot()
    assert answered(controller) == [host.name]


def streams(cluster: Cluster, steps: list[str], changes: list[Callable[[], object]]) -> None:
    """Change the hosts whenever those draw that a step names, until the last do."""
    controller = begun(cluster, streamed, *steps)
    for step, change in zip(steps, changes, strict=False):
        wait_for(controller, f"{step}\n")
        change()
    assert answered(controller) >= len(steps)


def test_samplers_shrink_and_grow_with_the_hosts_that_are_there() -> None:
    resources = [{}, {"rollout": 1}, {"rollout": 1}]
    with Cluster(2, resources=resources, environment=QUICKLY) as cluster:
        second = cluster.hosts[1]
        steps = ["node2", "node2 node3", "node3", "node2 node3"]
        streams(cluster, steps, [cluster.add, second.kill, second.boot])


def test_samplers_move_to_hosts_that_answer_though_ray_takes_the_others_for_living() -> None:
    """Also back to one that answers again. Ray itself would wait for them for ever."""
    with Cluster(3, resources=[{}, *[{"rollout": 1}] * 3], environment=NEVER) as cluster:
        _, second, third = cluster.hosts
        steps = ["node2 node3", "node3", "node3 node4", "node4", "node3 node4"]
        streams(cluster, steps, [second.cut, cluster.add, third.cut, third.heal])
        assert sorted(do(cluster, hosts_of, 2, {"rollout": 1})) == ["node3", "node4"]
        assert f"{second.address} does not answer" in do(cluster, hosts_of, 3, {"rollout": 1})
