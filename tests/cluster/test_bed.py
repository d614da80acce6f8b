"""The hosts themselves, without Ray: what tests with Ray take for granted, and that nothing is left."""

import os
import subprocess
import sys
import time
from pathlib import Path
from subprocess import DEVNULL, PIPE

import psutil

from tests.support.cluster import Cluster, Host

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


def test_nothing_is_left_of_hosts_whose_maker_was_killed() -> None:
    devices, mounts = Path("/proc/net/dev").read_text().count(":"), Path("/proc/self/mounts").read_text()
    mark = f"MESHRL_TEST_MAKER_{os.getpid()}"
    environment = {**os.environ, mark: "1"}
    with subprocess.Popen([sys.executable, "-c", MAKER], stdout=PIPE, stderr=DEVNULL, env=environment) as maker:
        assert maker.stdout
        assert maker.stdout.readline()
        assert with_mark(mark) > 6
        maker.kill()
    while with_mark(mark):
        time.sleep(0.05)
    assert Path("/proc/net/dev").read_text().count(":") == devices
    assert Path("/proc/self/mounts").read_text() == mounts
