"""Measurements at regular steps while the run trains: one at a time, and in the background."""

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
    """What to measure, and when."""

    every: int
    """Steps between two measurements. The first is before the first step."""
    measure: Callable[[], Coroutine[Never, Never, Numbers]]
    wait: bool = False
    """Let the steps wait for it."""
    prepare: Callable[[], Awaitable[object]] | None = None
    """Prepares the measurement between two steps, before it begins."""


class BackgroundMeasurements:
    """Begins measurements that are due between two steps, and passes their results to `record`.

    If a measurement still runs when the next is due, the steps wait for it. No measurement is skipped, and their start
    does not depend on how long they take.
    """

    def __init__(self, record: Callable[[int, Numbers], None]) -> None:
        """`record` gets the number of steps done when a measurement began, and its results."""
        self._record = record
        self._of: Measurement | None = None
        self._begun = -1
        """Number of steps done when the last measurement began."""
        self._task: asyncio.Task[None] | None = None

    def add(self, of: Measurement) -> None:
        """Replace the present measurement by this one."""
        self._of = of

    def __bool__(self) -> bool:
        return self._of is not None

    @property
    def prepared_every(self) -> int | None:
        """Steps between two measurements that need preparation. None if none does."""
        return self._of.every if self._of and self._of.prepare else None

    async def turn(self, done: int) -> None:
        """Between two steps, begin a measurement if it is due. Raises the error of the last one."""
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
        """Wait until no measurement runs. Its error is raised by the next `turn` or `settle`."""
        if self._task is None:
            return
        with waiting("trainer", "the evaluation", lambda: f"{self._what} is still under way"):
            await asyncio.wait([self._task])

    async def settle(self) -> None:
        """Wait until no measurement runs. Raises MeshrlError if it failed."""
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
        """Cancel the running measurement, because the run has failed."""
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
