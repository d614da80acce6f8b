"""`meshrl launch ssh` between hosts: a program that enters a host's namespaces stands in for ssh."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE, STDOUT

import pytest

from tests.cluster.jobs import wait_for
from tests.support.cluster import Cluster

SCRIPT = """
import asyncio, socket
import meshrl as rl
from meshrl.config import Config
from meshrl.errors import DataError
from meshrl.mesh import Same

class WhereConfig(Config):
    seconds: float = 0.0

class Where(rl.Actor):
    @rl.endpoint
    async def host(self) -> Same[str]:
        return socket.gethostname()

async def where(run: rl.Run, config: WhereConfig) -> None:
    ranks = await run.mesh(2, rl.Resources(cpus=0, placement="spread"))
    where = await ranks.spawn(Where)
    print("ranks on", *sorted(await rl.each(where.host)()), "told by", socket.gethostname(), flush=True)
    async for _ in run.steps(2):
        await asyncio.sleep(config.seconds / 2)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(2, ray=False, shared=[tmp_path_factory.getbasetemp()]) as cluster:
        yield cluster


@pytest.fixture
def folder(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "where.py").write_text(SCRIPT)
    (tmp_path / "where.toml").write_text('algorithm = "where.py"\n[run]\nname = "where"\n')
    cases = [f'{host.name}) exec {shlex.join(host._machine.enter())} sh -c "$2" ;;' for host in cluster.hosts]
    cases.append('*) echo "enter: Could not resolve hostname $1" >&2; exit 255 ;;')
    (tmp_path / "enter").write_text("#!/bin/sh\ncase $1 in\n" + "\n".join(cases) + "\nesac\n")
    (tmp_path / "enter").chmod(0o755)
    return tmp_path


def launched(folder: Path, *arguments: str, hosts: str = "node1,node2") -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", "from meshrl.cli import main; main()", "launch", "ssh", str(folder / "where.toml")]
    command += [*arguments, "--hosts", hosts, "--ssh", str(folder / "enter")]
    return subprocess.Popen(command, stdout=PIPE, stderr=STDOUT, text=True)


def nothing_runs(cluster: Cluster) -> None:
    while any(len(host.run(["sh", "-c", "echo /proc/[0-9]*"]).split()) > 2 for host in cluster.hosts):
        time.sleep(0.2)


def test_a_run_uses_the_hosts_leaves_nothing_and_its_failure_is_the_status(cluster: Cluster, folder: Path) -> None:
    said, _ = (process := launched(folder)).communicate()
    assert process.returncode == 0, said
    assert "ranks on node1 node2 told by node1" in said
    assert '"finished"' in (folder / "runs" / "where" / "summary.json").read_text()
    nothing_runs(cluster)
    fails = SCRIPT.replace("async for _ in", "raise DataError('on purpose')\n    async for _ in")
    (folder / "where.py").write_text(fails)
    said, _ = (process := launched(folder, "run.name=failed", hosts="node1")).communicate()
    assert process.returncode == 1
    assert "on purpose" in said
    nothing_runs(cluster)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_where_it_is_interrupted(cluster: Cluster, folder: Path, number: signal.Signals) -> None:
    with launched(folder, "seconds=600") as process:
        wait_for(process, "ranks on")
        os.kill(process.pid, number)
        said = process.communicate()[0] if number != signal.SIGKILL else ""
    nothing_runs(cluster)
    if number != signal.SIGKILL:
        assert process.returncode == 130, said
        assert "Interrupted: Ray has ended on the hosts." in said
        assert '"interrupted"' in (folder / "runs" / "where" / "summary.json").read_text()


def test_a_host_that_is_not_there_is_told_before_anything_starts(cluster: Cluster, folder: Path) -> None:
    said, _ = (process := launched(folder, hosts="node1,node9")).communicate()
    assert process.returncode == 1
    assert "1 of 2 hosts cannot be used:\n  node9: enter: Could not resolve hostname node9" in said
    assert not (folder / "runs").exists()
    nothing_runs(cluster)
