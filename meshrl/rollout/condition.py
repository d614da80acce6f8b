"""Wait for a condition, and log who waits for what."""

import asyncio
from collections.abc import Callable

from meshrl.events import waiting


class Condition:
    """Tasks of one loop that wait until something holds, and look again when they are told of a change."""

    def __init__(self) -> None:
        self._happened = asyncio.Event()
        self._error: BaseException | None = None

    def notify_all(self) -> None:
        """Let everybody who waits look again."""
        self._happened.set()
        self._happened.clear()

    def fail(self, error: BaseException) -> None:
        """Nobody shall wait any more: what they wait for may not come. The first failure counts."""
        self._error = self._error or error
        self.notify_all()

    async def wait_quietly_for(self, ready: Callable[[], bool]) -> None:
        """Wait until something holds, without a word: for what waits most of the time."""
        while not ready():
            if self._error is not None:
                raise self._error
            await self._happened.wait()

    async def wait_for(self, ready: Callable[[], bool], who: str, what: str, why: Callable[[], str]) -> None:
        """Wait until something holds: `who` waits for `what`, and `why` tells what that is blocked by.

        Raises the failure, if there is one and it does not hold.
        """
        if ready():
            return
        with waiting(who, what, why):
            await self.wait_quietly_for(ready)
