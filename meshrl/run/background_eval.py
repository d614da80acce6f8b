"""Evaluations at regular steps while the run trains: one at a time, and in the background."""

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
    measure: Callable[[int], Coroutine[Never, Never, Numbers]]
    """Gets the number of steps done."""
    wait: bool = False
    """Let the steps wait for it."""
    prepare: Callable[[], Awaitable[object]] | None = None
    """Prepares the measurement between two steps, before it begins."""


class BackgroundEvaluations:
    """Begins measurements that are due between two steps, and passes their results to `record`.

    If a measurement still runs when the next is due, the steps wait for it. No measurement is skipped, and their start
    does not depend on how long they take.
    """

    def __init__(self, record: Callable[[int, Numbers], None]) -> None:
        """`record` gets the number of steps done when a measurement began, and its results."""
        self._record = record
        self.measurement: Measurement | None = None
        self._begun = -1
        """Number of steps done when the last measurement began."""
        self._task: asyncio.Task[None] | None = None

    @property
    def prepared_every(self) -> int | None:
        """Steps between two measurements that need preparation. None if none does."""
        return self.measurement.every if self.measurement and self.measurement.prepare else None

    async def turn(self, done: int) -> None:
        """Between two steps, begin a measurement if it is due. Raises the error of the last one."""
        if self._task and self._task.done():
            await self.settle()
        measurement = self.measurement
        if measurement is None or done % measurement.every or done == self._begun:
            return
        await self.settle()
        if measurement.prepare:
            await measurement.prepare()
        self._begun = done
        self._task = asyncio.create_task(self._run(measurement, done))
        if measurement.wait:
            await self.settle()

    async def wait(self) -> None:
        """Wait until no measurement runs. Its error is raised by the next `turn` or `settle`."""
        if self._task is not None:
            with waiting("trainer", "the evaluation", lambda: f"{self._name} is still under way"):
                await asyncio.wait([self._task])

    async def settle(self) -> None:
        """Wait until no measurement runs. Raises MeshrlError if it failed."""
        await self.wait()
        task, self._task = self._task, None
        if task is None:
            return
        if task.cancelled():
            raise MeshrlError(f"{self._name} was cancelled, and has no numbers")
        error = task.exception()
        if isinstance(error, Exception):
            raise MeshrlError(f"{self._name} failed: {described(error)}") from error
        if error is not None:
            raise error

    async def close(self) -> None:
        """Cancel the running measurement, because the run has failed."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.wait([self._task])
        if not self._task.cancelled() and (failure := self._task.exception()):
            log.warning(f"{self._name} failed: {type(failure).__name__}: {failure}")

    @property
    def _name(self) -> str:
        return f"the evaluation after {self._begun} steps"

    async def _run(self, measurement: Measurement, done: int) -> None:
        self._record(done, await measurement.measure(done))
