"""Runs whose policy's hosts are lost or lose each other restart by themselves, though Ray takes all for living."""

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE, STDOUT

import pytest

from meshrl.mesh import PATIENCE
from meshrl.run import audit_run
from tests.cluster.conftest import TASK
from tests.cluster.jobs import wait_for
from tests.support.cluster import Cluster, Host

NEVER = {"RAY_health_check_failure_threshold": "1000"}
CONFIG = """
algorithm = "grpo"
steps = 100
prompts = 8
ahead = 2
run.name = "mine"
run.checkpoint_every = 5
run.restarts = 1
run.meshes.main = { cpus = 1, custom = { node1 = 1 } }
run.meshes.train = { cpus = 1, custom = { train = 1 } }
"""


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Hosts of which two may have the policy, whose deaths Ray never notices."""
    resources = [{}, {"train": 1}, {"train": 1}]
    with Cluster(3, resources=resources, shared=[tmp_path_factory.getbasetemp()], environment=NEVER) as cluster:
        yield cluster


def has_a_rank(host: Host) -> bool:
    """By the name of its process, of 15 letters: Ray writes the command line anew with each call, not at once."""
    return "yes" in host.run(["sh", "-c", "pgrep ^ray::RankProces > /dev/null && echo yes; true"])


def begun(cluster: Cluster, folder: Path, *overrides: str) -> "subprocess.Popen[str]":
    (folder / "mine.toml").write_text(CONFIG + TASK, "utf-8")
    command = ["env", "-C", str(folder), "meshrl", "run", "mine.toml", f"run.engine={cluster.address}", *overrides]
    controller = cluster.hosts[0].start(command, stdout=PIPE, stderr=STDOUT)
    metrics = folder / "runs" / "mine" / "metrics.jsonl"
    while not metrics.is_file() or len(metrics.read_text("utf-8").splitlines()) < 7:
        assert controller.poll() is None, controller.communicate()[0]
        time.sleep(0.1)
    return controller


@pytest.mark.slow
def test_a_run_goes_on_where_the_policys_host_is_cut_off(three: Cluster, folder: Path) -> None:
    controller = begun(three, folder)
    (cut,) = [host for host in three.hosts[1:] if has_a_rank(host)]
    cut.cut()
    said = controller.communicate()[0]
    cut.heal()
    assert controller.returncode == 0, said
    assert "the run is restarted, number 1 of 1" in said
    assert f"nothing was heard of its host ({cut.address}) for {PATIENCE:g} s" in said
    summary = json.loads((folder / "runs/mine/summary.json").read_text("utf-8"))
    assert summary["restarts"] == 1
    audit = audit_run(folder / "runs/mine")
    assert audit.steps == 100
    assert audit.holds, audit


@pytest.mark.slow
def test_a_run_goes_on_after_the_hosts_of_its_policy_lost_each_other(three: Cluster, folder: Path) -> None:
    """The controller still reaches both, so that only the policy's ranks can notice. FSDP's collectives just wait."""
    _, one, other = three.hosts
    controller = begun(three, folder, "policy.backend=fsdp", "run.meshes.train={ranks=2, cpus=1, custom={train=1}}")
    one.cut(other)
    said = wait_for(controller, ".*the run is restarted, number 1 of 1")
    one.heal()
    other.heal()
    assert f"nothing was heard of its host for {PATIENCE:g} s" in said
    said += controller.communicate()[0]
    assert controller.returncode == 0, said
    audit = audit_run(folder / "runs/mine")
    assert audit.steps == 100
    assert audit.holds, audit
