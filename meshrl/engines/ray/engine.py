"""The distributed engine: a mesh is a placement group, a rank a process, the object store holds what is large."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from secrets import token_hex
from typing import cast
from weakref import WeakKeyDictionary

import structlog

from meshrl.actor import Rank
from meshrl.engine import INLINE_BYTES, Member, Resources, Slot
from meshrl.engines.ray.caller import RayCaller
from meshrl.engines.ray.cluster import NOTHING, Amounts, Cluster, check_room, patiently
from meshrl.engines.ray.process import RayMember, Spawn, sendable
from meshrl.engines.ray.reservation import RaySlot, Reservation
from meshrl.engines.ray.wire import RayHeld
from meshrl.errors import ConfigError, MeshStopped, RankDied

_log = structlog.get_logger()


@dataclass(frozen=True)
class _Origin:
    """What an actor can be made from again."""

    reservation: Reservation
    recipe: RayHeld


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

    async def reserve(self, count: int, resources: Resources) -> Sequence[RaySlot]:
        """Processes for `count` ranks, when the cluster has room for them.

        Without `cpus` the ranks share the cores that no mesh has; where none is free, a rank reserves nothing
        and gets one thread. Raises `ConfigError` for what the cluster could not give if it were idle.
        """
        if count < 1:
            raise ConfigError(f"a mesh of {count} ranks cannot be made: ask for at least 1")
        await self._cluster.connect()
        async with self._planning:
            nodes = await self._cluster.nodes()
            cpus = resources.cpus
            if cpus is None:
                cpus = int(await self._free_cores(nodes.values())) // count
            wanted = {"CPU": float(cpus), "GPU": resources.gpus, **resources.custom}
            asked = {name: amount for name, amount in wanted.items() if amount} or NOTHING
            check_room(count, asked, nodes)
            reservation = Reservation(count, asked, max(1, cpus), resources.placement, self.inline_bytes)
            self._reservations.append(reservation)
        try:
            await reservation.settle(self._cluster)
        except BaseException:
            await self.release(reservation.slots)
            raise
        return reservation.slots

    async def _free_cores(self, nodes: Iterable[Amounts]) -> float:
        mine = sum(each.cpus for each in self._reservations)
        left = sum(node.get("CPU", 0) for node in nodes) - mine
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
        recipe = sendable(f"{create.__name__}.__init__", partial(RayHeld.put, (create, arguments, keywords)))
        origin = _Origin(places[0].reservation, recipe)
        spawn = Spawn(token_hex(8), create.__name__, ranks, [slot.process for slot in places])
        self._origins[spawn] = origin
        members = [RayMember(spawn, index) for index in range(len(places))]
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
        reservation = origin.reservation
        reservation.members += [member for member in members if member not in reservation.members]
        running = [
            asyncio.create_task(member.construct(reservation.environments[member.index], origin.recipe))
            for member in members
        ]

        async def say() -> None:
            pairs = zip(members, running, strict=True)
            missing = [member.rank.index for member, task in pairs if not task.done()]
            _log.info(f"waiting for {members[0].spawn.name} to be made", ranks=missing)

        try:
            outcomes = await patiently(asyncio.gather(*running, return_exceptions=True), say)
            failures = [outcome for outcome in outcomes if outcome is not None]
            if failures:
                raise next((each for each in failures if isinstance(each, RankDied)), failures[0])
        except BaseException:
            await self.stop(members)
            raise

    async def stop(self, members: Sequence[Member]) -> None:
        """Cancel the actors' calls, wait for their end, and let the actors go. It goes on where it is cancelled."""
        await super().stop(members)
        for member in cast("Sequence[RayMember]", members):
            reservation = self._origins[member.spawn].reservation
            reservation.members = [each for each in reservation.members if each is not member]

    async def close(self) -> None:
        """Stop everything, and the cluster if it was started here."""
        try:
            await self.release([slot for each in self._reservations for slot in each.slots])
        finally:
            await self._cluster.close()
