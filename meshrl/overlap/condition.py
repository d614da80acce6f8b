"""Wait for a condition, and log which task waits for what."""

import asyncio
from collections.abc import Callable

from meshrl.events import waiting


class Condition:
    """Tasks of one loop that wait for conditions, and check them again after each change."""

    def __init__(self) -> None:
        self._happened = asyncio.Event()
        self._error: BaseException | None = None

    def notify_all(self) -> None:
        """Make all waiting tasks check again."""
        self._happened.set()
        self._happened.clear()

    def fail(self, error: BaseException) -> None:
        """Fail all waiting tasks, whose conditions may never hold. The first failure counts."""
        self._error = self._error or error
        self.notify_all()

    async def wait_quietly_for(self, ready: Callable[[], bool]) -> None:
        """Wait until a condition holds, without logging. For tasks that mostly wait."""
        while not ready():
            if self._error is not None:
                raise self._error
            await self._happened.wait()

    async def wait_for(self, ready: Callable[[], bool], who: str, what: str, why: Callable[[], str]) -> None:
        """Wait until a condition holds. For the log, `who` waits for `what`, and `why` says what blocks it.

        Raises the failure, if there is one and the condition does not hold.
        """
        if ready():
            return
        with waiting(who, what, why):
            await self.wait_quietly_for(ready)
