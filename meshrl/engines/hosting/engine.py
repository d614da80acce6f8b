"""The common part of engines with rank processes: start, restart and stop actors on a mesh's processes."""

import asyncio
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from secrets import token_hex
from typing import cast
from weakref import WeakKeyDictionary

from meshrl import log
from meshrl.engines.hosting.caller import Caller, abandon, all_or_first, first_cause
from meshrl.engines.hosting.patience import patiently
from meshrl.engines.hosting.process import RankMember, Spawn, sendable
from meshrl.engines.hosting.reservation import ProcessSlot, Reservation
from meshrl.errors import MeshStopped, RankFailed
from meshrl.mesh import CollectiveActor, Member, Rank, Resources, Slot, sweep, when_here


@dataclass(frozen=True)
class _Origin:
    """The means to make an actor again."""

    reservation: Reservation
    recipe: tuple[type, tuple[object, ...], Mapping[str, object]]
    """The class and its arguments. Handles among these reach the present processes."""


class HostingEngine(Caller):
    """The controller's engine. Ranks have its `Caller`."""

    def __init__(self, inline_bytes: int, shares_memory: bool = False) -> None:
        super().__init__(inline_bytes, shares_memory)
        self._reservations: list[Reservation] = []
        self._origins: WeakKeyDictionary[Spawn, _Origin] = WeakKeyDictionary()

    @abstractmethod
    async def reserve(self, count: int, resources: Resources, log: str = "") -> Sequence[ProcessSlot]:
        """Start processes for `count` ranks, which write to LOG-RANK.log. ConfigError if they cannot be started."""

    async def _settled(self, reservation: Reservation) -> Sequence[ProcessSlot]:
        """Return the slots of a reservation, once its processes run."""
        try:
            await reservation.settle()
        except BaseException:
            await self.release(reservation.slots)
            raise
        return reservation.slots

    async def release(self, slots: Sequence[Slot]) -> None:
        """Stop the actors in the slots, end the processes and free their resources."""
        wanted = {slot.reservation for slot in cast("Sequence[ProcessSlot]", slots)}
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
    ) -> Sequence[RankMember]:
        """Construct the actors, all at once. If one fails, none is left. MeshStopped if their mesh has stopped."""
        places = cast("Sequence[ProcessSlot]", slots)
        reservation = places[0].reservation
        if reservation not in self._reservations:
            raise MeshStopped(f"{create.__name__} cannot be spawned: its mesh is stopped")
        if reservation.has_died and not reservation.members:
            await reservation.prepare(reservation.slots)
            reservation.revive(reservation.slots)
            await reservation.settle()
        processes = [slot.process for slot in places]
        spawn = Spawn(token_hex(8), create.__name__, ranks, processes, together=issubclass(create, CollectiveActor))
        origin = self._origins[spawn] = _Origin(reservation, (create, arguments, keywords))
        members = [RankMember(spawn, index) for index in range(len(places))]
        # Ranks may meet as they are made, so no rank may make two actors in another order than the others.
        async with reservation.meeting:
            await self._construct([member for member in members if member.process.is_there], origin)
        return members

    async def restart(self, members: Sequence[Member]) -> None:
        """Construct the actors again, in new processes if the old ones died. If one fails, all are stopped.

        Waits for processes that are not there yet. Other ranks of the mesh stay as they are.
        """
        again = cast("Sequence[RankMember]", members)
        spawn = again[0].spawn
        origin = self._origins[spawn]
        reservation = origin.reservation
        slots = [reservation.slots[member.index] for member in again]
        async with AsyncExitStack() as held:
            for slot in slots:
                await held.enter_async_context(slot.remaking)
            self._check_held(reservation, again[0])
            await reservation.end(again)
            await reservation.prepare(slots)
            self._check_held(reservation, again[0])  # it may have been stopped while this waited
            reservation.revive(slots)
            await reservation.settle(slots)
            self._check_held(reservation, again[0])
            for member in again:
                member.again(reservation.processes[member.index])
            await self._construct(again, origin)

    def _check_held(self, reservation: Reservation, member: RankMember) -> None:
        """Raise `MeshStopped` if the actor's mesh is stopped."""
        if reservation not in self._reservations:
            raise MeshStopped(
                f"{member.spawn.name} cannot be respawned on rank {member.rank.index}: its mesh is stopped"
            )

    async def _construct(self, members: Sequence[RankMember], origin: _Origin) -> None:
        reservation, name = origin.reservation, origin.recipe[0].__name__
        reservation.members += [member for member in members if member not in reservation.members]
        running: list[asyncio.Task[None]] = []

        async def say() -> None:
            pairs = zip(members, running, strict=True)
            missing = [member.rank.index for member, task in pairs if not task.done()]
            log.info(f"waiting for {name} to be constructed", ranks=missing)

        try:
            recipe = await when_here(partial(sendable, f"{name}.__init__", partial(self.put, origin.recipe)))
            for member in members:
                made = member.construct(reservation.environments[member.index], recipe)
                running.append(asyncio.create_task(made))
            await patiently(all_or_first(running), say)
        except BaseException as error:  # noqa: BLE001 -- it is raised again
            cause = await first_cause(error, members, running) if isinstance(error, RankFailed) else error
            abandon(running)
            await reservation.end(members, failed=True)
            reservation.forget(members)
            raise cause  # noqa: B904 -- it has its cause

    async def stop(self, members: Sequence[Member]) -> None:
        """Cancel the actors' calls, wait for their end, and drop the actors. Continues if the caller is cancelled."""
        gone = cast("Sequence[RankMember]", members)
        if gone:
            reservation = self._origins[gone[0].spawn].reservation
            await reservation.end(gone)
            reservation.forget(gone)

    async def close(self) -> None:
        """Stop everything."""
        try:
            await self.release([slot for each in self._reservations for slot in each.slots])
        finally:
            sweep()  # killed processes leave their segments
