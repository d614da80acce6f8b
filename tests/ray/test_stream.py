"""Rollouts that stream from other processes: one that dies, and a schedule that is followed on another engine."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from meshrl import (
    Batch,
    ClippedLoss,
    Gather,
    LocalEngine,
    Mesh,
    PolicyConfig,
    Resources,
    RewardConfig,
    SamplerConfig,
    Sampling,
    endpoint,
    publish,
    rollouts,
)
from meshrl.engines.ray import RayEngine
from meshrl.mesh import Engine
from meshrl.rollout import Schedule, read_schedule, schedule
from meshrl.testing import FakePolicy, FakeReward, FakeSampler

POLICY, SAMPLER = PolicyConfig(model="none"), SamplerConfig(model="none")


class MortalSampler(FakeSampler):
    @endpoint
    async def pid(self) -> Gather[np.ndarray]:
        return np.array([os.getpid()])


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


async def test_a_stream_outlives_its_sampler(engine: RayEngine) -> None:
    mesh = await Mesh.reserve(engine, 1, Resources(cpus=0))
    policy, sampler = FakePolicy(POLICY), await mesh.spawn(MortalSampler, SAMPLER)
    reward = FakeReward(RewardConfig())
    batches = []
    async with rollouts(sampler, prompts(), Sampling(n=2), ahead=2, score=reward.score, retries=1) as stream:
        await publish(policy, stream)
        for step in range(6):
            if step == 2:
                os.kill(int((await sampler.pid())[0]), signal.SIGKILL)
            batches.append(await trained(await anext(stream), policy))
            await publish(policy, stream)
    labels = np.concatenate([batch.groups for batch in batches])
    assert np.unique(labels, return_counts=True)[1].tolist() == [2] * 24
    for step, batch in enumerate(batches):
        assert (step - batch.row("oldest_version") == batch.row("staleness")).all()
        assert batch.row("staleness").max() <= 2
    assert batches[-1].row("oldest_version").max() > 2


async def streamed(engine: Engine, kept: Schedule, pause: float) -> list[Batch]:
    """Eight batches, from two ranks, with weights in flight."""
    schedule.set(kept)
    mesh = await Mesh.reserve(engine, 2, Resources(cpus=0))
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


async def test_a_schedule_of_ray_is_followed_on_either_engine(engine: RayEngine, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    one = await streamed(engine, Schedule(tmp_path / "one" / "schedule.jsonl"), pause=0.01)
    followed = read_schedule(tmp_path / "one")
    for name, other, pause in (("ray", engine, 0.0), ("local", LocalEngine(), 0.03)):
        again = await streamed(other, Schedule(tmp_path / f"{name}.jsonl", followed), pause)
        for batch, same in zip(one, again, strict=True):
            assert batch.to_wire() == same.only(*batch.names).to_wire()
