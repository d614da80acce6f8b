"""The machines of a Ray cluster, and which of them this one is."""

import socket
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias, cast

import ray

from meshrl.engines.hosting import Door, boot

Amounts: TypeAlias = Mapping[str, float]
"""The amount of each of Ray's resources."""


class Node(NamedTuple):
    """A machine of the cluster."""

    id: str
    address: str
    port: int
    """The port of Ray's own process on the node."""
    has: Amounts
    """All its resources, taken ones included."""


class Home(NamedTuple):
    """The machine of a process, as others see it."""

    host: str
    boot: str
    door: Door

    def __str__(self) -> str:
        return f"{self.host} ({self.door.ip})"

    @property
    def is_here(self) -> bool:
        """True if it is this machine."""
        return self.boot == boot()


def nodes() -> list[Node]:
    """Return the living nodes that the head knows. Blocks."""
    found = cast("list[dict[str, object]]", ray.nodes())
    return [
        Node(
            str(node["NodeID"]),
            str(node["NodeManagerAddress"]),
            int(cast("int", node["NodeManagerPort"])),
            cast("Amounts", node["Resources"]),
        )
        for node in found
        if node.get("Alive")
    ]


def home(patience: float) -> Home:
    """Describe this machine. `patience`: seconds after which others give it up if they cannot reach it."""
    own = ray.get_runtime_context().get_node_id()
    here = next(node for node in nodes() if node.id == own)
    return Home(socket.gethostname(), boot(), Door(here.address, here.port, patience))
