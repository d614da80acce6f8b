"""A thread that writes files while the model may be trained."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait


class Writing:
    """Runs one piece of work at a time, in its own thread."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "meshrl-writing")
        self._last: Future[None] | None = None

    def begin(self, work: Callable[[], None]) -> None:
        """Start work after the end of the previous one, whose error is dropped."""
        self.settle()
        self._last = self._thread.submit(work)

    def settle(self) -> None:
        """Wait, in this thread, for the end of the previous work, and drop its error."""
        if self._last is not None:
            wait([self._last])
            self._last = None

    async def written(self) -> None:
        """Wait for the end of the last work. Raises its error."""
        if self._last is not None:
            await asyncio.wrap_future(self._last)
