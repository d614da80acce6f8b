"""The distributed engine: a mesh is a placement group, and a rank is a process that Ray places and watches."""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from secrets import token_hex
from typing import Final, cast

import ray
from ray.actor import ActorClass
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from meshrl import log
from meshrl.engines.ranks import check_count
from meshrl.engines.ray.channel import RankProcess, RayChannel
from meshrl.engines.ray.cluster import Amounts, Cluster, Machine, Node, amounts, check_room, has_room, room_for, written
from meshrl.engines.ray.code import Package, has_working_dir, packaged
from meshrl.engines.ray.logs import RankLogs
from meshrl.engines.ray.refs import HostRef
from meshrl.engines.ray.relay import RELAY
from meshrl.engines.remote import (
    HealthPort,
    MessageLost,
    Place,
    Process,
    ProcessExited,
    ProcessSlot,
    RemoteEngine,
    Reservation,
    clock_ahead,
)
from meshrl.errors import ConfigError, MeshStopped, OtherVersions
from meshrl.mesh import INLINE_BYTES, PATIENCE, Resources, Share, boot_id, sweep

_NODE: Final = "ray.io/node-id"
"""Ray's own label of each node."""
CALLS_AT_ONCE: Final = 10_000
"""For one process. Streams and calls that wait for their turn count."""


class RayReservation(Reservation):
    """The resources that one mesh holds of the cluster."""

    def __init__(
        self,
        cluster: Cluster,
        count: int,
        request: Amounts,
        package: Package | None,
        resources: Resources,
        rank_arguments: tuple[int, bool, Share, Machine, Mapping[str, str]],
        log: str,
        rank_logs: RankLogs,
    ) -> None:
        """`request`: the request of each rank. `package`: code that ranks need and their machines may lack.

        `rank_arguments`: of a `RankProcess`. `log`: as in `Engine.reserve`.
        """
        cpus = request.get("CPU", 0)
        super().__init__(count, max(1, int(cpus)), cpus, resources.min_ranks, log)
        self._package = package
        self._rank_logs = rank_logs
        self._request = request
        self._cluster = cluster
        self._rank_arguments = rank_arguments
        # Ray grants a group whole or not at all. Ranks that may come and go have one each, to move it to another node.
        groups, self._each = (count, 1) if resources.min_ranks else (1, count)
        self._strategy = resources.placement.upper()
        self._avoided: dict[int, Mapping[str, HealthPort]] = {}
        """Nodes that a group avoids because they did not answer when it was made."""
        self._groups = [self._group(number) for number in range(groups)]
        self.processes: list[Process] = [self.begin(slot) for slot in self.slots]

    def _group(self, number: int) -> PlacementGroup:
        """Reserve resources for ranks on nodes that answer. Ray may consider a dead node alive."""
        avoided = self._avoided[number] = dict(self._cluster.silent)
        labels = {_NODE: f"!in({','.join(avoided)})"} if avoided else {}
        bundles = [dict(self._request)] * self._each
        selectors = [labels] * self._each
        group: PlacementGroup = placement_group(bundles, strategy=self._strategy, bundle_label_selector=selectors)
        return group

    async def _regroup(self, number: int) -> None:
        """Give up the resources of ranks, and request others on nodes that answer now."""
        old, self._groups[number] = self._groups[number], self._group(number)
        await self._cluster.ask(partial(remove_placement_group, old))

    async def prepare(self, slots: Sequence[ProcessSlot]) -> None:
        """Move ranks away from nodes that were given up. Upload the code again, which Ray may have dropped."""
        for slot in slots:
            channel, known = cast("RayChannel", slot.process.channel), slot.process.known
            if self._each == 1 and channel.is_lost and known and known.health_port:
                self._cluster.silent[known.node] = known.health_port
                await self._regroup(slot.index)
        if self._package:
            await self._cluster.ask(self._package.upload)

    async def report_missing(self, missing: int) -> None:
        """Log the number of processes that have not started. If resources are missing, log requested and free ones.

        Raises `NoRoom` if a first start waits in vain, because a node is lost. A later one waits for the node's return.
        """
        if not self.environments:
            self._check_room(await self._cluster.nodes())
        if await self._cluster.ask(self._has_its_resources):
            await super().report_missing(missing)
            return
        free, asks = written(await self._cluster.free()), written(self._request)
        of = len(self.slots)
        log.info(
            "waiting for resources for ranks", **self.log_fields, missing=missing, of=of, each_asks=asks, free=free
        )

    def _check_room(self, nodes: Sequence[Node]) -> None:
        check_room(self.min_ranks, self._request, nodes, self._cluster.silent.values())

    def _has_its_resources(self) -> bool:
        """True if Ray has reserved the resources, so only the processes still have to start."""
        tables = [cast("Mapping[str, object]", placement_group_table(group)) for group in self._groups]
        return all(table["state"] == "CREATED" for table in tables)

    async def place(self, slot: ProcessSlot) -> Place:
        """Return the place of a rank's process. A rank that may come and go tries all nodes again when one answers."""
        while self._each == 1 and (avoided := self._avoided[slot.index]):
            placing = asyncio.ensure_future(self._place_with_retry(slot))
            heard = asyncio.ensure_future(self._cluster.one_answers(avoided))
            try:
                await asyncio.wait([placing, heard], return_when=asyncio.FIRST_COMPLETED)
                if placing.done():
                    return placing.result()
            finally:
                placing.cancel()
                heard.cancel()
            await self._regroup(slot.index)
            self.kill(slot.process)
            self.processes[slot.index] = self.begin(slot)
        return await self._place_with_retry(slot)

    async def _place_with_retry(self, slot: ProcessSlot) -> Place:
        """Return the place of a rank's process. Requests a process that never ran once more.

        Ray may have tried a node whose death it notices only now.
        """
        process = slot.process
        try:
            return await self._wait_for_place(process)
        except ProcessExited as exited:
            if self.released or process.known or self._cluster.lost:
                raise await self._not_started(process, exited) from exited
            self.kill(process)
            again = self.processes[slot.index] = self.begin(slot)
        except MessageLost as error:
            raise await self._not_started(process, error) from error
        try:
            return await self._wait_for_place(again)
        except (ProcessExited, MessageLost) as error:
            raise await self._not_started(again, error) from error

    async def _not_started(self, process: Process, error: ProcessExited | MessageLost) -> MeshStopped | ConfigError:
        """Return the error of a process that did not start. Raises `NoRoom` if that is for a lost node."""
        if self.released:
            return MeshStopped("the mesh was stopped while its ranks were started")
        if not self._cluster.lost:
            nodes = await self._cluster.nodes()
            await self._cluster.check({node.id: node.address for node in nodes})
            self._check_room(nodes)
        return ConfigError(
            f"a rank's process did not start on the cluster: {process.died(str(error)).reason}; if it happens again, "
            "check that each node has the same Python, Ray and meshrl"
        )

    async def _wait_for_place(self, process: Process) -> Place:
        """Return its place, once it runs. From now on it is watched."""
        channel = cast("RayChannel", process.channel)
        place = cast("Place", await channel.request("place"))
        await self._check(process, place)
        channel.found(place)
        if place.boot != boot_id():
            process.ahead = await clock_ahead(lambda: cast("Awaitable[float]", channel.request("clock")))
        process.known = place
        if process.log:
            self._rank_logs.follow(process)
            channel.farewell = partial(self._rank_logs.last, place.node)
        return place

    async def _check(self, process: Process, place: Place) -> None:
        """Raise `OtherVersions` if its node has those, as a new node may, and `ProcessExited` if it reports none."""
        node = f"{place.host} ({place.ip})"
        try:
            reported = await self._cluster.check({place.node: node}, have_ranks=True)
        except OtherVersions as refused:
            process.died(str(refused))  # so that it is made again, perhaps elsewhere
            raise
        if not reported:
            reason = f"its node {node} did not report the versions of its packages, so no rank may run there"
            raise ProcessExited(reason)

    async def release(self) -> None:
        """End the processes and free all resources."""
        try:
            await super().release()
        finally:
            nodes = {process.known.node for process in self.processes if process.known}
            await asyncio.gather(*map(self._rank_logs.last, nodes))
            with suppress(ConfigError):  # the head is gone
                await self._cluster.ask(self._give_back)

    def _give_back(self) -> None:
        for group in self._groups:
            remove_placement_group(group)

    def begin(self, slot: ProcessSlot) -> Process:
        """Request a process from Ray. It starts when its resources are free."""
        group, bundle = divmod(slot.index, self._each)
        strategy = PlacementGroupSchedulingStrategy(self._groups[group], placement_group_bundle_index=bundle)
        custom = {name: amount for name, amount in self._request.items() if name not in ("CPU", "GPU", "memory")}
        actor = _rank_process().options(
            num_cpus=self._request.get("CPU", 0),
            num_gpus=self._request.get("GPU", 0),
            memory=self._request.get("memory"),
            resources=custom,
            scheduling_strategy=strategy,
            max_concurrency=CALLS_AT_ONCE,
            enable_task_events=False,  # less work for every call
            runtime_env={"working_dir": self._package.uri} if self._package else None,
        )
        paths = [path or str(Path.cwd()) for path in sys.path]
        carried = self._package.folders if self._package else ()
        process = Process(
            token_hex(8), RayChannel(actor.remote(str(Path.cwd()), paths, *self._rank_arguments, carried))
        )
        process.log = self.logs.of(slot.index) if self.logs else None
        return process

    def kill(self, process: Process) -> None:
        """End a process at once."""
        channel = cast("RayChannel", process.channel)
        channel.close()
        if not self._cluster.lost:
            channel.kill()


@cache
def _rank_process() -> ActorClass[RankProcess]:
    remote = cast("Callable[..., Callable[[type], ActorClass[RankProcess]]]", ray.remote)  # its types lack the option
    return remote(concurrency_groups={RELAY: CALLS_AT_ONCE})(RankProcess)


class RayEngine(RemoteEngine):
    """Ranks as processes of a Ray cluster.

    `address`: HOST:PORT of a cluster, or `auto` for the one on this machine. None: RAY_ADDRESS, or without it a new
    cluster of this machine's cores, which `close` stops. If the program has called `ray.init`, that connection is used.
    For `inline_bytes` see `Engine`. `share`: of the shared memory of each machine. `patience`: seconds to wait for an
    unreachable host before its ranks count as lost. `packages`: packages whose versions must agree on each node,
    besides Python, meshrl and torch. `code`: the user's folders that ranks import from, besides what this process has
    imported. Other nodes get copies. `environment`: variables that ranks get.
    """

    def __init__(
        self,
        address: str | None = None,
        inline_bytes: int = INLINE_BYTES,
        share: Share = Share(),  # noqa: B008 -- immutable
        patience: float = PATIENCE,
        packages: Sequence[str] = (),
        code: Sequence[Path] = (),
        environment: Mapping[str, str] = {},
    ) -> None:
        super().__init__(HostRef, inline_bytes)
        self._environment = environment
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
        check_count(count)
        await self._cluster.connect()
        async with self._planning:
            nodes = await self._cluster.nodes()
            request = amounts(resources, resources.cpus or 0)
            check_room(resources.min_ranks or count, request, nodes, self._cluster.silent.values())
            await self._cluster.check({node.id: node.address for node in nodes if room_for(request, node.has)})
            share = int(await self._free_cores(nodes)) // count
            if resources.cpus is None:
                most = max(0, share)
                free = nodes if self._cluster.is_ours else await self._cluster.with_free_cores(nodes)
                fits = (cpus for cpus in range(most, 0, -1) if has_room(count, amounts(resources, cpus), free))
                cpus = next(fits, 0)
            else:
                # On our cluster, it could only wait for other meshes of this run, which may never end.
                cpus = min(resources.cpus, max(0, share)) if self._cluster.is_ours else resources.cpus
            request = amounts(resources, cpus)
            own = self.inline_bytes, self.shares_memory, self._share, self._cluster.machine, self._environment
            package = await self._packaged(nodes, resources)
            reservation = RayReservation(self._cluster, count, request, package, resources, own, log, self._rank_logs)
            self._reservations.append(reservation)
        return await self._settled(reservation)

    async def _packaged(self, nodes: Iterable[Node], resources: Resources) -> Package | None:
        """Package the code for ranks that may be on another machine, unless Ray has brought it there."""
        apart = any(node.address != self._cluster.machine.health_port.ip for node in nodes) or resources.min_ranks
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
