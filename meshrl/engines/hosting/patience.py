"""Waits that log what they wait for."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Final, TypeVar

T = TypeVar("T")

FIRST_WORD: Final = 1.0
"""Seconds until it is said what is being waited for."""
NEXT_WORD: Final = 10.0


async def patiently(work: Coroutine[object, None, T], wait: Callable[[], Awaitable[None]]) -> T:
    """The result of the work. `wait`, which says what is waited for, is called after a second, and then every ten."""
    task = asyncio.create_task(work)
    pause = FIRST_WORD
    try:
        while not (await asyncio.wait([task], timeout=pause))[0]:
            await wait()
            pause = NEXT_WORD
        return await task
    finally:
        task.cancel()
