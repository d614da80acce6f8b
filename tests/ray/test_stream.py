"""A schedule of rollouts that streamed from processes of Ray is followed on another engine."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from meshrl import (
    Batch,
    ClippedLoss,
    LocalEngine,
    Mesh,
    PolicyConfig,
    RewardConfig,
    SamplerConfig,
    Sampling,
    publish,
    rollouts,
)
from meshrl.engines.ray import RayEngine
from meshrl.mesh import Engine
from meshrl.rollout import Schedule, read_schedule, schedule
from meshrl.testing import FakePolicy, FakeReward, FakeSampler
from tests.ray.conftest import NO_CORE

POLICY, SAMPLER = PolicyConfig(model="none"), SamplerConfig(model="none")


def prompts() -> Iterator[Batch]:
    first = 0
    while True:
        numbers = np.arange(first, first + 4)
        yield Batch.of(
            prompt=[f"{number}>" for number in numbers], answer=["x" * (number % 3) for number in numbers]
        ).assign(groups=numbers)
        first += 4


async def trained(batch: Batch, policy: FakePolicy) -> Batch:
    batch = await batch.load()
    await policy.update(batch.assign(advantages=batch.rewards - 0.5), ClippedLoss())
    return batch


async def streamed(engine: Engine, kept: Schedule, pause: float) -> list[Batch]:
    """Eight batches, from two ranks, with weights in flight."""
    schedule.set(kept)
    mesh = await Mesh.reserve(engine, 2, NO_CORE)
    policy, sampler = FakePolicy(POLICY), await mesh.spawn(FakeSampler, SAMPLER)
    reward = FakeReward(RewardConfig())
    batches: list[Batch] = []
    await publish(policy, sampler)
    async with rollouts(sampler, prompts(), Sampling(n=2), ahead=2, score=reward.score) as stream:
        for _ in range(8):
            batches.append(await trained(await anext(stream), policy))
            await asyncio.sleep(pause)
            await publish(policy, stream)
    await mesh.stop()
    kept.close()
    return batches


@pytest.mark.wide
async def test_a_schedule_of_ray_is_followed_on_either_engine(engine: RayEngine, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    one = await streamed(engine, Schedule(tmp_path / "one" / "schedule.jsonl"), pause=0.01)
    followed = read_schedule(tmp_path / "one")
    for name, other, pause in (("ray", engine, 0.0), ("local", LocalEngine(), 0.03)):
        again = await streamed(other, Schedule(tmp_path / f"{name}.jsonl", followed), pause)
        for batch, same in zip(one, again, strict=True):
            assert batch.to_wire() == same.only(*batch.names).to_wire()
