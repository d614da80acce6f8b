"""The processes of one mesh: a placement group, one process a rank, and what torch.distributed looks for there."""

import asyncio
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from secrets import token_hex
from typing import Final, cast

import ray
from ray.actor import ActorClass, ActorHandle
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from meshrl import log
from meshrl.engines.ray.caller import RayCaller
from meshrl.engines.ray.cluster import Amounts, Cluster, patiently, written
from meshrl.engines.ray.process import Process, RankHandle, RayMember, clock_ahead
from meshrl.engines.ray.rank import RankProcess
from meshrl.engines.ray.wire import Place, boot
from meshrl.errors import ConfigError, MeshStopped

CALLS_AT_ONCE: Final = 10_000
"""Of one process. Streams and calls that wait for their turn count."""
GRACE: Final = 5.0
"""Seconds that a process has to end its calls when its mesh goes. One that computes without a pause is killed then."""


@dataclass(frozen=True)
class RaySlot:
    """A place for one rank: a process, or the next one there if it dies."""

    reservation: "Reservation"
    index: int
    threads: int

    @property
    def process(self) -> Process:
        """The process that is there now."""
        return self.reservation.processes[self.index]


class Reservation:
    """What one mesh holds of the cluster."""

    def __init__(self, count: int, asked: Amounts, threads: int, placement: str, caller: RayCaller) -> None:
        """`asked`: what each rank reserves; `placement`: pack or spread."""
        self.asked = asked
        self.members: list[RayMember] = []
        self.environments: Sequence[Mapping[str, str]] = []
        self.slots = [RaySlot(self, index, threads) for index in range(count)]
        self.restarting = asyncio.Lock()
        self.meeting = asyncio.Lock()
        """Held while an actor is made: its ranks may wait for each other."""
        self.released = False
        self._keeps = caller.inline_bytes, caller.shares_memory
        self._group: PlacementGroup = placement_group([dict(asked)] * count, strategy=placement.upper())
        self.processes = [self._begin(slot) for slot in self.slots]

    @property
    def cpus(self) -> float:
        """Cores that are reserved in all."""
        return self.asked.get("CPU", 0) * len(self.slots)

    async def settle(self, cluster: Cluster) -> None:
        """Wait until every process runs, and make the environment of the ranks anew. Says what it waits for."""

        async def say() -> None:
            missing = sum(process.known is None for process in self.processes)
            free = written(await cluster.free())
            asks = written(self.asked)
            log.info("waiting for ranks to start", missing=missing, of=len(self.slots), each_asks=asks, free=free)

        # All are asked anew: each names a port that is free now.
        places = await patiently(self._places(), say)
        self.environments = environments(places, self.slots[0].threads)

    async def _places(self) -> list[Place]:
        return await asyncio.gather(*(_place(process, lambda: self.released) for process in self.processes))

    @property
    def has_died(self) -> bool:
        """Whether a process is gone."""
        return any(process.death for process in self.processes)

    def revive(self) -> None:
        """Begin a new process where one has died."""
        for slot in self.slots:
            if slot.process.death is not None:
                _kill(slot.process)  # perhaps it was only out of reach; its place must be free
                self.processes[slot.index] = self._begin(slot)

    async def end(self, members: Sequence[RayMember], *, failed: bool = False) -> None:
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
            stops[stop].process.killed("it did not answer after another rank had failed or died")
            _kill(stops[stop].process)

    def forget(self, members: Sequence[RayMember]) -> None:
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
            leaves = [process.handle.leave.remote() for process in self.processes if process.death is None]
            await asyncio.wait_for(asyncio.gather(*leaves, return_exceptions=True), GRACE)
        except TimeoutError:
            pass  # one that computes without a pause: what it leaves is swept by the next process that shares memory
        finally:
            for stop in stops:
                stop.cancel()
            for process in self.processes:
                _kill(process)
            remove_placement_group(self._group)

    def _begin(self, slot: RaySlot) -> Process:
        """Ask Ray for a process. It comes when its resources are free."""
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=slot.index)
        custom = {name: amount for name, amount in self.asked.items() if name not in ("CPU", "GPU", "memory")}
        actor = _rank_process().options(
            num_cpus=self.asked.get("CPU", 0),
            num_gpus=self.asked.get("GPU", 0),
            memory=self.asked.get("memory"),
            resources=custom,
            scheduling_strategy=strategy,
            max_concurrency=CALLS_AT_ONCE,
            enable_task_events=False,  # one thing less to do for every call
        )
        handle = cast("RankHandle", actor.remote(str(Path.cwd()), sys.path, *self._keeps))
        return Process(token_hex(8), handle)


def _kill(process: Process) -> None:
    ray.kill(cast("ActorHandle[RankProcess]", process.handle), no_restart=True)


async def _place(process: Process, released: Callable[[], bool]) -> Place:
    try:
        place = cast("Place", await process.handle.place.remote())
        if place.boot != boot():
            process.ahead = await clock_ahead(lambda: cast("Awaitable[float]", process.handle.clock.remote()))
        process.known = place
    except RayError as error:
        if released():
            raise MeshStopped("the mesh was stopped while its ranks were started") from None
        raise ConfigError(
            f"a rank's process did not start on the cluster: {process.died(error).reason}; if it happens again, see "
            "that each node has the same Python, Ray and meshrl"
        ) from error
    return place


@cache
def _rank_process() -> ActorClass[RankProcess]:
    return ray.remote(RankProcess)


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
