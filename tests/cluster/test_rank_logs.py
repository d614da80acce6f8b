"""What a rank on another host writes, brought to the run's folder on the controller's."""

from subprocess import PIPE, STDOUT

import pytest

from meshrl.testing.cluster import Cluster
from tests.cluster.jobs import answer, begin, do
from tests.cluster.log_jobs import LOGS, written, written_after_a_cut, written_until_the_host_died


@pytest.mark.parametrize("how", ["kill", "exit", "segfault"])
def test_last_lines_come_from_a_host_that_lives(three: Cluster, how: str) -> None:
    host = three.hosts[1]
    told, text = do(three, written, host.name, how)
    assert "--- the end of logs/far-0.log ---" in told
    assert ("in die" if how == "segfault" else "last words") in told
    assert f" on {host.name}, " in text
    assert "hello from there" in text
    assert "last words" in text
    assert host.run(["sh", "-c", f"ls {LOGS} 2>&1 || true"]).strip().endswith("No such file or directory")


def test_what_had_come_is_told_of_a_host_that_died() -> None:
    with Cluster(2) as cluster:
        head, host = cluster.hosts
        controller = head.start(begin(cluster, written_until_the_host_died, host.name), stdout=PIPE, stderr=STDOUT)
        assert controller.stdout
        while (line := controller.stdout.readline()) != "ready\n":
            assert line, "it ended"
        host.kill()
        said = controller.communicate(timeout=100)[0]
        told = answer(said)
        assert "nothing was heard of its host" in told or "node" in told
        assert "hello from there" in told, said


@pytest.mark.timeout(300)
def test_the_log_goes_on_on_a_host_that_was_cut_off() -> None:
    """Ray does not notice: it keeps the node."""
    with Cluster(2, environment={"RAY_health_check_failure_threshold": "1000"}) as cluster:
        head, host = cluster.hosts
        controller = head.start(begin(cluster, written_after_a_cut, host.name), stdout=PIPE, stderr=STDOUT)
        assert controller.stdout
        for step, change in ("ready\n", host.cut), ("RankDied\n", host.heal):
            while (line := controller.stdout.readline()) != step:
                assert line, "it ended"
            change()
        assert "before" in answer(controller.communicate(timeout=100)[0])
