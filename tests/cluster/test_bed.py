"""The hosts themselves, without Ray: what each has for itself, what can be done to it, and that nothing is left."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import DEVNULL, PIPE

import pytest

from meshrl.errors import ConfigError
from meshrl.testing.cluster import Cluster, Host, missing

# A server that counts the bytes of each connection, and tells their number to who has sent them.
SERVER = """
import socket
server = socket.create_server(("", 1234))
print("ready", flush=True)
while True:
    came, _ = server.accept()
    count = 0
    while some := came.recv(1 << 20):
        count += len(some)
    came.sendall(b"%d" % count)
    came.close()
"""
CLIENT = """
import socket, sys, time
began = time.monotonic()
try:
    with socket.create_connection((sys.argv[1], 1234), timeout=float(sys.argv[3])) as server:
        server.sendall(bytes(int(sys.argv[2])))
        server.shutdown(socket.SHUT_WR)
        print(int(server.recv(99)), time.monotonic() - began)
except OSError as error:
    print(type(error).__name__)
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Host]]:
    """Three without Ray, of which each has a server."""
    with Cluster(3, ray=False) as cluster:
        servers = [served(host) for host in cluster.hosts]
        yield cluster.hosts
    for server in servers:
        server.communicate()


@pytest.fixture
def three(hosts: list[Host]) -> Iterator[list[Host]]:
    """The same; a test may cut and slow them."""
    yield hosts
    for host in hosts:
        host.heal()


RUNNING = "cat /proc/[0-9]*/comm"


def shell(host: Host, line: str) -> str:
    return host.run(["sh", "-c", line]).strip()


def served(host: Host) -> "subprocess.Popen[str]":
    server = host.start([sys.executable, "-c", SERVER], stdout=PIPE)
    assert server.stdout
    assert server.stdout.readline() == "ready\n"
    return server


def sent(host: Host, to: Host, size: int = 1, patience: float = 600) -> str:
    """What a client says that sends bytes to another host's server: how many arrived, and seconds; or its error."""
    return host.run([sys.executable, "-c", CLIENT, to.name, str(size), str(patience)]).strip()


def arrives(host: Host, to: Host) -> bool:
    return sent(host, to).startswith("1 ")


def is_lost(host: Host, to: Host) -> bool:
    return sent(host, to, patience=0.5) == "TimeoutError"


def seconds(host: Host, to: Host, size: int = 1) -> float:
    count, took = sent(host, to, size).split()
    assert int(count) == size
    return float(took)


def test_a_host_has_what_a_machine_has_for_itself(three: list[Host]) -> None:
    one, two, _ = three
    clock = f"{sys.executable} -c 'import time; print(int(time.monotonic() / 10))'"
    for line in "hostname", "hostname -i", "cat /proc/sys/kernel/random/boot_id", clock:
        assert shell(one, line) != shell(two, line), line
    assert shell(one, "hostname") == one.name
    assert shell(one, "hostname -i") == one.address
    for folder in "/dev/shm", "/tmp":  # noqa: S108 -- the host's own
        shell(one, f"touch {folder}/mine")
        assert shell(two, f"ls {folder}") == "", folder
        assert not Path(folder, "mine").exists()
    sleeper = one.start(["sleep", "1000"])
    assert "sleep" not in shell(two, RUNNING)
    assert "sleep" in shell(one, RUNNING)
    sleeper.kill()
    assert sleeper.wait() == -signal.SIGKILL
    assert "sleep" not in shell(one, RUNNING)


def test_a_command_says_how_it_ended(three: list[Host]) -> None:
    with pytest.raises(subprocess.CalledProcessError) as failed:
        three[0].run(["sh", "-c", "echo said; exit 3"])
    assert (failed.value.returncode, failed.value.output) == (3, "said\n")
    with pytest.raises(subprocess.TimeoutExpired):
        three[0].run(["sleep", "1000"], timeout=0.5)
    assert "sleep" not in shell(three[0], RUNNING)


def test_hosts_share_the_current_folder_and_those_that_are_named_and_one_is_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    monkeypatch.chdir(here)
    with Cluster(1, ray=False, shared=[there]) as cluster:
        one, two = cluster.hosts[0], cluster.add()
        assert [host.name for host in cluster.hosts] == ["node1", "node2"]
        shell(one, f"echo mine > file; echo mine > {there}/file")
        assert shell(two, f"cat file {there}/file").split() == ["mine", "mine"]
        assert shell(two, f"ls {tmp_path}").split() == ["here", "there"]
        server = served(two)
        assert arrives(one, two)
    server.communicate()
    assert (here / "file").read_text() == "mine\n"


def test_a_cut_host_or_two_hear_nothing_until_they_are_healed(three: list[Host]) -> None:
    one, two, other = three
    two.cut()
    assert is_lost(one, two)
    assert is_lost(two, other)
    assert arrives(one, other)
    assert arrives(two, two)
    two.heal()
    assert arrives(one, two)  # so that each knows the other's device
    assert arrives(two, other)
    one.cut(two)
    assert is_lost(one, two)
    assert is_lost(two, one)
    for first, second in (one, other), (other, one), (two, other), (other, two):
        assert arrives(first, second)
    one.heal()
    assert is_lost(one, two)
    two.heal()
    assert arrives(one, two)


def test_a_slow_host_is_slow_each_way_until_it_is_healed(three: list[Host]) -> None:
    one, two, _ = three
    two.slow(delay=0.1)
    assert seconds(one, two) >= 0.4  # there and back twice: to be connected, and to be answered
    two.slow(rate=8e6)
    assert seconds(one, two, 1_000_000) >= 0.8  # what fits into a buffer goes ahead
    two.slow(rate=1e5)
    before = two.traffic()
    assert seconds(two, two, 1_000_000)
    assert max(two.traffic()) < max(before) + 100_000, "to itself, not by the cable"
    two.cut()
    assert is_lost(one, two)
    two.heal()
    came, went = two.traffic()[1], two.traffic()[0]
    assert seconds(one, two, 10_000_000)
    assert two.traffic()[1] - came >= 10_000_000 > two.traffic()[0] - went
    two.slow(loss=1.0)
    assert is_lost(one, two)
    two.slow(loss=0.3)
    assert seconds(one, two, 100_000) > 0  # what is sent again arrives


def test_a_killed_host_is_silent_and_another_when_it_is_booted() -> None:
    who = "cat /proc/sys/kernel/random/boot_id; hostname"
    with Cluster(2, ray=False) as cluster:  # which have not met
        one, two = cluster.hosts
        server = served(two)
        two.slow(delay=0.01)
        boot, name = shell(two, who).split()
        two.kill()
        server.communicate()
        assert server.returncode == -signal.SIGKILL
        assert is_lost(one, two)
        assert not two.is_on
        two.boot()
        again, same = shell(two, who).split()
        assert boot != again
        assert name == same
        assert sent(one, two) == "ConnectionRefusedError"
        server = served(two)
        assert arrives(one, two)
    server.communicate()


MAKER = """
import time
from meshrl.testing.cluster import Cluster
cluster = Cluster(2, ray=False)
cluster.hosts[1].slow(delay=0.001)
sleepers = [host.start(["setsid", "sleep", "1000"]) for host in cluster.hosts]
print("ready", flush=True)
time.sleep(1000)
"""


def with_mark(mark: str) -> list[int]:
    """The processes whose environment has it."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_of_hosts_whose_maker_was_killed(number: signal.Signals) -> None:
    devices, mounts = Path("/proc/net/dev").read_text().count(":"), Path("/proc/self/mounts").read_text()
    mark = f"MESHRL_TEST_MAKER={os.getpid()}-{number}"
    environment = {**os.environ, **dict([mark.split("=")])}
    with subprocess.Popen([sys.executable, "-c", MAKER], stdout=PIPE, stderr=DEVNULL, env=environment) as maker:
        assert maker.stdout
        assert maker.stdout.readline()
        assert len(with_mark(mark)) > 6
        maker.send_signal(number)
    while with_mark(mark):
        time.sleep(0.05)
    assert Path("/proc/net/dev").read_text().count(":") == devices
    assert Path("/proc/self/mounts").read_text() == mounts


def test_where_hosts_cannot_be_made_it_is_told_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for count in (0, -1, 100):
        with pytest.raises(ConfigError, match=f"a cluster of {count} hosts: it has 1 to 99"):
            Cluster(count)
    real, unshare = shutil.which("unshare"), tmp_path / "unshare"
    for kind in ("time", "uts"):
        refuse = f"case $* in *--{kind}*) echo 'unshare failed: no {kind} here' >&2; exit 1 ;; esac"
        unshare.write_text(f'#!/bin/sh\n{refuse}\nexec {real} "$@"\n')
        unshare.chmod(0o755)
        with monkeypatch.context() as patched:
            patched.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
            assert missing() == f"the kernel gives no namespaces here: unshare failed: no {kind} here"
    monkeypatch.setenv("PATH", "/nowhere")
    assert missing() == "ip, tc, unshare, nsenter not found: install the packages iproute2 and util-linux"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="only root may make"):
        Cluster(1)
