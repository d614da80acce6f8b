"""Jobs that send weights from host to host."""

import asyncio

from meshrl import Mesh, Same, Weights, endpoint
from meshrl.engines.ray import RayEngine
from meshrl.errors import MeshrlError
from tests.cluster.jobs import MIB, Traveller, on, say


class Taker(Traveller):
    """Says how weights came."""

    @endpoint
    async def way(self, weights: Weights) -> Same[str]:
        assert not any(bucket.damaged() for bucket in weights.buckets)
        return ", ".join(weights.ways)


async def made(engine: RayEngine, host: str, ranks: int = 1) -> Taker:
    return await (await Mesh.reserve(engine, ranks, on(host))).spawn(Taker)


async def told(taker: Taker, weights: Weights) -> str:
    """How they came, or the error."""
    try:
        return await taker.way(weights)
    except MeshrlError as error:
        return f"{type(error).__name__}: {error}"


async def ways(engine: RayEngine, maker: str, takers: list[str], mib: int, rounds: int) -> object:
    """How weights come to two ranks of each of some hosts, of which all but the first round are told as they begin."""
    source = await made(engine, maker)
    taken = [await made(engine, host, 2) for host in takers]
    answers: list[object] = []
    for number in range(rounds):
        weights = await source.weights(mib * MIB // 4)
        if number:
            say("ready")
        answers.append(await asyncio.gather(*(told(each, weights) for each in taken)))
    return answers
