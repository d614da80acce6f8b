"""The distributed engine: a mesh is a placement group, and a rank is a process that Ray places and watches."""

import asyncio
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from meshrl.engines.hosting import Caller, HostingEngine, ProcessSlot
from meshrl.engines.ray.cluster import Cluster, amounts, check_room, has_room, room_for
from meshrl.engines.ray.code import Package, has_working_dir, packaged
from meshrl.engines.ray.logs import RankLogs
from meshrl.engines.ray.nodes import Node
from meshrl.engines.ray.refs import HostRef
from meshrl.engines.ray.reservation import RayReservation
from meshrl.errors import ConfigError
from meshrl.mesh import INLINE_BYTES, PATIENCE, Ref, Resources, Share, sweep

if TYPE_CHECKING:
    from meshrl.engines.ray.channel import RayChannel


class RayCaller(Caller):
    """The part of the engine that works in every process of the cluster."""

    def put(self, value: object) -> Ref:
        """Keep a value for the processes of this machine, and for others once it is sent there."""
        return HostRef.put(value)

    def __reduce__(self) -> tuple[type["RayCaller"], tuple[int, bool]]:
        return RayCaller, (self.inline_bytes, self.shares_memory)


class RayEngine(HostingEngine, RayCaller):
    """Ranks as processes of a Ray cluster.

    `address`: HOST:PORT of a cluster, or `auto` for the one on this machine. None: RAY_ADDRESS, or without it a new
    cluster of this machine's cores, which `close` stops. If the program has called `ray.init`, that connection is used.
    For `inline_bytes` see `Engine`. `share`: of the shared memory of each machine. `patience`: seconds to wait for an
    unreachable host before its ranks count as lost. `packages`: packages whose versions must agree on each node,
    besides Python, meshrl and torch. `code`: the user's folders that ranks import from, besides what this process has
    imported. Other nodes get copies.
    """

    def __init__(
        self,
        address: str | None = None,
        inline_bytes: int = INLINE_BYTES,
        share: Share = Share(),  # noqa: B008 -- immutable
        patience: float = PATIENCE,
        packages: Sequence[str] = (),
        code: Sequence[Path] = (),
    ) -> None:
        super().__init__(inline_bytes)
        self._share = share
        self._cluster = Cluster(address, patience, packages, self._lose)
        self._code = code
        self._planning = asyncio.Lock()
        self._rank_logs = RankLogs()

    @property
    def shares_memory(self) -> bool:
        """True if Ray runs on this machine alone."""
        return self._cluster.is_ours

    async def reserve(self, count: int, resources: Resources, log: str = "") -> Sequence[ProcessSlot]:
        """Start processes for `count` ranks, once the cluster has room for them.

        Without `cpus`, the ranks share the cores that no mesh holds. If none is free, a rank reserves nothing and gets
        one thread. On a cluster that was started here, the same holds with `cpus`, as on the local engine. Raises
        `ConfigError` for no ranks, `NoRoom` for resources that even the idle cluster could not give, and
        `OtherVersions` if a usable node has others than this process.
        """
        if count < 1:
            raise ConfigError(f"a mesh of {count} ranks cannot be reserved: ask for at least 1")
        await self._cluster.connect()
        async with self._planning:
            nodes = await self._cluster.nodes()
            asked = amounts(resources, resources.cpus or 0)
            check_room(resources.min_ranks or count, asked, nodes, self._cluster.silent.values())
            await self._cluster.check({node.id: node.address for node in nodes if room_for(asked, node.has)})
            share = int(await self._free_cores(nodes)) // count
            if resources.cpus is None:
                most = max(0, share)
                free = nodes if self._cluster.is_ours else await self._cluster.with_free_cores(nodes)
                fits = (cpus for cpus in range(most, 0, -1) if has_room(count, amounts(resources, cpus), free))
                cpus = next(fits, 0)
            else:
                # On our cluster, it could only wait for other meshes of this run, which may never end.
                cpus = min(resources.cpus, max(0, share)) if self._cluster.is_ours else resources.cpus
            asked = amounts(resources, cpus)
            keeps = self.inline_bytes, self.shares_memory, self._share, self._cluster.home
            package = await self._packaged(nodes, resources)
            how = resources, keeps, log, self._rank_logs
            reservation = RayReservation(self._cluster, count, asked, package, *how)
            self._reservations.append(reservation)
        return await self._settled(reservation)

    async def _packaged(self, nodes: Iterable[Node], resources: Resources) -> Package | None:
        """Package the code for ranks that may be on another machine, unless Ray has brought it there."""
        apart = any(node.address != self._cluster.home.door.ip for node in nodes) or resources.min_ranks
        if self._cluster.is_ours or not apart or has_working_dir():
            return None
        package = await asyncio.to_thread(packaged, self._code, dict(sys.modules))
        if package:
            await self._cluster.ask(package.upload)
        return package

    def _lose(self, reason: str) -> None:
        for reservation in self._reservations:
            for process in reservation.processes:
                cast("RayChannel", process.channel).lose(reason)

    async def _free_cores(self, nodes: Iterable[Node]) -> float:
        mine = sum(each.cpus for each in self._reservations)
        left = sum(node.has.get("CPU", 0) for node in nodes) - mine
        return left if self._cluster.is_ours else min(left, await self._cluster.free_cores(left))

    async def close(self) -> None:
        """Stop everything, and the cluster if it was started here."""
        try:
            await super().close()
            await self._rank_logs.close()
        finally:
            await self._cluster.close()
            sweep()
