"""Jobs that stream rollouts from samplers whose hosts come and go."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator

import numpy as np

from meshrl import (
    Batch,
    CrossEntropy,
    Mesh,
    PolicyConfig,
    Resources,
    SamplerConfig,
    Sampling,
    publish,
    rollouts,
)
from meshrl.engines.ray import RayEngine
from meshrl.testing import FakePolicy, FakeSampler, Witness
from tests.cluster.jobs import say


class PlacedSampler(FakeSampler):
    """Takes its time, and says on which host."""

    async def generate(self, prompts: Batch, sampling: Sampling) -> AsyncIterator[Batch]:
        async for chunk in super().generate(prompts, sampling):
            await asyncio.sleep(0.02)
            yield chunk.assign(host=[socket.gethostname()] * len(chunk))


def prompts(size: int) -> Iterator[Batch]:
    for first in range(0, 10**6, size):
        yield Batch.of(prompt=["?"] * size, answer=["ab"] * size, groups=np.arange(first, first + size))


async def streamed(engine: RayEngine, *changes: str) -> object:
    """Train on what two samplers draw, of which one is enough, and say which hosts drew a batch where that changes.

    `changes`: the hosts that are to draw, one after the other, such as "node2 node3". How many batches that took.
    """
    say("ready")
    mesh = await Mesh.reserve(engine, 2, Resources(cpus=0, custom={"rollout": 1}, min_ranks=1))
    sampler = await mesh.spawn(PlacedSampler, SamplerConfig(model="none"))
    witness, seen = Witness(FakePolicy(PolicyConfig(model="none"))), 0
    await publish(witness, sampler)
    async with rollouts(sampler, witness.prompts(prompts(4)), Sampling(n=2), ahead=2) as stream:
        while seen < len(changes):
            batch = await (await anext(stream)).load()
            await witness.update(batch, CrossEntropy())
            await publish(witness, stream)
            if " ".join(sorted(set(map(str, batch.objects("host"))))) == changes[seen]:
                say(changes[seen])
                seen += 1
    witness.check(ahead=2, n=2, dropped=None)
    return len(witness.versions)
