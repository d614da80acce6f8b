"""The distributed engine: a mesh is a placement group, a rank a process, the object store holds what is large."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from secrets import token_hex
from typing import cast
from weakref import WeakKeyDictionary

from meshrl import log
from meshrl.engines.ray.caller import RayCaller, abandon, all_or_first, first_cause
from meshrl.engines.ray.cluster import Cluster, Node, amounts, check_room, has_room, patiently
from meshrl.engines.ray.process import RayMember, Spawn, sendable
from meshrl.engines.ray.reservation import RaySlot, Reservation
from meshrl.engines.ray.wire import RayRef
from meshrl.errors import ConfigError, MeshStopped, RankFailed
from meshrl.mesh import INLINE_BYTES, CollectiveActor, Member, Rank, Resources, Slot, sweep


@dataclass(frozen=True)
class _Origin:
    """What an actor can be made from again."""

    reservation: Reservation
    recipe: tuple[type, tuple[object, ...], Mapping[str, object]]
    """The class and its arguments; handles among these reach the processes of today."""


class RayEngine(RayCaller):
    """Ranks as processes of a Ray cluster.

    `address`: HOST:PORT of a cluster, or `auto` for the one that runs on this machine. None: RAY_ADDRESS, and
    without it a cluster of this machine's cores, which `close` stops. If the program has called `ray.init`
    already, that is used. For `inline_bytes` see `Engine`.
    """

    def __init__(self, address: str | None = None, inline_bytes: int = INLINE_BYTES) -> None:
        super().__init__(inline_bytes)
        self._cluster = Cluster(address)
        self._planning = asyncio.Lock()
        self._reservations: list[Reservation] = []
        self._origins: WeakKeyDictionary[Spawn, _Origin] = WeakKeyDictionary()

    @property
    def shares_memory(self) -> bool:
        """Whether the cluster is this machine's own, to which no other is ever added."""
        return self._cluster.is_ours

    async def reserve(self, count: int, resources: Resources) -> Sequence[RaySlot]:
        """Processes for `count` ranks, when the cluster has room for them.

        Without `cpus` the ranks share the cores that no mesh has; where none is free, a rank reserves nothing
        and gets one thread. So it is with `cpus` on a cluster that was started here, as on the local engine. Raises
        `ConfigError` for what the cluster could not give if it were idle.
        """
        if count < 1:
            raise ConfigError(f"a mesh of {count} ranks cannot be made: ask for at least 1")
        await self._cluster.connect()
        async with self._planning:
            nodes = await self._cluster.nodes()
            asked = amounts(resources, resources.cpus or 0)
            check_room(count, asked, nodes)
            share = int(await self._free_cores(nodes)) // count
            if resources.cpus is None:
                most = max(0, share)
                fits = (cpus for cpus in range(most, 0, -1) if has_room(count, amounts(resources, cpus), nodes))
                cpus = next(fits, 0)
            else:
                # On a cluster of our own only the run's own meshes could be waited for, and they may never end.
                cpus = min(resources.cpus, max(0, share)) if self._cluster.is_ours else resources.cpus
            asked = amounts(resources, cpus)
            reservation = Reservation(count, asked, max(1, cpus), resources.placement, self)
            self._reservations.append(reservation)
        try:
            await reservation.settle(self._cluster)
        except BaseException:
            await self.release(reservation.slots)
            raise
        return reservation.slots

    async def _free_cores(self, nodes: Iterable[Node]) -> float:
        mine = sum(each.cpus for each in self._reservations)
        left = sum(node.has.get("CPU", 0) for node in nodes) - mine
        return left if self._cluster.is_ours else min(left, await self._cluster.free_cores(left))

    async def release(self, slots: Sequence[Slot]) -> None:
        """Stop what runs in the slots, end their processes and give their resources back."""
        wanted = {slot.reservation for slot in cast("Sequence[RaySlot]", slots)}
        going = [each for each in self._reservations if each in wanted]
        self._reservations = [each for each in self._reservations if each not in wanted]
        await asyncio.gather(*(each.release() for each in going))

    async def start(
        self,
        slots: Sequence[Slot],
        ranks: Sequence[Rank],
        create: type,
        arguments: tuple[object, ...],
        keywords: Mapping[str, object],
    ) -> Sequence[RayMember]:
        """Construct the actors, all at once. If one fails, none is left."""
        places = cast("Sequence[RaySlot]", slots)
        reservation = places[0].reservation
        if reservation not in self._reservations:
            raise MeshStopped(f"{create.__name__} cannot be spawned: its mesh is stopped")
        if reservation.has_died and not reservation.members:
            reservation.revive()
            await reservation.settle(self._cluster)
        processes = [slot.process for slot in places]
        spawn = Spawn(token_hex(8), create.__name__, ranks, processes, together=issubclass(create, CollectiveActor))
        origin = self._origins[spawn] = _Origin(reservation, (create, arguments, keywords))
        members = [RayMember(spawn, index) for index in range(len(places))]
        # Where ranks meet as they are made, two actors must not be made in another order on another rank.
        async with reservation.meeting:
            await self._construct(members, origin)
        return members

    async def restart(self, members: Sequence[Member]) -> None:
        """Construct the actors again, in new processes where the old ones died. If one fails, all are stopped."""
        again = cast("Sequence[RayMember]", members)
        spawn = again[0].spawn
        origin = self._origins[spawn]
        reservation = origin.reservation
        async with reservation.restarting:
            if reservation not in self._reservations:
                raise MeshStopped(
                    f"{spawn.name} cannot be made again on rank {again[0].rank.index}: its mesh is stopped"
                )
            await reservation.end(again)
            reservation.revive()
            await reservation.settle(self._cluster)
            for member in again:
                member.again(reservation.processes[member.index])
            await self._construct(again, origin)

    async def _construct(self, members: Sequence[RayMember], origin: _Origin) -> None:
        reservation, name = origin.reservation, members[0].spawn.name
        reservation.members += [member for member in members if member not in reservation.members]
        running: list[asyncio.Task[None]] = []

        async def say() -> None:
            pairs = zip(members, running, strict=True)
            missing = [member.rank.index for member, task in pairs if not task.done()]
            log.info(f"waiting for {name} to be made", ranks=missing)

        try:
            recipe = sendable(f"{name}.__init__", partial(RayRef.put, origin.recipe))
            for member in members:
                made = member.construct(reservation.environments[member.index], recipe)
                running.append(asyncio.create_task(made))
            await patiently(all_or_first(running), say)
        except BaseException as error:  # noqa: BLE001 -- it is raised again
            cause = await first_cause(error, members[0], running) if isinstance(error, RankFailed) else error
            abandon(running)
            await reservation.end(members, failed=True)
            reservation.forget(members)
            raise cause  # noqa: B904 -- it has its cause

    async def stop(self, members: Sequence[Member]) -> None:
        """Cancel the actors' calls, wait for their end, and let the actors go. It goes on where it is cancelled."""
        gone = cast("Sequence[RayMember]", members)
        if gone:
            reservation = self._origins[gone[0].spawn].reservation
            await reservation.end(gone)
            reservation.forget(gone)

    async def close(self) -> None:
        """Stop everything, and the cluster if it was started here."""
        try:
            await self.release([slot for each in self._reservations for slot in each.slots])
        finally:
            await self._cluster.close()
            sweep()  # processes that were killed leave their segments
