"""The common part of engines with rank processes: a mesh's processes, and the actors that are made on them."""

import asyncio
import math
import os
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from pickle import PicklingError
from secrets import token_hex
from typing import Final, NamedTuple, TypeVar, cast
from weakref import WeakKeyDictionary

from meshrl import log
from meshrl.engines.ranks import unsendable
from meshrl.engines.remote.caller import Caller, Process, RankMember, Spawn, abandon, all_or_first, first_cause
from meshrl.engines.remote.logs import LogFolder
from meshrl.engines.remote.messages import Place
from meshrl.engines.remote.pool_ref import PoolRef
from meshrl.errors import MeshStopped, RankFailed
from meshrl.mesh import CollectiveActor, Member, Rank, Ref, Resources, Slot, sweep, when_here

T = TypeVar("T")

GRACE: Final = 5.0
"""Seconds that a process has to end its calls when its mesh ends. One that computes without a pause is then killed."""
FIRST_REPORT: Final = 1.0
"""Seconds of waiting before the first log line."""
NEXT_REPORT: Final = 10.0
_LATECOMERS: Final = 10.0
"""Seconds that a mesh with enough ranks waits for each further one."""


async def patiently(work: Coroutine[object, None, T], report: Callable[[], Awaitable[None]]) -> T:
    """Return the result of the work. `report`, which logs what is missing, is called after a second, then every ten."""
    task = asyncio.create_task(work)
    pause = FIRST_REPORT
    try:
        while not (await asyncio.wait([task], timeout=pause))[0]:
            await report()
            pause = NEXT_REPORT
        return await task
    finally:
        task.cancel()


@dataclass(frozen=True)
class ProcessSlot:
    """A place for one rank: a process, or its successor if it dies."""

    reservation: "Reservation"
    index: int
    threads: int
    restarting: asyncio.Lock = field(default_factory=asyncio.Lock, compare=False)
    """Held while its actors are restarted."""

    @property
    def process(self) -> Process:
        """The present process."""
        return self.reservation.processes[self.index]


class Reservation(ABC):
    """The processes of one mesh, one for each rank, and the resources that they hold."""

    def __init__(self, count: int, threads: int, cpus: float, min_ranks: int = 0, log: str = "") -> None:
        """`threads`: of each rank. `cpus`: reserved cores of each rank. `min_ranks`: ranks that are enough to start.

        `log`: as in `Engine.reserve`.
        """
        self.logs: LogFolder | None = LogFolder(Path(log)) if log else None
        self.log_fields: Mapping[str, str] = {"mesh": Path(log).name, "logs": f"{log}-*.log"} if log else {}
        """The mesh and its log files, for log lines."""
        self.min_ranks: int = min_ranks or count
        self.cpus: float = cpus * count
        """Reserved cores in total."""
        self.members: list[RankMember] = []
        self.environments: dict[int, Mapping[str, str]] = {}
        """The environment of each rank, by its number."""
        self.slots: list[ProcessSlot] = [ProcessSlot(self, index, threads) for index in range(count)]
        self.constructing: asyncio.Lock = asyncio.Lock()
        """Held while an actor is made, because its ranks may wait for each other."""
        self.released: bool = False
        self.processes: list[Process] = []

    @abstractmethod
    def begin(self, slot: ProcessSlot) -> Process:
        """Request a process. It starts when there is room."""

    @abstractmethod
    async def place(self, slot: ProcessSlot) -> Place:
        """Return the place of a slot's process, once it runs. ConfigError if it does not start."""

    @abstractmethod
    def kill(self, process: Process) -> None:
        """End a process at once."""

    async def prepare(self, slots: Sequence[ProcessSlot]) -> None:  # noqa: B027 -- most have nothing to do
        """Prepare for new processes in place of dead ones."""

    async def report_missing(self, missing: int) -> None:
        """Log the number of processes that have not started yet."""
        log.info("waiting for ranks to start", **self.log_fields, missing=missing, of=len(self.slots))

    async def settle(self, slots: Sequence[ProcessSlot] | None = None) -> None:
        """Wait until processes run, and make the environment of these ranks again. Logs what it waits for.

        Without `slots` it waits for all, or for `min_ranks` and any that start a little later.
        """
        for slot in self.slots[len(self.processes) :]:
            self.processes.append(self.begin(slot))  # one by one, so that a later failure leaves none unknown
        wanted = self.slots if slots is None else slots
        places: dict[int, Place] = {}

        async def put(slot: ProcessSlot) -> None:
            places[slot.index] = await self.place(slot)

        async def report() -> None:
            await self.report_missing(len(wanted) - len(places))

        min_ranks = self.min_ranks if slots is None else len(slots)
        # Ask all again, so that each names a port that is free now.
        await patiently(wait_for_enough([put(slot) for slot in wanted], min_ranks), report)
        self.environments.update(environments(places, len(self.slots), self.slots[0].threads))

    @property
    def has_died(self) -> bool:
        """True if a process is gone."""
        return any(process.death for process in self.processes)

    def revive(self, slots: Sequence[ProcessSlot]) -> None:
        """Request a new process in place of each dead one."""
        for slot in slots:
            if slot.process.death is not None:
                self.kill(slot.process)  # it may only be unreachable, and its place must be free
                self.processes[slot.index] = self.begin(slot)

    async def end(self, members: Sequence[RankMember], *, failed: bool = False) -> None:
        """Stop actors. After a failure or a death, a process that does not answer (it waits for others) is killed."""
        stops = {asyncio.ensure_future(member.stop()): member for member in members}
        waiting = set(stops)
        deadline = math.inf
        while waiting and time.monotonic() < deadline:
            if deadline == math.inf and (failed or self.has_died):
                deadline = time.monotonic() + GRACE
            left = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
            _, waiting = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        for stop in waiting:
            stop.cancel()
            stops[stop].process.died("it did not answer after another rank had failed or died")
            self.kill(stops[stop].process)

    def forget(self, members: Sequence[RankMember]) -> None:
        """Drop actors that were stopped."""
        self.members = [each for each in self.members if each not in members]

    async def release(self) -> None:
        """End the processes and free all resources."""
        self.released = True
        for member in self.members:
            member.stopped = True  # later calls raise MeshStopped, not RankDied
        stops = [asyncio.ensure_future(member.stop()) for member in self.members]
        try:
            if stops:
                await asyncio.wait(stops, timeout=GRACE)
            leaves = [process.channel.request("leave") for process in self.processes if process.is_running]
            await asyncio.wait_for(asyncio.gather(*leaves, return_exceptions=True), GRACE)
        except TimeoutError:
            pass  # it computes without a pause: the next process that shares memory sweeps its segments
        finally:
            for stop in stops:
                stop.cancel()
            for process in self.processes:
                self.kill(process)


async def wait_for_enough(waits: Sequence[Coroutine[object, object, None]], min_ranks: int) -> None:
    """Wait for all, or for `min_ranks` of them and a moment more. If too few are left, the first failure is raised."""
    tasks = {asyncio.ensure_future(wait) for wait in waits}
    waiting, errors = set(tasks), list[BaseException]()
    try:
        while waiting:
            started = len(tasks) - len(waiting) - len(errors)
            done, waiting = await asyncio.wait(
                waiting, timeout=_LATECOMERS if started >= min_ranks else None, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                return
            errors += [error for each in done if (error := each.exception()) is not None]
            if len(tasks) - len(errors) < min_ranks:
                raise errors[0]
    finally:
        for task in tasks:
            task.cancel()


def environments(places: Mapping[int, Place], ranks: int, threads: int) -> dict[int, dict[str, str]]:
    """Return the environment variables of each rank, which are all that `torch.distributed` and its backend need.

    `places`: of the processes that begin together, by their number among all the `ranks` of the mesh.
    """
    ranks_on = Counter(place.node for place in places.values())
    first = places[min(places)]
    seen: Counter[str] = Counter()
    by_rank: dict[int, dict[str, str]] = {}
    for index, place in sorted(places.items()):
        by_rank[index] = {
            "MASTER_ADDR": first.ip,
            "MASTER_PORT": str(first.port),
            "WORLD_SIZE": str(ranks),
            "RANK": str(index),
            "LOCAL_RANK": str(seen[place.node]),
            "LOCAL_WORLD_SIZE": str(ranks_on[place.node]),
            "OMP_NUM_THREADS": str(threads),
            "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "5000"),  # as for `meshrl run` in one process
        }
        if place.health_port is not None:
            by_rank[index]["MESHRL_PATIENCE"] = str(place.health_port.patience)
        seen[place.node] += 1
    return by_rank


class _Origin(NamedTuple):
    """The means to make an actor again."""

    reservation: Reservation
    recipe: tuple[type, tuple[object, ...], Mapping[str, object]]
    """The class and its arguments. Handles among these reach the present processes."""


class RemoteEngine(Caller, ABC):
    """The controller's engine. Ranks have its `Caller`."""

    def __init__(self, references: type[PoolRef], inline_bytes: int, shares_memory: bool = False) -> None:
        """See `Caller`. `inline_bytes`: size in bytes of the largest column that travels with a call."""
        super().__init__(references, inline_bytes, shares_memory)
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
        ending = [each for each in self._reservations if each in wanted]
        self._reservations = [each for each in self._reservations if each not in wanted]
        await asyncio.gather(*(each.release() for each in ending))

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
        self._origins[spawn] = _Origin(reservation, (create, arguments, keywords))
        members = [RankMember(spawn, index) for index in range(len(places))]
        # Ranks may meet as they are made, so no rank may make two actors in another order than the others.
        async with reservation.constructing:
            await self._construct([member for member in members if member.process.is_running], self._origins[spawn])
        return members

    async def restart(self, members: Sequence[Member]) -> None:
        """Construct the actors again, in new processes if the old ones died. If one fails, all are stopped.

        Waits for processes that are not there yet. Other ranks of the mesh stay as they are.
        """
        again = cast("Sequence[RankMember]", members)
        origin = self._origins[again[0].spawn]
        reservation = origin.reservation
        slots = [reservation.slots[member.index] for member in again]
        async with AsyncExitStack() as held:
            for slot in slots:
                await held.enter_async_context(slot.restarting)
            self._check_held(reservation, again[0])
            await reservation.end(again)
            await reservation.prepare(slots)
            self._check_held(reservation, again[0])  # it may have been stopped while this waited
            reservation.revive(slots)
            await reservation.settle(slots)
            self._check_held(reservation, again[0])
            for member in again:
                member.move(reservation.processes[member.index])
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

        async def report() -> None:
            pairs = zip(members, running, strict=True)
            missing = [member.rank.index for member, task in pairs if not task.done()]
            log.info(f"waiting for {name} to be constructed", ranks=missing)

        def put() -> Ref:
            try:
                return self.put(origin.recipe)
            except (TypeError, PicklingError) as error:
                raise unsendable(f"{name}.__init__", error) from error

        try:
            recipe = await when_here(put)
            for member in members:
                construction = member.construct(reservation.environments[member.index], recipe)
                running.append(asyncio.create_task(construction))
            await patiently(all_or_first(running), report)
        except BaseException as error:  # noqa: BLE001 -- it is raised again
            cause = await first_cause(error, members, running) if isinstance(error, RankFailed) else error
            abandon(running)
            await reservation.end(members, failed=True)
            reservation.forget(members)
            raise cause  # noqa: B904 -- it has its cause

    async def stop(self, members: Sequence[Member]) -> None:
        """Cancel the actors' calls, wait for their end, and drop the actors. Continues if the caller is cancelled."""
        stopped = cast("Sequence[RankMember]", members)
        if stopped:
            reservation = self._origins[stopped[0].spawn].reservation
            await reservation.end(stopped)
            reservation.forget(stopped)

    async def close(self) -> None:
        """Stop everything."""
        try:
            await self.release([slot for each in self._reservations for slot in each.slots])
        finally:
            sweep()  # killed processes leave their segments
