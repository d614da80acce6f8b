"""A cluster of several simulated hosts on this machine."""

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from meshrl.errors import ConfigError
from tests.support.cluster.host import MOST, PORT, Host, Node
from tests.support.cluster.namespaces import missing
from tests.support.cluster.network import Network

_ENVIRONMENT: Final = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
"""Nobody else is on this network, so Ray needs no token."""


class Cluster:
    """Hosts on a private network, each with a Ray node. The first one has the head node.

    Nothing of it is left when the process that made it ends, however it ends.
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
        """Make the hosts. Raises `ConfigError` with the reason if that is not possible.

        `cores`: of each host, for Ray. `ray`: True if hosts are Ray nodes. `resources`: custom resources of the first
        hosts, in order. Each host also has 1000 of a resource with its name. `shared`: folders below /tmp that all
        hosts see, in addition to the current one. `environment`: more variables for all programs on the hosts.
        """
        if reason := missing():
            raise ConfigError(reason)
        self._cores = cores
        self._ray = ray
        self._resources = resources
        self._shared = (*shared, Path.cwd())
        # Find programs that are installed next to this Python by name.
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
        """The value for `run.engine`."""
        return f"{self.hosts[0].address}:{PORT}"

    def add(self) -> Host:
        return self._add(1)[0]

    def close(self) -> None:
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
        if not 1 <= (total := len(self.hosts) + count) <= MOST:
            raise ConfigError(f"a cluster of {total} hosts: it has 1 to {MOST}")
        added: list[Host] = []
        for _ in range(count):
            index = len(self.hosts)
            own = self._resources[index] if index < len(self._resources) else {}
            node = Node(self._cores, self.address if index else None, own) if self._ray else None
            added.append(Host(self._network, index + 1, node, self._environment, self._shared))
            self.hosts.append(added[-1])
        _settle(added[:1])  # the head first, at the beginning
        _settle(added[1:])
        return added


def _settle(hosts: Sequence[Host]) -> None:
    begun = [(host, node) for host in hosts if (node := host.begin_node())]
    for host, node in begun:
        host.wait_for_node(node)
