"""Calls of `generate` on a rank: they take turns, step by step, and loads and aborts come between steps."""

import asyncio
import math
from abc import ABC
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from meshrl.data import BASE, Batch, Ragged, Source
from meshrl.errors import DataError
from meshrl.mesh import current_rank
from meshrl.roles.base import Sampler
from meshrl.roles.config import Sampling


class GenerateCall:
    """One call of `generate`, while it decodes."""

    def __init__(self, calls: "GenerateCalls", number: int) -> None:
        self._calls = calls
        self.number = number
        """Number of earlier calls on this rank. Negative for a call outside training, which no record contains."""
        self._first: Mapping[str, int] | None = None
        """By adapter, the number of the first call after its last load. None before this call begins."""
        self.steps: int = -1
        """Number of its decode steps. -1 before it begins."""
        self.aborted = False

    @property
    def turn(self) -> int:
        """Number of calls that began between the last load of whole weights and this one. -1 before it begins.

        With the version it determines random numbers, so they are the same in a run that resumes from a checkpoint.
        Calls outside training count separately: -1, -2, ...
        """
        return self.turn_of(BASE)

    def turn_of(self, adapter: str) -> int:
        """Return the number of calls since the last load of an adapter's weights, as `turn`, for rows that name it.

        Loads of others do not count, because the adapter's version stays and its random numbers would come again.
        """
        return -1 if self._first is None else self.number - self._first.get(adapter, 0)

    def begin(self, first: Mapping[str, int]) -> None:
        """Begin, with the number of the first call after the last load of each adapter."""
        self.steps, self._first = 0, dict(first)

    async def step(self) -> bool:
        """Let other tasks run, such as a load of weights, and count one more step.

        Returns False if the call was aborted. Unfinished rows are then yielded as they are.
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
        if self.number >= 0 and self._calls.holds(self):
            self._calls.notify()  # an interruption may have waited for this step

    def end(self) -> None:
        """End the call's steps before its block ends, if it still has rows to yield."""
        self._calls.end(self)

    def may_go_on(self) -> bool:
        """True unless a load or abort must come before the next step, or before the first one."""
        return self.aborted or self.number < 0 or not self._calls.holds(self)


class GenerateCalls:
    """The calls on a rank, and the number of loads and aborts that interrupted them.

    `replay` repeats the interruptions of an earlier run at their places: calls wait there for the interruption, and it
    waits until all calls have reached their places.
    """

    def __init__(self) -> None:
        self._arrived = 0
        self._begun = 0
        self._first: dict[str, int] = {}
        """By adapter, the number of the first call after its last load. `BASE`: after that of whole weights."""
        self._first_beside: dict[str, int] = {}
        """The same for calls outside training, whose numbers fall from -1, plus 1."""
        self._running: dict[int, GenerateCall] = {}
        self._beside = 0
        """Number of calls outside training that began."""
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
        """Run a call inside the block, which begins with the current weights.

        `beside`: as in `Sampling.beside`. Other calls are numbered, replayed and aborted as if this one did not exist.
        """
        if beside:
            self._beside += 1
            call = GenerateCall(self, -self._beside)
            call.begin(self._first_beside)
            yield call
            return
        call = GenerateCall(self, self._arrived)
        self._arrived += 1
        self._running[call.number] = call
        try:
            await self.until(call.may_go_on)
            call.begin(self._first)
            self._begun = max(self._begun, call.number + 1)
            self.notify()
            yield call
        finally:
            self._begun = max(self._begun, call.number + 1)  # even if it was cancelled before it began
            self.end(call)

    @asynccontextmanager
    async def loading(self, adapter: str = BASE) -> AsyncGenerator[Batch]:
        """Load weights inside the block, between two steps of each call. Yields the places for `Sampler.load`.

        `adapter`: the one that they are of, if they are not whole. DataError if a call ended before its place in a
        replayed record.
        """
        async with self._interruption() as places:
            yield Batch.concat([*self._aborts, places])
            self._aborts.clear()
            self._first[adapter], self._first_beside[adapter] = self._begun, -self._beside

    async def abort(self) -> None:
        """Stop the running calls before their next step."""
        async with self._interruption() as places:
            self._aborts.append(places)
            for call in [each for each in self._running.values() if each.steps >= 0]:
                call.aborted = True
                del self._running[call.number]

    def replay(self, record: Batch) -> None:
        """Repeat loads and aborts at these places: the results of an earlier run's loads, in order.

        DataError if a call or load has begun already, or a load is missing.
        """
        if self._arrived or self._interruptions:
            raise DataError(
                f"a record can only be replayed from the beginning: this sampler has had {self._arrived} calls of "
                f"`generate` and {self._interruptions} of `load` and `abort`; spawn a new one"
            )
        rank = current_rank().index
        own = record.select(record.row("rank") == rank)
        entries = list(zip(*(own.row(name).tolist() for name in ("load", "call", "steps")), strict=True))
        places: list[dict[int, int]] = [{} for _ in range(max((load for load, _, _ in entries), default=-1) + 1)]
        for load, call, steps in entries:
            places[load][call] = steps
        if {} in places:
            raise DataError(f"the record has no entry for load {places.index({})} on rank {rank}: give all of it")
        self._record = places

    @property
    def is_replayed(self) -> bool:
        """True if a load or abort of a record is still to come."""
        return self._interruptions < len(self._record)

    def holds(self, call: GenerateCall) -> bool:
        """True if the next interruption must come before the call's next step, or before its first one."""
        # Later interruptions have no earlier places, so only the next one matters.
        return self.is_replayed and call.steps >= _place(self._record[self._interruptions], call.number)

    def end(self, call: GenerateCall) -> None:
        """End the steps of a call."""
        if call.number < 0:
            return
        self._running.pop(call.number, None)
        if self.is_replayed:
            self._ended[call.number] = call.steps
        self.notify()

    async def until(self, ready: Callable[[], bool]) -> None:
        """Wait for a condition that only this rank's calls and interruptions change."""
        while not ready():
            await self._changed.wait()

    def notify(self) -> None:
        """Make all that wait check again."""
        self._changed.set()
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def _interruption(self) -> AsyncGenerator[Batch]:
        async with self._interrupting:
            await self.until(self._in_place)
            steps = {number: call.steps for number, call in self._running.items() if call.steps >= 0}
            yield places_of({**steps, self._begun: -1}, self._interruptions)
            self._interruptions += 1
            self.notify()

    def _in_place(self) -> bool:
        """True if each call is at its place for the next interruption: at its step, ended, or not begun."""
        if not self.is_replayed:
            return True
        places = self._record[self._interruptions]
        if self._begun < max(places):
            return False
        for number, steps in places.items():
            # A call after its last step may have ended by now, which makes no difference.
            if steps >= 0 and number not in self._running and self._ended.get(number) != steps:
                raise DataError(
                    f"the record does not fit this run: load {self._interruptions} on rank {current_rank().index} came "
                    f"when call {number} of `generate` had made {steps} steps, but now that call ended earlier: replay "
                    "a record with the configuration, the seeds and the code that it was made with"
                )
        return all(call.steps in (-1, _place(places, number)) for number, call in self._running.items())


def places_of(steps: Mapping[int, int], load: int, **measured: float) -> Batch:
    """Make the result of `load`: the steps of each call. Measurements of the load are added as columns."""
    return Batch.of(
        rank=np.full(len(steps), current_rank().index),
        load=np.full(len(steps), load),
        call=np.array(list(steps), np.int64),
        steps=np.array(list(steps.values()), np.int64),
        **{name: np.full(len(steps), value) for name, value in measured.items()},
    )


def _place(places: dict[int, int], call: int) -> float:
    """Return the steps that a call had made at an interruption: -1 before its start, infinite after its end."""
    return places.get(call, -1 if call > max(places) else math.inf)


class SteppingSampler(Sampler, ABC):
    """A sampler that decodes on its own rank, step by step.

    A backend adds `generate` and `load`. The first makes its steps in a block, and the second takes weights in one:

        async with self.generate_calls.begin(sampling.beside) as call:
            while rows_are_left and await call.step():
                ...  # one decode step, without a pause

        async with self.generate_calls.loading() as places:
            ...  # take the weights, without a pause
        return places
    """

    @cached_property
    def generate_calls(self) -> GenerateCalls:
        """The calls of `generate` on this rank, and the places where loads and aborts interrupted them."""
        return GenerateCalls()

    async def replay(self, record: Batch) -> None:
        """Repeat loads and aborts at their places in the record."""
        self.generate_calls.replay(record)

    async def abort(self) -> None:
        """Stop the running calls before their next step."""
        await self.generate_calls.abort()


@dataclass(frozen=True)
class Completion:
    """What a sampler drew for a row."""

    text: str
    """The completion."""
    prompt: Sequence[int]
    """The tokens that were given."""
    tokens: Sequence[int] = ()
    """The tokens that were drawn."""
    logprobs: Sequence[float] = ()
    """The log-prob of each token that was drawn."""
    truncated: bool = False
    """True if it was cut off by `max_tokens`."""
    aborted: bool = False
    """True if an abort ended it before it was finished."""


def completed(rows: Batch, drawn: Iterable[Completion], version: int, sampling: Sampling) -> Batch:
    """Add the columns of `Sampler.generate` to rows that were drawn with the weights of one version."""
    drawn = list(drawn)
    with_starts = [(row, len(row.prompt)) for row in drawn]
    return rows.assign(
        completion=[row.text for row in drawn],
        tokens=Ragged.of([[*row.prompt, *row.tokens] for row in drawn], np.int32),
        loss_mask=Ragged.of([[False] * start + [True] * len(row.tokens) for row, start in with_starts], np.bool_),
        sampler_logprobs=Ragged.of(
            [[0.0] * start + [*row.logprobs] for row, start in with_starts], np.float32, source=Source("sampler")
        ),
        versions=Ragged.of([[-1] * start + [version] * len(row.tokens) for row, start in with_starts], np.int32),
        oldest_version=np.full(len(rows), version, np.int32),
        temperature=np.full(len(rows), sampling.temperature or 1.0, np.float32),
        truncated=np.array([row.truncated for row in drawn], np.bool_),
        aborted=np.array([row.aborted for row in drawn], np.bool_),
    )
