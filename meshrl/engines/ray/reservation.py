"""The processes of a mesh on Ray: a placement group, and one actor for each rank."""

import asyncio
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Final, cast

import ray
from ray.actor import ActorClass
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from meshrl import log
from meshrl.engines.hosting import (
    Broken,
    Door,
    Gone,
    Place,
    Process,
    ProcessSlot,
    Reservation,
    boot,
    clock_ahead,
)
from meshrl.engines.ray.channel import RayChannel
from meshrl.engines.ray.cluster import Cluster, check_room, written
from meshrl.engines.ray.code import Package
from meshrl.engines.ray.logs import RankLogs
from meshrl.engines.ray.nodes import Amounts, Home, Node
from meshrl.engines.ray.rank import RankProcess
from meshrl.engines.ray.relay import RELAY
from meshrl.errors import ConfigError, MeshStopped, OtherVersions
from meshrl.mesh import Resources, Share

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

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
        asked: Amounts,
        package: Package | None,
        resources: Resources,
        keeps: tuple[int, bool, Share, Home],
        log: str,
        rank_logs: RankLogs,
    ) -> None:
        """`asked`: the request of each rank. `keeps`: arguments of a `RankProcess`. `log`: as in `Engine.reserve`.

        `package`: code that ranks need and their machines may lack.
        """
        cpus = asked.get("CPU", 0)
        super().__init__(count, max(1, int(cpus)), cpus, resources.min_ranks, log)
        self._package = package
        self._rank_logs = rank_logs
        self.asked = asked
        self._cluster = cluster
        self._keeps = keeps
        # Ray grants a group whole or not at all. Ranks that may come and go have one each, to move it to another node.
        groups, self._each = (count, 1) if resources.min_ranks else (1, count)
        self._strategy = resources.placement.upper()
        self._avoided: dict[int, Mapping[str, Door]] = {}
        """Nodes that a group avoids because they did not answer when it was made."""
        self._groups = [self._group(number) for number in range(groups)]
        self.processes: list[Process] = [self.begin(slot) for slot in self.slots]

    def _group(self, number: int) -> PlacementGroup:
        """Reserve resources for ranks on nodes that answer. Ray may consider a dead node alive."""
        avoided = self._avoided[number] = dict(self._cluster.silent)
        labels = {_NODE: f"!in({','.join(avoided)})"} if avoided else {}
        bundles = [dict(self.asked)] * self._each
        selectors = [labels] * self._each
        made: PlacementGroup = placement_group(bundles, strategy=self._strategy, bundle_label_selector=selectors)
        return made

    async def _regroup(self, number: int) -> None:
        """Give up the resources of ranks, and request others on nodes that answer now."""
        old, self._groups[number] = self._groups[number], self._group(number)
        await self._cluster.ask(partial(remove_placement_group, old))

    async def prepare(self, slots: Sequence[ProcessSlot]) -> None:
        """Move ranks away from nodes that were given up. Upload the code again, which Ray may have dropped."""
        for slot in slots:
            channel, known = cast("RayChannel", slot.process.channel), slot.process.known
            if self._each == 1 and channel.is_lost and known and known.door:
                self._cluster.silent[known.node] = known.door
                await self._regroup(slot.index)
        if self._package:
            await self._cluster.ask(self._package.upload)

    async def say_missing(self, missing: int) -> None:
        """Log the number of processes that have not started. If resources are missing, log requested and free ones.

        Raises `NoRoom` if a first start waits in vain, because a node is lost. A later one waits for the node's return.
        """
        if not self.environments:
            self._check_room(await self._cluster.nodes())
        if await self._cluster.ask(self._has_its_resources):
            await super().say_missing(missing)
            return
        free, asks = written(await self._cluster.free()), written(self.asked)
        of = len(self.slots)
        log.info("waiting for resources for ranks", **self.named, missing=missing, of=of, each_asks=asks, free=free)

    def _check_room(self, nodes: Sequence[Node]) -> None:
        check_room(self.min_ranks, self.asked, nodes, self._cluster.silent.values())

    def _has_its_resources(self) -> bool:
        """True if Ray has reserved the resources, so only the processes still have to start."""
        tables = [cast("Mapping[str, object]", placement_group_table(group)) for group in self._groups]
        return all(table["state"] == "CREATED" for table in tables)

    async def place(self, slot: ProcessSlot) -> Place:
        """Return the place of a rank's process. A rank that may come and go tries all nodes again when one answers."""
        while self._each == 1 and (avoided := self._avoided[slot.index]):
            placing = asyncio.ensure_future(self._sought(slot))
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
        return await self._sought(slot)

    async def _sought(self, slot: ProcessSlot) -> Place:
        """Return the place of a rank's process. Requests a process that never ran once more.

        Ray may have tried a node whose death it notices only now.
        """
        process = slot.process
        try:
            return await self._placed(process)
        except Gone as gone:
            if self.released or process.known or self._cluster.lost:
                raise await self._not_started(process, gone) from gone
            self.kill(process)
            again = self.processes[slot.index] = self.begin(slot)
        except Broken as error:
            raise await self._not_started(process, error) from error
        try:
            return await self._placed(again)
        except (Gone, Broken) as error:
            raise await self._not_started(again, error) from error

    async def _not_started(self, process: Process, error: Gone | Broken) -> MeshStopped | ConfigError:
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

    async def _placed(self, process: Process) -> Place:
        """Return its place, once it runs. From now on it is watched."""
        channel = cast("RayChannel", process.channel)
        place = cast("Place", await channel.request("place"))
        await self._check(process, place)
        channel.found(place)
        if place.boot != boot():
            process.ahead = await clock_ahead(lambda: cast("Awaitable[float]", channel.request("clock")))
        process.known = place
        if process.log:
            self._rank_logs.follow(process)
            channel.farewell = partial(self._rank_logs.last, place.node)
        return place

    async def _check(self, process: Process, place: Place) -> None:
        """Raise `OtherVersions` if its node has those, as a new node may, and `Gone` if it reports none."""
        node = f"{place.host} ({place.ip})"
        try:
            told = await self._cluster.check({place.node: node}, have_ranks=True)
        except OtherVersions as refused:
            process.died(str(refused))  # so that it is made again, perhaps elsewhere
            raise
        if not told:
            raise Gone(f"its node {node} did not report the versions of its packages, so no rank may run there")

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
        custom = {name: amount for name, amount in self.asked.items() if name not in ("CPU", "GPU", "memory")}
        actor = _rank_process().options(
            num_cpus=self.asked.get("CPU", 0),
            num_gpus=self.asked.get("GPU", 0),
            memory=self.asked.get("memory"),
            resources=custom,
            scheduling_strategy=strategy,
            max_concurrency=CALLS_AT_ONCE,
            enable_task_events=False,  # less work for every call
            runtime_env={"working_dir": self._package.uri} if self._package else None,
        )
        paths = [path or str(Path.cwd()) for path in sys.path]
        carried = self._package.folders if self._package else ()
        process = Process(token_hex(8), RayChannel(actor.remote(str(Path.cwd()), paths, *self._keeps, carried)))
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
