"""Versions of the software on each node. A node that differs from the controller is refused."""

import asyncio
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Protocol, cast

import ray
from ray.cloudpickle.cloudpickle import register_pickle_by_value
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from meshrl.errors import OtherVersions

ALWAYS: Final = ("meshrl", "torch")
"""Packages that are compared in every run, besides those of its backends."""
_PYTHON: Final = "Python"
_COLUMNS: Final = ("node", "package", "here", "there")
_MISSING: Final = "not installed"
_WITH_RANK: Final = 60.0
"""Least seconds that a node with a rank has to answer. It may be slow to start a process for that."""


class _Remote(Protocol):
    def remote(self, packages: Sequence[str]) -> "asyncio.Future[dict[str, str]]": ...


def installed(packages: Sequence[str]) -> dict[str, str]:
    """Return the versions of Python and packages in this process, without build labels (`+cpu`).

    It travels to nodes by value and needs nothing but Python there, because a node may lack meshrl.
    """
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415 -- where it runs
    from platform import python_version  # noqa: PLC0415 -- the same

    found = {"Python": python_version()}
    for package in packages:
        try:
            found[package] = version(package).partition("+")[0]
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


class Versions:
    """The versions of this process, which nodes must have too."""

    def __init__(self, packages: Iterable[str], patience: float) -> None:
        """`packages`: those of the run's backends. Packages that are not installed here are not compared.

        `patience`: seconds that nodes have to answer.
        """
        found = installed(sorted({*ALWAYS, *packages}))
        self._here = {name: version for name, version in found.items() if version != _MISSING}
        self._patience = patience
        self._same: set[str] = set()
        """Nodes that were found to agree."""

    async def check(self, nodes: Mapping[str, str], *, have_ranks: bool = False) -> bool:
        """Raise `OtherVersions`, with a table, if nodes differ. `nodes`: display names by Ray's id.

        Each node is asked once. One that does not answer in time is asked again when it has a rank. Returns True if all
        have answered.
        """
        if not (unknown := [node for node in nodes if node not in self._same]):
            return True
        asked = {node: asyncio.ensure_future(self._ask(node)) for node in unknown}
        await asyncio.wait(asked.values(), timeout=max(self._patience, _WITH_RANK) if have_ranks else self._patience)
        others: dict[str, Mapping[str, str]] = {}
        for node, answer in asked.items():
            if not answer.done():
                answer.cancel()
            elif (there := answer.result()) is not None:
                if _differ(self._here, there):
                    others[nodes[node]] = there
                else:
                    self._same.add(node)
        if others:
            raise OtherVersions(table(self._here, others))
        return self._same.issuperset(nodes)

    async def _ask(self, node: str) -> dict[str, str] | None:
        """Return the versions of a node. None if it does not answer."""
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        task = ray.remote(installed).options(num_cpus=0, scheduling_strategy=there, max_retries=0)
        try:
            return await cast("_Remote", task).remote([name for name in self._here if name != _PYTHON])
        except RayError:
            return None


def table(here: Mapping[str, str], others: Mapping[str, Mapping[str, str]]) -> str:
    """Describe the nodes whose versions differ from this one's: the difference, and what to do."""
    rows = [
        (node, package, version, there[package])
        for node, there in others.items()
        for package, version in here.items()
        if package in _differ(here, there)
    ]
    widths = [max(map(len, column)) for column in zip(_COLUMNS, *rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (_COLUMNS, *rows)]
    differ = "a node has" if len(others) == 1 else f"{len(others)} nodes have"
    packages = [f"{package}=={version}" for package, version in here.items() if package in {row[1] for row in rows}]
    pip = [package for package in packages if not package.startswith(_PYTHON)]
    pip_does = f", as `pip install {' '.join(pip)}` does there" if pip else ""
    return (
        f"{differ} other versions than the controller, so that no rank may run there:\n"
        + "\n".join(f"  {line.rstrip()}" for line in lines)
        + f"\ninstall {' and '.join(packages)} on each{pip_does}; or keep ranks from these nodes by `custom` in the "
        "table of each mesh"
    )


def _differ(here: Mapping[str, str], there: Mapping[str, str]) -> list[str]:
    """Packages with other versions there. A rank reports a missing package that it needs, and this reports meshrl."""
    return [
        package
        for package, version in here.items()
        if there[package] != version and (there[package] != _MISSING or package == "meshrl")
    ]


register_pickle_by_value(sys.modules[__name__])
