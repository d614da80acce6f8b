"""The processes of one mesh: one a rank, what torch.distributed looks for there, and how they end."""

import asyncio
import math
import os
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from meshrl.engines.hosting.messages import Place
from meshrl.engines.hosting.process import Process, RankMember

GRACE: Final = 5.0
"""Seconds that a process has to end its calls when its mesh goes. One that computes without a pause is killed then."""


@dataclass(frozen=True)
class ProcessSlot:
    """A place for one rank: a process, or the next one there if it dies."""

    reservation: "Reservation"
    index: int
    threads: int

    @property
    def process(self) -> Process:
        """The process that is there now."""
        return self.reservation.processes[self.index]


class Reservation(ABC):
    """What one mesh holds of its engine."""

    def __init__(self, count: int, threads: int, cpus: float) -> None:
        """`threads`: of each rank; `cpus`: cores that it has for itself."""
        self.cpus = cpus * count
        """Cores that are reserved in all."""
        self.members: list[RankMember] = []
        self.environments: Sequence[Mapping[str, str]] = []
        self.slots = [ProcessSlot(self, index, threads) for index in range(count)]
        self.restarting = asyncio.Lock()
        self.meeting = asyncio.Lock()
        """Held while an actor is made: its ranks may wait for each other."""
        self.released = False
        self.processes: list[Process] = []

    @abstractmethod
    async def settle(self) -> None:
        """Wait until every process runs, and make the environment of the ranks anew."""

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

    def revive(self) -> None:
        """Begin a new process where one has died."""
        for slot in self.slots:
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
            leaves = [process.channel.request("leave") for process in self.processes if process.death is None]
            await asyncio.wait_for(asyncio.gather(*leaves, return_exceptions=True), GRACE)
        except TimeoutError:
            pass  # one that computes without a pause: what it leaves is swept by the next process that shares memory
        finally:
            for stop in stops:
                stop.cancel()
            for process in self.processes:
                self.kill(process)


def environments(places: Sequence[Place], threads: int) -> list[dict[str, str]]:
    """What each rank finds in `os.environ`, so that `torch.distributed` needs nothing else."""
    ranks_on = Counter(place.node for place in places)
    seen: Counter[str] = Counter()
    made = []
    for index, place in enumerate(places):
        made.append(
            {
                "MASTER_ADDR": places[0].ip,
                "MASTER_PORT": str(places[0].port),
                "WORLD_SIZE": str(len(places)),
                "RANK": str(index),
                "LOCAL_RANK": str(seen[place.node]),
                "LOCAL_WORLD_SIZE": str(ranks_on[place.node]),
                "OMP_NUM_THREADS": str(threads),
                "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "5000"),  # as for `meshrl run` in one process
            }
        )
        seen[place.node] += 1
    return made
