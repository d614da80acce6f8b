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
from typing import Any, Final, NamedTuple

from meshrl.errors import ConfigError
from meshrl.testing.cluster.namespaces import Inside, Namespace
from meshrl.testing.cluster.network import Cable, Network, address

PORT: Final = 6379
"""Of Ray's head."""
MOST: Final = 99
"""Hosts of a cluster."""
_STARTED: Final = 60.0
"""Seconds within which a node of Ray runs."""
_DAY: Final = 86_400
_STORE: Final = 200 * 2**20
"""Bytes of a node's object store, which lies in the shared memory."""
_SHARED_MEMORY: Final = 2**30


class Node(NamedTuple):
    """A node of Ray."""

    cores: int
    head: str | None
    """HOST:PORT of the head; None: this is it."""
    resources: Mapping[str, float] = {}


class Host:
    """One machine of a cluster. Files are the real machine's but for /tmp and /dev/shm, as on a shared disk."""

    def __init__(
        self, network: Network, number: int, node: Node | None, environment: Mapping[str, str], shared: Sequence[Path]
    ) -> None:
        """`node`: what runs on it of Ray; the rest is as of `Cluster`."""
        self.name: str = f"node{number}"
        self.address: str = address(number)
        self._network = network
        self._number = number
        self._environment = environment
        self._shared = sorted({str(path.resolve()) for path in shared})
        self._node = node
        self._switch_on()

    def boot(self) -> None:
        """Switch it on after `kill`, as another start of the same machine: its node joins the cluster again.

        That of the first host is the head of another cluster.
        """
        self._switch_on()
        if begun := self.begin_node():
            self.wait_for_node(begun)

    def _switch_on(self) -> None:
        """Another boot id, another clock, empty memory, a cable that works."""
        furniture = {
            "name": self.name,
            "boot": str(uuid.uuid4()),
            "shared_memory": _SHARED_MEMORY,
            "shared": self._shared,
            "names": "".join(f"{address(each)} node{each}\n" for each in range(1, MOST + 1)) + "127.0.0.1 localhost\n",
        }
        self._machine = Namespace("net", "mount", "uts", "ipc", furniture=furniture, ahead=secrets.randbelow(_DAY))
        self._cable = Cable(self._network, self._machine, self._number)

    @property
    def is_on(self) -> bool:
        """Whether it runs."""
        return self._machine.is_there

    def start(self, command: Sequence[str], **named: Any) -> Inside:
        """Begin a program on the host, in this process's folder. `named` as of `subprocess.Popen`."""
        environment = {**os.environ, **self._environment}
        return self._machine.start(["env", "-C", str(Path.cwd()), *command], env=environment, **named)

    def run(self, command: Sequence[str], timeout: float | None = None) -> str:
        """Run a program to its end; what it writes. `CalledProcessError` if it fails, `TimeoutExpired` if it lasts."""
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

    def cut(self) -> None:
        """Cut it off: what is sent to it and from it is lost, and nobody is told."""
        self._cable.cut()

    def heal(self) -> None:
        """Its network is as it was at first."""
        self._cable.heal()

    def slow(self, *, delay: float = 0.0, loss: float = 0.0, rate: float | None = None) -> None:
        """Make its network so bad, each way; without numbers, good.

        `delay`: seconds; `loss`: the part of the frames that is lost, 0 to 1; `rate`: bits a second.
        """
        self._cable.slow(delay, loss, rate)

    def traffic(self) -> tuple[int, int]:
        """Bytes that it has sent and received since it was switched on."""
        return self._cable.traffic()

    def kill(self) -> None:
        """Switch it off: its processes end at once, and the others hear nothing from it any more."""
        self._cable.cut()
        self._machine.end()
        self._cable.take_away()

    def begin_node(self) -> Inside | None:
        """Begin its node of Ray, if it is to have one."""
        if self._node is None:
            return None
        cores, head, resources = self._node
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--node-ip-address={self.address}"]
        joins = [f"--address={head}"] if head else ["--head", f"--port={PORT}", "--include-dashboard=false"]
        custom = json.dumps({self.name: 1000, **resources})
        has = [f"--num-cpus={cores}", f"--resources={custom}", f"--object-store-memory={_STORE}"]
        return self.start([*ray, *joins, *has, "--disable-usage-stats"], stdout=PIPE, stderr=STDOUT)

    def wait_for_node(self, begun: Inside) -> None:
        """Wait until it runs. ConfigError, with what Ray said, if it does not."""
        try:
            said, _ = begun.communicate(timeout=_STARTED)
        except subprocess.TimeoutExpired:
            begun.kill()
            said, _ = begun.communicate()
        if begun.returncode:
            raise ConfigError(f"no node of Ray started on {self.name}:\n{said.strip()}")
