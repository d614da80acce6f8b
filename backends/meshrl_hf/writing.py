"""A thread that writes files while the model may be trained on."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait


class Writing:
    """One piece of work at a time, in a thread of its own."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "meshrl-writing")
        self._last: Future[None] | None = None

    def begin(self, work: Callable[[], None]) -> None:
        """Begin it, after what was begun before; how that ended is told by `written` alone."""
        self.settle()
        self._last = self._thread.submit(work)

    def settle(self) -> None:
        """Wait, in this thread, for the end of what was begun before, and forget how it ended."""
        if self._last is not None:
            wait([self._last])
            self._last = None

    async def written(self) -> None:
        """Wait for the end of what was begun last. Raises what it raised."""
        if self._last is not None:
            await asyncio.wrap_future(self._last)
