"""Wait until the remaining machines have room for a mesh again after one has failed."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from meshrl import log
from meshrl.errors import NoRoom
from meshrl.mesh import Mesh

_PAUSE: Final = 2.0
"""Seconds between two checks for room."""
_WORD: Final = 60.0
"""Seconds between two log lines about the wait."""


async def with_room(reserve: Callable[[], Awaitable[Mesh]], name: str, seconds: float) -> Mesh:
    """Reserve a mesh, and wait up to `seconds` for room. Raises NoRoom, which says what is missing, after that."""
    if not seconds:
        return await reserve()
    loop = asyncio.get_running_loop()
    end, said, missing = loop.time() + seconds, -_WORD, ""
    try:
        async with asyncio.timeout_at(end):
            while True:
                try:
                    return await reserve()
                except NoRoom as error:
                    missing = str(error)
                if loop.time() - said >= _WORD:
                    said = loop.time()
                    log.warning(
                        f"a machine failed, and the others have no room for the mesh {name!r}: waiting "
                        f"{end - said:.0f} s more (run.restart_wait)",
                        missing=missing,
                    )
                await asyncio.sleep(_PAUSE)
    except TimeoutError:
        raise NoRoom(
            f"a machine failed, and the mesh {name!r} found no room in the {seconds:g} s of run.restart_wait: "
            f"{missing or 'what it asks for is taken'}. Restore the machine and resume with run.resume = true, or "
            "wait longer"
        ) from None
