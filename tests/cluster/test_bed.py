"""The hosts themselves, without Ray: what tests with Ray take for granted, and that nothing is left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from subprocess import DEVNULL, PIPE

import psutil
import pytest

from meshrl.errors import ConfigError
from tests.support.cluster import Cluster, Host, missing

# Whoever comes tells how many bytes it sends, and is answered when they are there.
SERVER = """
import socket
server = socket.create_server(("", 1234))
print("ready", flush=True)
while True:
    came = server.accept()[0].makefile("rwb")
    came.read(int(came.readline()))
    came.write(b".")
    came.flush()
"""
CLIENT = """
import socket, sys, time
began = time.monotonic()
try:
    with socket.create_connection((sys.argv[1], 1234), timeout=float(sys.argv[3])) as server:
        server.sendall(sys.argv[2].encode() + b"\\n" + bytes(int(sys.argv[2])))
        assert server.recv(1) == b"."
        print(time.monotonic() - began)
except OSError as error:
    print(type(error).__name__)
"""


def shell(host: Host, line: str) -> str:
    return host.run(["sh", "-c", line]).strip()


def sent(host: Host, to: Host, size: int = 1, patience: float = 600) -> str:
    return host.run([sys.executable, "-c", CLIENT, to.name, str(size), str(patience)]).strip()


def test_a_host_has_what_a_machine_has_for_itself() -> None:
    with Cluster(2, ray=False) as cluster:
        one, two = cluster.hosts
        clock = f"{sys.executable} -c 'import time; print(int(time.monotonic() / 10))'"
        for line in "hostname", "hostname -i", "cat /proc/sys/kernel/random/boot_id", clock:
            assert shell(one, line) != shell(two, line), line
        for folder in "/dev/shm", "/tmp":  # noqa: S108 -- the host's own
            shell(one, f"touch {folder}/mine")
            assert "mine" not in shell(two, f"ls {folder}").split(), folder
            assert not Path(folder, "mine").exists()
        sleeper = one.start(["sleep", "1000"])
        assert "sleep" not in shell(two, "cat /proc/[0-9]*/comm")
        assert "sleep" in shell(one, "cat /proc/[0-9]*/comm")
        sleeper.kill()
        assert sleeper.wait() == -signal.SIGKILL
        with pytest.raises(subprocess.TimeoutExpired):
            one.run(["sleep", "1000"], timeout=0.5)
        assert "sleep" not in shell(one, "cat /proc/[0-9]*/comm")


def test_a_network_is_slow_and_lossy_as_asked_and_a_host_that_was_killed_is_another() -> None:
    with Cluster(2, ray=False) as cluster:
        one, two = cluster.hosts
        server = two.start([sys.executable, "-c", SERVER], stdout=PIPE)
        assert server.stdout
        assert server.stdout.readline() == "ready\n"
        two.slow(delay=0.1)
        assert float(sent(one, two)) >= 0.4  # there and back twice: to be connected, and to be answered
        two.slow(rate=8e6)
        assert float(sent(one, two, 1_000_000)) >= 0.8  # what fits into a buffer goes ahead
        two.slow(rate=1e5)
        before = two.traffic()
        assert float(sent(two, two, 1_000_000)) > 0
        assert max(two.traffic()) < max(before) + 100_000, "to itself, not by the cable"
        two.slow(loss=1.0)
        assert sent(one, two, patience=0.5) == "TimeoutError"
        two.heal()
        assert float(sent(one, two)) < 600

        who = "hostname; cat /proc/sys/kernel/random/boot_id"
        name, boot = shell(two, who).split()
        two.kill()
        assert not two.is_on
        assert sent(one, two, patience=0.5) == "TimeoutError"
        two.boot()
        same, again = shell(two, who).split()
        assert (name == same, boot == again) == (True, False)
        assert sent(two, one) == "ConnectionRefusedError"
    server.communicate()


MAKER = """
import time
from tests.support.cluster import Cluster
cluster = Cluster(2, ray=False)
cluster.hosts[1].slow(delay=0.001)
sleepers = [host.start(["setsid", "sleep", "1000"]) for host in cluster.hosts]
print("ready", flush=True)
time.sleep(1000)
"""


def with_mark(mark: str) -> int:
    return sum(mark in (process.info["environ"] or {}) for process in psutil.process_iter(["environ"]))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_of_hosts_whose_maker_was_killed(number: signal.Signals) -> None:
    devices, mounts = Path("/proc/net/dev").read_text().count(":"), Path("/proc/self/mounts").read_text()
    mark = f"MESHRL_TEST_MAKER_{os.getpid()}_{number}"
    environment = {**os.environ, mark: "1"}
    with subprocess.Popen([sys.executable, "-c", MAKER], stdout=PIPE, stderr=DEVNULL, env=environment) as maker:
        assert maker.stdout
        assert maker.stdout.readline()
        assert with_mark(mark) > 6
        maker.send_signal(number)
    while with_mark(mark):
        time.sleep(0.05)
    assert Path("/proc/net/dev").read_text().count(":") == devices
    assert Path("/proc/self/mounts").read_text() == mounts


def test_where_hosts_cannot_be_made_it_is_told_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for count in (0, 100):
        with pytest.raises(ConfigError, match=f"a cluster of {count} hosts: it has 1 to 99"):
            Cluster(count)
    refuses = tmp_path / "unshare"
    refuses.write_text("#!/bin/sh\necho 'unshare failed: not here' >&2; exit 1\n")
    refuses.chmod(0o755)
    with monkeypatch.context() as patched:
        patched.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        assert missing() == "the kernel gives no namespaces here: unshare failed: not here"
    monkeypatch.setenv("PATH", "/nowhere")
    assert missing() == "ip, tc, unshare, nsenter not found: install the packages iproute2 and util-linux"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="only root may make"):
        Cluster(1)
