"""The engine for one machine: ranks are processes, forked from a warm template and reached through sockets."""

import os
import resource
from collections.abc import Sequence
from contextlib import suppress
from secrets import token_hex
from typing import Final, NamedTuple, cast

from meshrl.engines.processes.launcher import Launcher
from meshrl.engines.ranks import check_count
from meshrl.engines.remote import (
    Place,
    PoolRef,
    Process,
    ProcessExited,
    ProcessSlot,
    RemoteEngine,
    Reservation,
    SocketChannel,
)
from meshrl.errors import ConfigError, MeshStopped
from meshrl.mesh import INLINE_BYTES, Resources, Share, free_cores, visible_gpus


class RankResources(NamedTuple):
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
        self._gpus = dict.fromkeys(visible_gpus(), 1.0)

    @property
    def has_gpus(self) -> bool:
        """True if the machine has GPUs, free or not."""
        return bool(self._gpus)

    def take(self, count: int, resources: Resources) -> list[RankResources]:
        """Take shares for `count` ranks. ConfigError for resources that this machine lacks, or has given away."""
        check_count(count)
        if resources.custom:
            named = ", ".join(sorted(resources.custom))
            raise ConfigError(f"a mesh asks for {named}, which this machine's processes do not have: use Ray")
        gpus = self._take_gpus(count, resources.gpus)
        share = len(self._cores) // count
        wanted = share if resources.cpus is None else min(share, resources.cpus)
        shares = []
        for own in gpus:
            cores, self._cores = self._cores[:wanted], self._cores[wanted:]
            shares.append(RankResources(max(1, len(cores)), cores, own))
        return shares

    def give_back(self, shares: Sequence[RankResources], resources: Resources) -> None:
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


_FILES: Final = 65536
"""Enough open files. If 2**30 are allowed, as in some containers, closing all of them takes minutes."""


class ProcessEngine(RemoteEngine):
    """Ranks as processes of this machine.

    `modules`: packages that ranks need, such as `meshrl_torch`, which are imported once for all. For `inline_bytes` see
    `Engine`. `share`: the shared memory that ranks may use.
    """

    def __init__(
        self,
        modules: Sequence[str] = (),
        inline_bytes: int = INLINE_BYTES,
        share: Share = Share(),  # noqa: B008 -- immutable
    ) -> None:
        _raise_file_limit()  # ranks inherit it
        super().__init__(PoolRef, inline_bytes, shares_memory=True)
        self._machine = Machine()
        self._launcher = Launcher(modules, inline_bytes, share)

    async def reserve(self, count: int, resources: Resources, log: str = "") -> Sequence[ProcessSlot]:
        """Start processes for `count` ranks, each pinned to the cores that it asks for, as long as some are free.

        Without `cpus`, the ranks share the cores that no mesh holds. If none is free, a rank gets one thread, as with
        `cpus = 0`. Raises `ConfigError` for GPUs that this machine lacks, or that other meshes hold.
        """
        reservation = _Processes(self._launcher, self._machine, count, resources, log)
        self._reservations.append(reservation)
        return await self._settled(reservation)

    async def close(self) -> None:
        """Stop everything."""
        try:
            await super().close()
        finally:
            await self._launcher.close()


class _Processes(Reservation):
    """The processes of one mesh."""

    def __init__(self, launcher: Launcher, machine: Machine, count: int, resources: Resources, log: str) -> None:
        self._launcher, self._machine, self._resources = launcher, machine, resources
        self._shares = machine.take(count, resources)
        threads = self._shares[0].threads
        super().__init__(count, threads, len(self._shares[0].cores), resources.min_ranks, log)

    async def place(self, slot: ProcessSlot) -> Place:
        """Return the place of a slot's process, once it runs. ConfigError if it does not start."""
        process = slot.process
        try:
            place = process.known = cast("Place", await process.channel.request("place"))
        except ProcessExited as exited:
            if self.released:
                raise MeshStopped("the mesh was stopped while its ranks were started") from None
            raise ConfigError(f"a rank's process did not start: {process.died(str(exited))}") from None
        return place

    def begin(self, slot: ProcessSlot) -> Process:
        """Start a process."""
        share = self._shares[slot.index]
        environment = {"OMP_NUM_THREADS": str(share.threads)}
        if self._machine.has_gpus:  # a rank without GPUs must not take memory of GPUs of others
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(share.gpus)
        log = self.logs.of(slot.index) if self.logs else None
        channel = self._launcher.begin(environment, share.cores, log)
        process = Process(token_hex(8), channel)
        process.log = log
        if channel.end is not None:
            channel.end.add_done_callback(lambda end: process.died(end.result()))
        return process

    def kill(self, process: Process) -> None:
        """End a process at once."""
        self._launcher.kill(cast("SocketChannel", process.channel))

    async def release(self) -> None:
        """End the processes and free all resources."""
        try:
            await super().release()
        finally:
            self._machine.give_back(self._shares, self._resources)


def _raise_file_limit() -> None:
    """Raise the limit of open files as far as is useful, because each lease of shared memory is one."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if most == resource.RLIM_INFINITY else min(most, _FILES)
    if now != resource.RLIM_INFINITY and now < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
