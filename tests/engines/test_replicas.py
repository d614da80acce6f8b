import asyncio
import os
import signal
from collections.abc import AsyncIterator

import numpy as np
import pytest

import meshrl as rl
from meshrl.mesh import is_away
from meshrl.testing import FakePolicy, FakeSampler, Witness
from tests.engines.conftest import Reserve, on_processes
from tests.overlap.streams import POLICY, SAMPLER, prompts
from tests.processes.conftest import Numbered

pytestmark = [pytest.mark.asyncio(loop_scope="session"), on_processes]


class SlowSampler(FakeSampler, Numbered):
    async def generate(self, prompts: rl.Batch, sampling: rl.Sampling) -> AsyncIterator[rl.Batch]:
        async for chunk in super().generate(prompts, sampling):
            yield chunk.assign(pid=np.full(len(chunk), os.getpid()))
            await asyncio.sleep(0.02)


async def test_a_stream_outlives_a_killed_replica(reserve: Reserve) -> None:
    mesh = await reserve(2, rl.Resources(cpus=0, min_ranks=1))
    sampler, witness = await mesh.spawn(SlowSampler, SAMPLER), Witness(FakePolicy(POLICY))
    pids = (await sampler.pid()).tolist()
    drawn_by: set[int] = set()
    steps = 0
    await rl.publish(witness, sampler)
    stream = rl.rollouts(sampler, witness.prompts(prompts(200, 4)), rl.Sampling(n=2), ahead=1, retries=0)
    async with stream:
        async for drawn in stream:
            batch = await drawn.load()
            drawn_by.update(batch.row("pid").tolist())
            await witness.update(batch, rl.CrossEntropy())
            await rl.publish(witness, stream)
            steps += 1
            if steps == 2:
                os.kill(pids[1], signal.SIGKILL)
                beside = await rl.rollout(sampler, next(prompts(1, 3)), rl.Sampling())
                assert len(beside) == 3, "as an evaluation draws"
            if len(drawn_by) == 3:
                break
    witness.check(ahead=1, n=2, dropped=None)
    assert pids[0] in drawn_by
    assert not is_away(sampler)
    again = (await sampler.pid()).tolist()
    assert again[0] == pids[0]
    assert again[1] not in pids
    assert {*pids, again[1]} == drawn_by
