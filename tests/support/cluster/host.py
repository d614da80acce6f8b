"""A simulated host: its own name, address, processes, /dev/shm, /tmp and clock, and a Ray node on it."""

import json
import os
import secrets
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import Any, Final, NamedTuple, Self

from meshrl.errors import ConfigError
from tests.support.cluster.namespaces import HOST, Inside, Namespace
from tests.support.cluster.network import Cable, Network, address

PORT: Final = 6379
MOST: Final = 99
_STARTED: Final = 60.0
"""Seconds that a Ray node has to start."""
_DAY: Final = 86_400
_STORE: Final = 200 * 2**20
"""Bytes of a node's object store in shared memory."""
_SHARED_MEMORY: Final = 2**30


class Node(NamedTuple):
    cores: int
    head: str | None
    """HOST:PORT of the head node. None if this is the head."""
    resources: Mapping[str, float] = {}


class Host:
    """One machine of a cluster. It sees the real machine's files except /tmp and /dev/shm, as on a shared disk."""

    def __init__(
        self, network: Network, number: int, node: Node | None, environment: Mapping[str, str], shared: Sequence[Path]
    ) -> None:
        """`node`: its Ray node. Other arguments: as in `Cluster`."""
        self.name: str = f"node{number}"
        self.address: str = address(number)
        self._network = network
        self._number = number
        self._environment = environment
        self._shared = sorted({str(path.resolve()) for path in shared})
        self._node = node
        self._switch_on()

    def boot(self) -> None:
        """Start the host again after `kill`, like a reboot. Its node joins the cluster again.

        The first host becomes the head of a new cluster.
        """
        self._switch_on()
        if begun := self.begin_node():
            self.wait_for_node(begun)

    def _switch_on(self) -> None:
        furniture = {
            "name": self.name,
            "boot": str(uuid.uuid4()),
            "shared_memory": _SHARED_MEMORY,
            "shared": self._shared,
            "names": "".join(f"{address(each)} node{each}\n" for each in range(1, MOST + 1)) + "127.0.0.1 localhost\n",
        }
        self._machine = Namespace(*HOST, furniture=furniture, ahead=1 + secrets.randbelow(_DAY))
        self._cable = Cable(self._network, self._machine, self._number)

    @property
    def is_on(self) -> bool:
        return self._machine.is_there

    def start(self, command: Sequence[str], **named: Any) -> Inside:
        """Start a program on the host, in this process's folder. `named`: arguments of `subprocess.Popen`."""
        environment = {**os.environ, **self._environment}
        return self._machine.start(["env", "-C", str(Path.cwd()), *command], env=environment, **named)

    def run(self, command: Sequence[str], timeout: float | None = None) -> str:
        """Run a program and return its output.

        Raises `CalledProcessError` if it fails, and `TimeoutExpired` after `timeout` seconds.
        """
        process = self.start(command, stdout=PIPE, stderr=STDOUT, stdin=subprocess.DEVNULL)
        try:
            said, _ = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            process.communicate()
            raise
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, list(command), said)
        return said

    def cut(self, other: Self | None = None) -> None:
        """Cut the network. Whatever it sends or should receive is lost without notice.

        `other`: cut only what passes between these two hosts, until both are healed.
        """
        if other is None:
            self._cable.cut()
        else:
            self.lose(other.address)
            other.lose(self.address)

    def lose(self, to: str) -> None:
        """Lose without notice what it sends to an address."""
        self._cable.lose(to)

    def heal(self) -> None:
        self._cable.heal()

    def slow(self, *, delay: float = 0.0, loss: float = 0.0, rate: float | None = None) -> None:
        """Degrade its network in both directions. Without arguments, restore it.

        `delay`: seconds. `loss`: share of lost frames, 0 to 1. `rate`: bits per second.
        """
        self._cable.slow(delay, loss, rate)

    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received since the host was started."""
        return self._cable.traffic()

    def kill(self) -> None:
        """Switch the host off. Its processes end at once, and others hear nothing from it."""
        self._cable.cut()
        self._machine.end()
        self._cable.take_away()

    def begin_node(self) -> Inside | None:
        if self._node is None:
            return None
        cores, head, resources = self._node
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--node-ip-address={self.address}"]
        joins = [f"--address={head}"] if head else ["--head", f"--port={PORT}", "--include-dashboard=false"]
        custom = json.dumps({self.name: 1000, **resources})
        has = [f"--num-cpus={cores}", f"--resources={custom}", f"--object-store-memory={_STORE}"]
        return self.start([*ray, *joins, *has, "--disable-usage-stats"], stdout=PIPE, stderr=STDOUT)

    def wait_for_node(self, begun: Inside) -> None:
        """Wait until the node runs. Raises ConfigError with Ray's message if it does not."""
        try:
            said, _ = begun.communicate(timeout=_STARTED)
        except subprocess.TimeoutExpired:
            begun.kill()
            said, _ = begun.communicate()
        if begun.returncode:
            raise ConfigError(f"no node of Ray started on {self.name}:\n{said.strip()}")
