"""Jobs that stream rollouts from samplers whose hosts come and go."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator

import numpy as np

import meshrl as rl
from meshrl.engines.ray import RayEngine
from meshrl.testing import FakePolicy, FakeSampler, Witness
from tests.cluster.jobs import say


class PlacedSampler(FakeSampler):
    async def generate(self, prompts: rl.Batch, sampling: rl.Sampling) -> AsyncIterator[rl.Batch]:
        async for chunk in super().generate(prompts, sampling):
            await asyncio.sleep(0.02)
            yield chunk.assign(host=[socket.gethostname()] * len(chunk))


def prompts(size: int) -> Iterator[rl.Batch]:
    for first in range(0, 10**6, size):
        yield rl.Batch.of(prompt=["?"] * size, answer=["ab"] * size, groups=np.arange(first, first + size))


async def streamed(engine: RayEngine, *changes: str) -> object:
    """Train on what two samplers draw, of which one is enough, and say which hosts drew a batch where that changes.

    `changes`: the hosts that are to draw, one after the other, such as "node2 node3". How many batches that took.
    """
    say("ready")
    mesh = await rl.Mesh.reserve(engine, 2, rl.Resources(cpus=0, custom={"rollout": 1}, min_ranks=1))
    sampler = await mesh.spawn(PlacedSampler, rl.SamplerConfig(model="none"))
    witness, seen = Witness(FakePolicy(rl.PolicyConfig(model="none"))), 0
    await rl.publish(witness, sampler)
    async with rl.rollouts(sampler, witness.prompts(prompts(4)), rl.Sampling(n=2), ahead=2) as stream:
        while seen < len(changes):
            batch = await (await anext(stream)).load()
            await witness.update(batch, rl.CrossEntropy())
            await rl.publish(witness, stream)
            if " ".join(sorted(set(map(str, batch.objects("host"))))) == changes[seen]:
                say(changes[seen])
                seen += 1
    witness.check(ahead=2, n=2, dropped=None)
    return len(witness.versions)
