import asyncio

import pytest

from meshrl import Actor, Mesh, Resources, endpoint
from meshrl.engines.ray import RayEngine
from meshrl.mesh import Same


class Keeper(Actor):
    def __init__(self) -> None:
        self.numbers: list[int] = []

    @endpoint
    async def note(self, number: int) -> Same[list[int]]:
        self.numbers.append(number)
        return self.numbers[-1:]


@pytest.mark.process
@pytest.mark.usefixtures("ray_cluster")
async def test_calls_keep_their_order_however_many_there_were() -> None:
    """Ray keeps kilobytes for each name of a call, so names come again; a few calls are cancelled before they begin."""
    engine = RayEngine()
    mesh = await Mesh.reserve(engine, 2, Resources(cpus=0))
    keeper = await mesh.spawn(Keeper)
    for first in range(0, 600, 100):
        calls = [asyncio.create_task(keeper.note(number)) for number in range(first, first + 100)]
        await asyncio.sleep(0)  # they are on their way
        calls[50].cancel()
        told = await asyncio.gather(*calls, return_exceptions=True)
        assert [each for each in told if isinstance(each, list)] == [
            [number] for number in range(first, first + 100) if number != first + 50
        ]
    await engine.close()
