"""Calls of `generate` on a rank: they take turns, step by step, and loads and aborts come between steps."""

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager

import numpy as np

from meshrl.data import Batch
from meshrl.errors import DataError
from meshrl.mesh import current_rank


class GenerateCall:
    """One call of `generate`, while it decodes."""

    def __init__(self, calls: "GenerateCalls", number: int) -> None:
        self._calls = calls
        self.number = number
        """Number of earlier calls on this rank. Below 0 for a call outside training, which no record contains."""
        self.turn = -1
        """Number of calls that began between the last load of weights and this one. -1 before it begins.

        Together with the version it determines random numbers. They stay the same in a run that resumes from a
        checkpoint, where calls are counted again. Calls outside training count separately: -1, -2, ...
        """
        self.steps: int = -1
        """Number of its decode steps. -1 before it begins."""
        self.aborted = False

    async def step(self) -> bool:
        """Let other tasks run, which may load weights. Returns True to make one more step, which is counted.

        False if the call was aborted. Unfinished rows are then yielded as they are.
        """
        await asyncio.sleep(0)
        await self._calls.until(self.may_go_on)
        if self.aborted:
            return False
        self.count()
        return True

    def count(self) -> None:
        """Count a step. For a sampler that steps several calls at once, between two awaits."""
        self.steps += 1
        self._calls.stepped(self)

    def end(self) -> None:
        """End the steps before the block ends. For a call that still has something to yield."""
        self._calls.end(self)

    def may_go_on(self) -> bool:
        """True unless a load or abort must come before the next step, or before the first one."""
        return self.aborted or self.number < 0 or not self._calls.holds(self)


class GenerateCalls:
    """The calls on a rank, and the number of loads and aborts that interrupted them.

    With the places of an earlier run's interruptions (`replay`), each comes there again: a call waits for it at its
    place, and it waits until the calls have reached theirs.
    """

    def __init__(self) -> None:
        self._arrived = 0
        self._begun = 0
        self._begun_at_load = 0
        """Number of calls that had begun at the last load."""
        self._running: dict[int, GenerateCall] = {}
        self._beside = 0
        """Number of calls outside training that began since the last load."""
        self._interruptions = 0
        self._interrupting = asyncio.Lock()
        self._aborts: list[Batch] = []
        """The places of aborts that no load has returned yet."""
        self._record: list[dict[int, int]] = []
        """For each interruption, the steps that the running calls had made, and -1 for the next call."""
        self._ended: dict[int, int] = {}
        """In a replay, the steps of calls that have ended."""
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def begin(self, beside: bool = False) -> AsyncGenerator[GenerateCall]:
        """Run a call inside the block. The weights in the block are those that it begins with.

        `beside`: as in `Sampling.beside`. Other calls are numbered, replayed and aborted as if this one did not exist.
        """
        if beside:
            self._beside += 1
            call = GenerateCall(self, -self._beside)
            call.turn, call.steps = call.number, 0
            yield call
            return
        call = GenerateCall(self, self._arrived)
        self._arrived += 1
        self._running[call.number] = call
        try:
            await self.until(call.may_go_on)
            call.steps = 0
            call.turn = call.number - self._begun_at_load
            self._begun = max(self._begun, call.number + 1)
            self._tell()
            yield call
        finally:
            self._begun = max(self._begun, call.number + 1)  # even if it was cancelled before it began
            self.end(call)

    @asynccontextmanager
    async def loading(self) -> AsyncGenerator[Batch]:
        """Load weights inside the block, between two steps of each call. Yields the places for `Sampler.load`.

        DataError if a call ended before its place in a replayed record.
        """
        async with self._interruption() as places:
            yield Batch.concat([*self._aborts, places])
            self._aborts.clear()
            self._begun_at_load, self._beside = self._begun, 0

    async def abort(self) -> None:
        """Stop the running calls before their next step."""
        async with self._interruption() as places:
            self._aborts.append(places)
            for call in [each for each in self._running.values() if each.steps >= 0]:
                call.aborted = True
                del self._running[call.number]

    def replay(self, record: Batch) -> None:
        """Repeat loads and aborts at these places, which the loads of an earlier run returned, one after the other.

        DataError if a call or load has begun already, or a load is missing.
        """
        if self._arrived or self._interruptions:
            raise DataError(
                f"a record can only be replayed from the beginning: this sampler has had {self._arrived} calls of "
                f"`generate` and {self._interruptions} of `load` and `abort`; spawn a new one"
            )
        mine = record.select(record.row("rank") == current_rank().index)
        loads, calls, steps = (mine.row(name).tolist() for name in ("load", "call", "steps"))
        places: list[dict[int, int]] = [{} for _ in range(max(loads, default=-1) + 1)]
        for load, call, made in zip(loads, calls, steps, strict=True):
            places[load][call] = made
        lacking = [number for number, calls_of in enumerate(places) if not calls_of]
        if lacking:
            raise DataError(
                f"the record has no entry for load {lacking[0]} on rank {current_rank().index}: give all of it"
            )
        self._record = places

    @property
    def is_replayed(self) -> bool:
        """True if a load or abort of a record is still to come."""
        return self._interruptions < len(self._record)

    def holds(self, call: GenerateCall) -> bool:
        """True if the next interruption must come before the call's next step, or before its first one."""
        # Later interruptions have no earlier places, so only the next one matters.
        if self._interruptions >= len(self._record):
            return False
        return call.steps >= _place(self._record[self._interruptions], call.number)

    def stepped(self, call: GenerateCall) -> None:
        """Report to a waiting interruption that the call is at its place: after this step, at the next pause."""
        if call.number >= 0 and self.holds(call):
            self._tell()

    def end(self, call: GenerateCall) -> None:
        """End the steps of a call."""
        if call.number < 0:
            return
        self._running.pop(call.number, None)
        if self._interruptions < len(self._record):
            self._ended[call.number] = call.steps
        self._tell()

    async def until(self, ready: Callable[[], bool]) -> None:
        """Wait for a condition that only calls and interruptions of this rank change."""
        while not ready():
            await self._changed.wait()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def _interruption(self) -> AsyncGenerator[Batch]:
        async with self._interrupting:
            await self.until(self._in_place)
            yield self._places()
            self._interruptions += 1
            self._tell()

    def _in_place(self) -> bool:
        """True if each call is where the next interruption found it: at its step, ended, or not begun."""
        if self._interruptions >= len(self._record):
            return True
        places = self._record[self._interruptions]
        if self._begun < max(places):
            return False
        for number, steps in places.items():
            # A call after its last step may have ended by now, which makes no difference.
            if steps >= 0 and number not in self._running and self._ended.get(number) != steps:
                rank = current_rank().index
                raise DataError(
                    f"the record does not fit this run: load {self._interruptions} on rank {rank} came when call "
                    f"{number} of `generate` had made {steps} steps, but now that call ended earlier: replay a record "
                    "with the configuration, the seeds and the code that it was made with"
                )
        return all(call.steps in (-1, _place(places, number)) for number, call in self._running.items())

    def _places(self) -> Batch:
        steps = {number: call.steps for number, call in self._running.items() if call.steps >= 0} | {self._begun: -1}
        return places_of(steps, self._interruptions)


def places_of(steps: Mapping[int, int], load: int, **found: float) -> Batch:
    """Make the result of `load`: the steps of each call. Measurements of the load are added as columns."""
    return Batch.of(
        rank=np.full(len(steps), current_rank().index),
        load=np.full(len(steps), load),
        call=np.array(list(steps), np.int64),
        steps=np.array(list(steps.values()), np.int64),
        **{name: np.full(len(steps), value) for name, value in found.items()},
    )


def _place(places: dict[int, int], call: int) -> float:
    """Return the steps that a call had made at an interruption: -1 before its start, infinite after its end."""
    return places.get(call, -1 if call > max(places) else math.inf)
