"""Start meshrl up to its first answer: an engine, two ranks, one call. Timed by bench/calls.py, like ray_start.py.

    python bench/peers/meshrl_start.py ENGINE

This is a separate script, because a benchmark imports more than a run does.
"""

import asyncio
import sys

from meshrl import Actor, Mesh, Resources, endpoint
from meshrl.engines import make_engine


class Idle(Actor):
    """Does nothing."""

    @endpoint
    async def nothing(self) -> None:
        """No argument, no result."""


async def first_answer(name: str) -> None:
    """Start two ranks and call them."""
    engine = make_engine(name)
    mesh = await Mesh.reserve(engine, 2, Resources(cpus=1))
    idle = await mesh.spawn(Idle)
    await idle.nothing()
    print('{"answered": true}', flush=True)
    await engine.close()


if __name__ == "__main__":
    asyncio.run(first_answer(sys.argv[1]))
