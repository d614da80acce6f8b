"""Waits that log what they wait for."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Final, TypeVar

T = TypeVar("T")

FIRST_WORD: Final = 1.0
"""Seconds of waiting before the first log line."""
NEXT_WORD: Final = 10.0


async def patiently(work: Coroutine[object, None, T], wait: Callable[[], Awaitable[None]]) -> T:
    """Return the result of the work. `wait`, which logs what is missing, is called after a second, then every ten."""
    task = asyncio.create_task(work)
    pause = FIRST_WORD
    try:
        while not (await asyncio.wait([task], timeout=pause))[0]:
            await wait()
            pause = NEXT_WORD
        return await task
    finally:
        task.cancel()
