"""The resources that a configuration's meshes need, the number of nodes that provide them, and scripts for nodes."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from meshrl.errors import ConfigError
from meshrl.roles import RoleConfig
from meshrl.run.config import MeshConfig
from meshrl.run.jobs import Job

_MOST: Final = 100_000
"""Number of nodes at most."""
_OF_EACH_NODE: Final = ("node:", "accelerator_type:")
"""Beginnings of custom resources that Ray itself gives a node."""


@dataclass(frozen=True)
class Need:
    """The resources that a mesh asks for."""

    mesh: str
    ranks: int
    cpus: int
    """CPUs per rank, 1 by default."""
    gpus: float
    """GPUs per rank."""
    custom: Mapping[str, float] = field(default_factory=dict[str, float])
    """Ray's custom resources per rank."""

    @property
    def each(self) -> str:
        """The resources of a rank, as text."""
        return " and ".join([f"{self.cpus} CPU", *([f"{self.gpus:g} GPU"] if self.gpus else [])])


def needs_of(job: Job) -> list[Need]:
    """Return the needs of each mesh of a job: those with a table, and those that only roles name."""
    meshes = {value.mesh: MeshConfig() for _, value in job.config if isinstance(value, RoleConfig)} | job.run.meshes
    return [
        Need(name, mesh.ranks, max(1, mesh.cpus or 0), mesh.gpus, mesh.custom) for name, mesh in sorted(meshes.items())
    ]


@dataclass
class _Node:
    cpus: float
    gpus: list[float]

    def takes(self, need: Need) -> bool:
        """Take room for one rank, if available. A share of a GPU fits on one GPU."""
        free = [number for number, left in enumerate(self.gpus) if left >= min(need.gpus, 1.0) - 1e-9]
        wanted = max(1, int(need.gpus)) if need.gpus else 0
        if need.cpus > self.cpus or len(free) < wanted:
            return False
        self.cpus -= need.cpus
        for number in free[:wanted]:
            self.gpus[number] -= min(need.gpus, 1.0)
        return True


def nodes_for(needs: Sequence[Need], gpus: int, cpus: int | None) -> int:
    """Return the number of nodes with these GPUs and CPUs that fit all meshes. `cpus = None`: CPUs suffice.

    Raises `ConfigError` if one rank asks for more than a node has, or for a custom resource.
    """
    nodes: list[_Node] = []
    room = float("inf") if cpus is None else float(cpus)
    for need in sorted(needs, key=lambda need: (-need.gpus, -need.cpus)):
        check_fits(need, gpus, cpus)
        for _ in range(need.ranks):
            if not any(node.takes(need) for node in nodes):
                nodes.append(_Node(room, [1.0] * gpus))
                nodes[-1].takes(need)
            if len(nodes) > _MOST:
                raise ConfigError(f"the meshes ask for more than {_MOST:,} nodes: ask for fewer ranks")
    return max(1, len(nodes))


def check_fits(need: Need, gpus: int, cpus: int | None, node: str = "a node") -> None:
    """Raise `ConfigError` if one rank asks for more than a node has, or for a custom resource, which no node has."""
    own = {name: amount for name, amount in need.custom.items() if amount and not name.startswith(_OF_EACH_NODE)}
    if own:
        custom = ", ".join(f"{name} = {amount:g}" for name, amount in own.items())
        raise ConfigError(
            f"run.meshes.{need.mesh}.custom asks for {custom}, and nodes that `meshrl launch` starts have "
            "no custom resources: leave it out, or start Ray yourself with --resources and use `meshrl run` with "
            "run.engine=HOST:PORT"
        )
    if need.gpus > gpus or (cpus is not None and need.cpus > cpus):
        has = " and ".join([*([f"{cpus} CPU"] if cpus is not None else []), f"{gpus} GPU"])
        raise ConfigError(
            f"a rank of the mesh {need.mesh!r} asks for {need.each}, and {node} has {has}: ask for less in "
            f"run.meshes.{need.mesh}, or for larger nodes"
        )


def enough_nodes(needs: Sequence[Need], nodes: int | None, gpus: int, cpus: int | None) -> int:
    """Return `nodes`, or the number needed. Raises `ConfigError` if `nodes` have no room for all meshes."""
    wanted = nodes_for(needs, gpus, cpus)
    if nodes and wanted > nodes:
        requests = ", ".join(f"{need.mesh}: {need.ranks} ranks with {need.each} each" for need in needs)
        raise ConfigError(f"the meshes need {wanted} nodes of this size, but only {nodes} are asked for ({requests})")
    return nodes or wanted


def filled(name: str, values: Mapping[str, str]) -> str:
    """Return a script of this folder, with a value in place of each `@NAME@`."""
    script = Path(__file__).with_name(name).read_text("utf-8")
    return re.sub("@([A-Z]+)@", lambda match: values[match[1]], script)
