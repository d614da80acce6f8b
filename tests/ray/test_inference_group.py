"""The ranks of an engine tell each other their GPUs; no GPU and no engine is needed for it."""

import asyncio
import os

from meshrl import Actor, Mesh, Resources, Same, current_rank, each, endpoint
from meshrl.engines.ray import RayEngine
from meshrl_inference.group import gather_gpus

NO_CORE = Resources(cpus=0)


class Engines(Actor):
    """A rank that was given one GPU, as Ray shows it."""

    def __init__(self) -> None:
        os.environ["CUDA_VISIBLE_DEVICES"] = f"GPU-{current_rank().index}"
        self.gpus = gather_gpus(current_rank())

    @endpoint
    async def told(self) -> Same[list[str]]:
        return self.gpus


async def test_the_first_rank_along_tp_is_told_the_gpus_of_the_others(engine: RayEngine) -> None:
    mesh = await Mesh.reserve(engine, 4, NO_CORE)
    for shape, expected in (
        ({"dp": 2, "tp": 2}, [["GPU-0", "GPU-1"], [], ["GPU-2", "GPU-3"], []]),
        ({"tp": 2, "dp": 2}, [["GPU-0", "GPU-2"], ["GPU-1", "GPU-3"], [], []]),
    ):
        actors = await asyncio.gather(*(mesh.shape(**shape).spawn(Engines) for _ in range(2)))
        for actor in actors:
            assert await each(actor.told)() == expected
