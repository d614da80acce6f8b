from collections.abc import Iterator

import pytest

from tests.cluster.jobs import LOGS, answered, begun, do, wait_for, written, written_around_a_cut
from tests.support.cluster import Cluster


@pytest.fixture(scope="module")
def two() -> Iterator[Cluster]:
    """Ray never notices that a host is away: it keeps the node."""
    with Cluster(2, environment={"RAY_health_check_failure_threshold": "1000"}) as cluster:
        yield cluster


def test_last_lines_come_from_a_host_that_lives(two: Cluster) -> None:
    host = two.hosts[1]
    told, text = do(two, written, host.name)
    assert told.startswith("RankDied")
    assert "--- the end of logs/far-0.log ---" in told
    assert "in die" in told
    assert f" on {host.name}, " in text
    for line in "hello from there", "last words", "Segmentation fault":
        assert line in text
    assert host.run(["sh", "-c", f"ls {LOGS} 2>&1 || true"]).strip().endswith("No such file or directory")


def test_what_had_come_is_told_of_a_host_that_is_cut_off_and_the_log_goes_on(two: Cluster) -> None:
    host = two.hosts[1]
    controller = begun(two, written_around_a_cut, host.name)
    host.cut()
    wait_for(controller, "RankDied")
    host.heal()
    told, text = answered(controller)
    assert "nothing was heard of its host" in told
    assert "hello from there" in told
    assert "hello from there" in text
