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
"""Seconds that a process has to end its calls when its mesh goes. One that computes without a pause is killed then."""
_LATECOMERS: Final = 10.0
"""Seconds that a mesh which may begin with fewer ranks waits for the next of the others."""


@dataclass(frozen=True)
class ProcessSlot:
    """A place for one rank: a process, or the next one there if it dies."""

    reservation: "Reservation"
    index: int
    threads: int
    remaking: asyncio.Lock = field(default_factory=asyncio.Lock, compare=False)
    """Held while what is there is made again."""

    @property
    def process(self) -> Process:
        """The process that is there now."""
        return self.reservation.processes[self.index]


class Reservation(ABC):
    """What one mesh holds of its engine."""

    def __init__(self, count: int, threads: int, cpus: float, min_ranks: int = 0, log: str = "") -> None:
        """`threads`: of each rank; `cpus`: cores that it has for itself; `min_ranks`: ranks that are enough to begin.

        `log`: as in `Engine.reserve`.
        """
        self.logs: LogFolder | None = LogFolder(Path(log)) if log else None
        self.named: Mapping[str, str] = {"mesh": Path(log).name, "logs": f"{log}-*.log"} if log else {}
        """Whose ranks these are, and where they write, for log lines."""
        self.min_ranks: int = min_ranks or count
        self.cpus: float = cpus * count
        """Cores that are reserved in all."""
        self.members: list[RankMember] = []
        self.environments: dict[int, Mapping[str, str]] = {}
        """What each rank finds there, by its number."""
        self.slots: list[ProcessSlot] = [ProcessSlot(self, index, threads) for index in range(count)]
        self.meeting: asyncio.Lock = asyncio.Lock()
        """Held while an actor is made: its ranks may wait for each other."""
        self.released: bool = False
        self.processes: list[Process] = []

    async def settle(self, slots: Sequence[ProcessSlot] | None = None) -> None:
        """Wait until processes run, and make the environment of these ranks anew. Says what it waits for.

        Without `slots` all of them, or `min_ranks`: what has come a little later than these is taken, too.
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
        # All are asked anew: each names a port that is free now.
        await patiently(enough([put(slot) for slot in wanted], min_ranks), say)
        self.environments.update(environments(places, len(self.slots), self.slots[0].threads))

    @abstractmethod
    async def place(self, slot: ProcessSlot) -> Place:
        """Where a slot's process is, when it runs. ConfigError where it does not start."""

    async def say_missing(self, missing: int) -> None:
        """Say that so many processes have not started yet."""
        log.info("waiting for ranks to start", **self.named, missing=missing, of=len(self.slots))

    async def prepare(self, slots: Sequence[ProcessSlot]) -> None:  # noqa: B027 -- most have nothing to do
        """Do what comes before processes are begun anew where they have died."""

    @abstractmethod
    def begin(self, slot: ProcessSlot) -> Process:
        """Ask for a process. It comes when there is room."""

    @abstractmethod
    def kill(self, process: Process) -> None:
        """End a process at once."""

    @property
    def has_died(self) -> bool:
        """Whether a process is gone."""
        return any(process.death for process in self.processes)

    def revive(self, slots: Sequence[ProcessSlot]) -> None:
        """Begin a new process where one has died."""
        for slot in slots:
            if slot.process.death is not None:
                self.kill(slot.process)  # perhaps it was only out of reach; its place must be free
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
        """These actors have been stopped."""
        self.members = [each for each in self.members if each not in members]

    async def release(self) -> None:
        """End the processes and give everything back."""
        self.released = True
        for member in self.members:
            member.stopped = True  # whoever calls from now on is told so, not that a process has died
        stops = [asyncio.ensure_future(member.stop()) for member in self.members]
        try:
            if stops:
                await asyncio.wait(stops, timeout=GRACE)
            leaves = [process.channel.request("leave") for process in self.processes if process.is_there]
            await asyncio.wait_for(asyncio.gather(*leaves, return_exceptions=True), GRACE)
        except TimeoutError:
            pass  # one that computes without a pause: what it leaves is swept by the next process that shares memory
        finally:
            for stop in stops:
                stop.cancel()
            for process in self.processes:
                self.kill(process)


async def enough(waits: Sequence[Coroutine[object, object, None]], min_ranks: int) -> None:
    """Wait for all, or for `min_ranks` of them and a moment more. Raises the first failure where too few are left."""
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
    """What each rank finds in `os.environ`, so that `torch.distributed` needs nothing else.

    `places`: of those that begin together, by their number among all the `ranks` of the mesh.
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
        seen[place.node] += 1
    return made
