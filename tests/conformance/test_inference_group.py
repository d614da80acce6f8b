"""The ranks of an engine tell each other their GPUs; no GPU and no engine is needed for it."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from meshrl import Actor, Mesh, current_rank, each, endpoint
from meshrl.mesh import Same
from meshrl_inference.group import gather_gpus

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.process, pytest.mark.xdist_group("warm")]


class Engines(Actor):
    """A rank that was given one GPU."""

    def __init__(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CUDA_VISIBLE_DEVICES", f"GPU-{current_rank().index}")
            self.gpus = gather_gpus(current_rank())

    @endpoint
    async def told(self) -> Same[list[str]]:
        return self.gpus


async def test_the_first_rank_along_tp_is_told_the_gpus_of_the_others(warm: Callable[[int], Awaitable[Mesh]]) -> None:
    for shape, expected in (
        ({"dp": 2, "tp": 2}, [["GPU-0", "GPU-1"], [], ["GPU-2", "GPU-3"], []]),
        ({"tp": 2, "dp": 2}, [["GPU-0", "GPU-2"], ["GPU-1", "GPU-3"], [], []]),
    ):
        mesh = (await warm(4)).shape(**shape)
        actors = await asyncio.gather(*(mesh.spawn(Engines) for _ in range(2)))
        for actor in actors:
            assert await each(actor.told)() == expected
