"""The processes of a mesh: one for each rank, their setup for torch.distributed, and how they end."""

import asyncio
import math
import os
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from meshrl import log
from meshrl.engines.hosting.messages import Place
from meshrl.engines.hosting.patience import patiently
from meshrl.engines.hosting.process import Process, RankMember
from meshrl.engines.hosting.rank_log import LogFolder

GRACE: Final = 5.0
"""Seconds that a process has to end its calls when its mesh ends. One that computes without a pause is then killed."""
_LATECOMERS: Final = 10.0
"""Seconds that a mesh with enough ranks waits for each further one."""


@dataclass(frozen=True)
class ProcessSlot:
    """A place for one rank: a process, or its successor if it dies."""

    reservation: "Reservation"
    index: int
    threads: int
    remaking: asyncio.Lock = field(default_factory=asyncio.Lock, compare=False)
    """Held while its content is made again."""

    @property
    def process(self) -> Process:
        """The present process."""
        return self.reservation.processes[self.index]


class Reservation(ABC):
    """The resources that one mesh holds of its engine."""

    def __init__(self, count: int, threads: int, cpus: float, min_ranks: int = 0, log: str = "") -> None:
        """`threads`: of each rank. `cpus`: reserved cores of each rank. `min_ranks`: ranks that are enough to start.

        `log`: as in `Engine.reserve`.
        """
        self.logs: LogFolder | None = LogFolder(Path(log)) if log else None
        self.named: Mapping[str, str] = {"mesh": Path(log).name, "logs": f"{log}-*.log"} if log else {}
        """The mesh and its log files, for log lines."""
        self.min_ranks: int = min_ranks or count
        self.cpus: float = cpus * count
        """Reserved cores in total."""
        self.members: list[RankMember] = []
        self.environments: dict[int, Mapping[str, str]] = {}
        """The environment of each rank, by its number."""
        self.slots: list[ProcessSlot] = [ProcessSlot(self, index, threads) for index in range(count)]
        self.meeting: asyncio.Lock = asyncio.Lock()
        """Held while an actor is made, because its ranks may wait for each other."""
        self.released: bool = False
        self.processes: list[Process] = []

    async def settle(self, slots: Sequence[ProcessSlot] | None = None) -> None:
        """Wait until processes run, and make the environment of these ranks again. Logs what it waits for.

        Without `slots` it waits for all, or for `min_ranks` and any that start a little later.
        """
        for slot in self.slots[len(self.processes) :]:
            self.processes.append(self.begin(slot))
        wanted = self.slots if slots is None else slots
        places: dict[int, Place] = {}

        async def put(slot: ProcessSlot) -> None:
            places[slot.index] = await self.place(slot)

        async def say() -> None:
            await self.say_missing(len(wanted) - len(places))

        min_ranks = self.min_ranks if slots is None else len(slots)
        # Ask all again, so that each names a port that is free now.
        await patiently(enough([put(slot) for slot in wanted], min_ranks), say)
        self.environments.update(environments(places, len(self.slots), self.slots[0].threads))

    @abstractmethod
    async def place(self, slot: ProcessSlot) -> Place:
        """Return the place of a slot's process, once it runs. ConfigError if it does not start."""

    async def say_missing(self, missing: int) -> None:
        """Log the number of processes that have not started yet."""
        log.info("waiting for ranks to start", **self.named, missing=missing, of=len(self.slots))

    async def prepare(self, slots: Sequence[ProcessSlot]) -> None:  # noqa: B027 -- most have nothing to do
        """Prepare for new processes in place of dead ones."""

    @abstractmethod
    def begin(self, slot: ProcessSlot) -> Process:
        """Request a process. It starts when there is room."""

    @abstractmethod
    def kill(self, process: Process) -> None:
        """End a process at once."""

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
        patience = math.inf
        while waiting and time.monotonic() < patience:
            if patience == math.inf and (failed or self.has_died):
                patience = time.monotonic() + GRACE
            left = None if patience == math.inf else max(0.0, patience - time.monotonic())
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
            leaves = [process.channel.request("leave") for process in self.processes if process.is_there]
            await asyncio.wait_for(asyncio.gather(*leaves, return_exceptions=True), GRACE)
        except TimeoutError:
            pass  # it computes without a pause: the next process that shares memory sweeps its segments
        finally:
            for stop in stops:
                stop.cancel()
            for process in self.processes:
                self.kill(process)


async def enough(waits: Sequence[Coroutine[object, object, None]], min_ranks: int) -> None:
    """Wait for all, or for `min_ranks` of them and a moment more. If too few are left, the first failure is raised."""
    tasks = {asyncio.ensure_future(wait) for wait in waits}
    waiting, failed = set(tasks), list[BaseException]()
    try:
        while waiting:
            came = len(tasks) - len(waiting) - len(failed)
            done, waiting = await asyncio.wait(
                waiting,
                timeout=_LATECOMERS if came >= min_ranks else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not done:
                return
            failed += [error for each in done if (error := each.exception()) is not None]
            if len(tasks) - len(failed) < min_ranks:
                raise failed[0]
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
    made: dict[int, dict[str, str]] = {}
    for index, place in sorted(places.items()):
        made[index] = {
            "MASTER_ADDR": first.ip,
            "MASTER_PORT": str(first.port),
            "WORLD_SIZE": str(ranks),
            "RANK": str(index),
            "LOCAL_RANK": str(seen[place.node]),
            "LOCAL_WORLD_SIZE": str(ranks_on[place.node]),
            "OMP_NUM_THREADS": str(threads),
            "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "5000"),  # as for `meshrl run` in one process
        }
        if place.door is not None:
            made[index]["MESHRL_PATIENCE"] = str(place.door.patience)
        seen[place.node] += 1
    return made
