"""A cluster of several simulated hosts on this machine."""

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from meshrl.errors import ConfigError
from meshrl.testing.cluster.host import MOST, PORT, Host, Node
from meshrl.testing.cluster.namespaces import missing
from meshrl.testing.cluster.network import Network

_ENVIRONMENT: Final = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
"""Nobody else is on this network."""


class Cluster:
    """Hosts on a network of their own, each with a node of Ray; the first has its head.

    with Cluster(3) as cluster:
        first, second, third = cluster.hosts
        second.slow(delay=0.05)
        first.run(["meshrl", "run", "my.toml", f"run.engine={cluster.address}"])

    When the process that made it ends, however it ends, nothing of it is left.
    """

    def __init__(
        self,
        hosts: int = 2,
        *,
        cores: int = 2,
        ray: bool = True,
        resources: Sequence[Mapping[str, float]] = (),
        shared: Sequence[Path] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Raises `ConfigError` where hosts cannot be made, with the reason.

        `cores`: of each host, as Ray counts them; `ray`: whether hosts are nodes of Ray; `resources`: `custom` ones of
        the first hosts, one after the other. Each host has 1000 of its own name too. `shared`: folders below /tmp that
        all hosts see; the current one is among them. `environment`: more variables for all that runs on the hosts.
        """
        if reason := missing():
            raise ConfigError(reason)
        self._cores = cores
        self._ray = ray
        self._resources = resources
        self._shared = (*shared, Path.cwd())
        # Programs that were installed beside this Python are found by their names.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        self._environment = {**_ENVIRONMENT, "PATH": path, **(environment or {})}
        self.hosts: list[Host] = []
        with ExitStack() as begun:
            self._network = Network()
            begun.callback(self.close)
            self._add(hosts)
            begun.pop_all()

    @property
    def address(self) -> str:
        """What `run.engine` is set to."""
        return f"{self.hosts[0].address}:{PORT}"

    def add(self) -> Host:
        """Add a host, whose node joins the others."""
        return self._add(1)[0]

    def close(self) -> None:
        """Take everything away."""
        for host in self.hosts:
            if host.is_on:
                host.kill()
        self._network.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _add(self, count: int) -> list[Host]:
        if len(self.hosts) + count > MOST:
            raise ConfigError(f"a cluster has {MOST} hosts at most")
        added: list[Host] = []
        for _ in range(count):
            index = len(self.hosts)
            own = self._resources[index] if index < len(self._resources) else {}
            node = Node(self._cores, self.address if index else None, own) if self._ray else None
            added.append(Host(self._network, index + 1, node, self._environment, self._shared))
            self.hosts.append(added[-1])
        _settle(added[:1])  # the head, at the beginning
        _settle(added[1:])
        return added


def _settle(hosts: Sequence[Host]) -> None:
    """Start the nodes of these hosts, at the same time."""
    begun = [(host, node) for host in hosts if (node := host.begin_node())]
    for host, node in begun:
        host.wait_for_node(node)
