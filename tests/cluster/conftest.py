"""Tests on several hosts of this machine: `make test-cluster`, as root."""

from collections.abc import Callable, Iterator
from importlib.util import find_spec

import pytest

from meshrl.testing.cluster import Cluster, missing


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "cluster" in item.path.parts:
            item.add_marker(pytest.mark.process)


@pytest.fixture(scope="session", autouse=True)
def _hosts_can_be_made() -> None:
    if reason := missing():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three hosts with a node of Ray each: two to train on, one for rollouts."""
    if find_spec("ray") is None:
        pytest.skip("ray is not installed")
    resources = [{"train": 1}, {"train": 1}, {"rollout": 2}]
    with Cluster(3, resources=resources, shared=[tmp_path_factory.getbasetemp()]) as cluster:
        yield cluster


@pytest.fixture
def healed(three: Cluster) -> Iterator[Cluster]:
    """The same; a test may cut and slow them."""
    yield three
    for host in three.hosts:
        host.heal()


@pytest.fixture
def bare() -> Iterator[Callable[[int], Cluster]]:
    """`bare(2)`: so many hosts without Ray."""
    made: list[Cluster] = []

    def make(count: int) -> Cluster:
        made.append(Cluster(count, ray=False))
        return made[-1]

    yield make
    for cluster in made:
        cluster.close()
