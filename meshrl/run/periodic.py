"""Measurements at regular steps while the run trains: one at a time, and no step waits for them."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Never

from meshrl import log
from meshrl.errors import MeshrlError, described
from meshrl.events import waiting

Numbers = Mapping[str, float]


@dataclass(frozen=True)
class Measurement:
    """What is measured, and when."""

    every: int
    """Steps: it is due before the first, after so many, and so on."""
    measure: Callable[[], Coroutine[Never, Never, Numbers]]
    wait: bool = False
    """Steps wait for it."""
    prepare: Callable[[], Awaitable[object]] | None = None
    """What is to be done between the two steps, before it begins."""


class BackgroundMeasurements:
    """Begins a measurement where one is due, between two steps, and hands what it found to `record`.

    If the last one still runs when the next is due, the steps wait for it: none is left out, and when they begin does
    not hang on how long they take.
    """

    def __init__(self, record: Callable[[int, Numbers], None]) -> None:
        """`record`: given the steps that had been made when it began, and the numbers."""
        self._record = record
        self._of: Measurement | None = None
        self._begun = -1
        """After how many steps the last one began."""
        self._task: asyncio.Task[None] | None = None

    def add(self, of: Measurement) -> None:
        """Measure this from now on, in the place of what was measured before."""
        self._of = of

    def __bool__(self) -> bool:
        return self._of is not None

    @property
    def prepared_every(self) -> int | None:
        """The steps between two measurements that something is done for; None where nothing is."""
        return self._of.every if self._of and self._of.prepare else None

    async def turn(self, done: int) -> None:
        """Between two steps, of which so many are done: begin what is due. Raises what the last one raised."""
        if self._task and self._task.done():
            await self.settle()
        of = self._of
        if of is None or done % of.every or done == self._begun:
            return
        await self.settle()
        if of.prepare:
            await of.prepare()
        self._begun = done
        self._task = asyncio.create_task(self._run(of, done))
        if of.wait:
            await self.settle()

    async def wait(self) -> None:
        """Wait until none is under way. What the last one raised, the next `turn` or `settle` does."""
        if self._task is None:
            return
        with waiting("trainer", "the evaluation", lambda: f"{self._what} is still under way"):
            await asyncio.wait([self._task])

    async def settle(self) -> None:
        """Wait until none is under way. MeshrlError where the last one failed."""
        if self._task is None:
            return
        await self.wait()
        task, what = self._task, self._what
        self._task = None
        if task.cancelled():
            raise MeshrlError(f"{what} was cancelled, and has no numbers")
        error = task.exception()
        if isinstance(error, Exception):
            raise MeshrlError(f"{what} failed: {described(error)}") from error
        if error is not None:
            raise error

    async def close(self) -> None:
        """End what is under way: the run ends by an error before it did."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.wait([self._task])
        if not self._task.cancelled() and (failure := self._task.exception()):
            log.warning(f"{self._what} failed: {type(failure).__name__}: {failure}")

    @property
    def _what(self) -> str:
        return f"the evaluation after {self._begun} steps"

    async def _run(self, of: Measurement, done: int) -> None:
        self._record(done, await of.measure())
