"""The machines of a Ray cluster, and which of them this one is."""

import socket
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias, cast

import ray

from meshrl.engines.hosting import Door, boot

Amounts: TypeAlias = Mapping[str, float]
"""How much of each of Ray's resources."""


class Node(NamedTuple):
    """A machine of the cluster."""

    id: str
    address: str
    port: int
    """At which Ray's own process of the node takes connections."""
    has: Amounts
    """In all, also what is taken."""


class Home(NamedTuple):
    """The machine of a process, as others see it."""

    host: str
    boot: str
    door: Door

    def __str__(self) -> str:
        return f"{self.host} ({self.door.ip})"

    @property
    def is_here(self) -> bool:
        """Whether it is this machine."""
        return self.boot == boot()


def nodes() -> list[Node]:
    """The living nodes, as the head knows them; this waits for it."""
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
    """This machine. `patience`: seconds after which others give it up when they cannot reach it."""
    own = ray.get_runtime_context().get_node_id()
    here = next(node for node in nodes() if node.id == own)
    return Home(socket.gethostname(), boot(), Door(here.address, here.port, patience))
