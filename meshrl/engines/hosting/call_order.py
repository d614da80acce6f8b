"""Order of calls on a rank: calls start in the order they were made, and streams yield a value on request."""

import asyncio
from typing import Final

from meshrl.engines.hosting.messages import Over

CYCLE: Final = 256
"""Consecutive numbers differ modulo this. A channel may send only the remainder."""


class Outbox:
    """Values of one stream. Each answers one question."""

    def __init__(self) -> None:
        self._asked = asyncio.Event()
        self._answer: asyncio.Future[object] | None = None

    async def take(self) -> object:
        """Return the next value, or `Over`."""
        self._answer = asyncio.get_running_loop().create_future()
        self._asked.set()
        return await self._answer

    async def give(self, value: object) -> None:
        """Wait for the question, and answer it."""
        await self._asked.wait()
        self._asked.clear()
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(value)
        # The answer leaves the loop in two steps. A generator that computes next would delay it.
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    def close(self) -> None:
        """End the stream of values."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(Over())


class CallerQueue:
    """The calls of one caller."""

    def __init__(self) -> None:
        self._next = 0
        """The number that may start next."""
        self._ahead: set[int] = set()
        """Higher numbers that need no turn any more."""
        self._dropped: set[int] = set()
        """Numbers that were cancelled before they arrived."""
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._running: dict[int, asyncio.Task[object]] = {}
        self._outboxes: dict[int, Outbox] = {}

    def whole(self, number: int) -> int:
        """Return the number of an arriving call, known modulo `CYCLE`: a dropped call, or one that starts soon."""
        dropped = (each for each in self._dropped if each % CYCLE == number)
        return next(dropped, self._next + (number - self._next) % CYCLE)

    def arrive(self, number: int, task: asyncio.Task[object]) -> bool:
        """Keep a call's task. Returns False if the call was cancelled before it arrived."""
        if number in self._dropped:
            self._dropped.discard(number)
            return False
        self._running[number] = task
        return True

    async def turn(self, number: int) -> None:
        """Wait until all earlier calls have started."""
        if number != self._next:
            waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
            await waiting

    def start(self, number: int) -> None:
        """Give the next call its turn."""
        if number < self._next:
            return
        self._waiting.pop(number, None)
        self._ahead.add(number)
        while self._next in self._ahead:
            self._ahead.discard(self._next)
            self._next += 1
        waiting = self._waiting.get(self._next)
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    def leave(self, number: int) -> None:
        """Note that a call has ended, perhaps without its turn."""
        self._running.pop(number, None)
        self.start(number)

    def cancel(self, number: int) -> None:
        """Cancel a call that runs or waits. A call that has not arrived will not start."""
        task = self._running.get(number)
        if task is not None:
            task.cancel()
        elif not self._has_ended(number):
            self._dropped.add(number)
            self.start(number)
            self.close(number)

    def outbox(self, number: int) -> Outbox | None:
        """Return the values of a stream, even before it arrives. None if it has ended."""
        if number not in self._outboxes and number not in self._running and self._has_ended(number):
            return None
        return self._outboxes.setdefault(number, Outbox())

    def close(self, number: int) -> None:
        """Note that a stream has ended."""
        outbox = self._outboxes.pop(number, None)
        if outbox is not None:
            outbox.close()

    def _has_ended(self, number: int) -> bool:
        return number < self._next or number in self._ahead
