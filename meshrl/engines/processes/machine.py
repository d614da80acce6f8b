"""The resources of this machine, and the ranks that use them."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from meshrl.errors import ConfigError
from meshrl.mesh import Resources, free_cores

_GPUS = Path("/proc/driver/nvidia/gpus")


class Share(NamedTuple):
    """The resources of one rank."""

    threads: int
    cores: Sequence[int]
    """Its exclusive cores. Empty if it shares cores with others."""
    gpus: Sequence[str]


class Machine:
    """The cores and GPUs that are free."""

    def __init__(self) -> None:
        cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(free_cores())
        self._cores = sorted(cores)
        self._gpus = dict.fromkeys(_gpus(), 1.0)

    @property
    def has_gpus(self) -> bool:
        """True if the machine has GPUs, free or not."""
        return bool(self._gpus)

    def take(self, count: int, resources: Resources) -> list[Share]:
        """Take shares for `count` ranks. ConfigError for resources that this machine lacks, or has given away."""
        if count < 1:
            raise ConfigError(f"a mesh of {count} ranks cannot be reserved: ask for at least 1")
        if resources.custom:
            named = ", ".join(sorted(resources.custom))
            raise ConfigError(f"a mesh asks for {named}, which this machine's processes do not have: use Ray")
        gpus = self._take_gpus(count, resources.gpus)
        share = len(self._cores) // count
        wanted = share if resources.cpus is None else min(share, resources.cpus)
        shares = []
        for own in gpus:
            cores, self._cores = self._cores[:wanted], self._cores[wanted:]
            shares.append(Share(max(1, len(cores)), cores, own))
        return shares

    def give_back(self, shares: Sequence[Share], resources: Resources) -> None:
        """Return the shares from `take`."""
        for share in shares:
            self._cores = sorted([*self._cores, *share.cores])
            for gpu in share.gpus:
                self._gpus[gpu] += min(resources.gpus, 1.0)

    def _take_gpus(self, count: int, each: float) -> list[list[str]]:
        if not each:
            return [[] for _ in range(count)]
        left, amount = dict(self._gpus), min(each, 1.0)
        taken = []
        for _ in range(count):
            fit = [name for name, free in left.items() if free >= amount - 1e-9][: max(1, int(each))]
            if len(fit) < each:
                free = ", ".join(f"{free:g} of GPU {name}" for name, free in self._gpus.items()) or "none"
                raise ConfigError(
                    f"a mesh asks for {count} ranks with {each:g} GPUs each, but this machine has {free} left: ask for "
                    "fewer, stop a mesh, or use Ray and more machines"
                )
            for name in fit:
                left[name] -= amount
            taken.append(fit)
        self._gpus = left
        return taken


def _gpus() -> list[str]:
    """List the numbers of the GPUs that this process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name and name != "-1"]
    return [str(number) for number in range(len(list(_GPUS.iterdir())))] if _GPUS.is_dir() else []
