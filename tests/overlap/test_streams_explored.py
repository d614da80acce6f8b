"""The stream of rollouts keeps its promises under many schedules, and the explorer finds what breaks them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import TypeVar

import numpy as np
import pytest
from numpy.typing import NDArray

import meshrl as rl
from meshrl.errors import RankFailed
from meshrl.roles import RoleConfig
from meshrl.testing import Crash, FakeReward, FakeSampler, ScheduleFailed, Witness, crashing, delayed, explore
from tests.overlap.streams import CLAIM, POLICY, REWARD, SAMPLER, SHORT, TellingSampler, World, prompts

R = TypeVar("R", bound=rl.Actor)
C = TypeVar("C", bound=RoleConfig)


async def anything(seed: int, teller: type[FakeSampler] = TellingSampler) -> None:
    """A crash of a role may end it before the last prompt; what was trained until then is right all the same."""
    world = World(seed)
    random = world.random
    mortal, on_meshes, overlapping = (random.random() < chance for chance in (0.5, 0.5, 0.3))
    generate, score = (0.03, random.choice([0.0, 0.01])) if mortal else (0.0, 0.0)
    keeps = random.choice([1.0, 0.7])

    async def place(role: Callable[[C], R], config: C, most: int) -> R:
        if not on_meshes:
            return role(config)
        mesh = await rl.Mesh.reserve(rl.LocalEngine(), random.randint(1, most), rl.Resources(cpus=0))
        return await mesh.spawn(role, config)

    def keep(batch: rl.Batch) -> NDArray[np.bool_]:
        kept = {group: random.random() < keeps for group in sorted(set(batch.groups.tolist()))}
        return np.array([kept[group] for group in batch.groups.tolist()])

    witness = Witness(await place(world.policy, POLICY, 1))
    sampler = await place(world.slow(crashing(teller, seed=seed, generate=generate)), SAMPLER, 2)
    judge = delayed(crashing(FakeReward, seed=seed, score=score), seed=seed, score=SHORT)
    stream = rl.rollouts(
        sampler,
        witness.prompts(prompts(random.randint(1, 6), world.size)),
        rl.Sampling(n=world.n),
        ahead=world.ahead,
        score=(await place(judge, REWARD, 2)).score,
        keep=keep,
        late=random.choice(["wait", "drop"]),
        swap=world.swap,
        retries=random.choice([0, 3]),
    )
    dropped: int | None = None
    try:
        await rl.publish(witness, stream)
        async with asyncio.TaskGroup() as tasks:

            async def publish() -> None:
                publication = tasks.create_task(rl.publish(witness, stream))
                if not overlapping:
                    await publication

            await world.train(witness, stream, publish)
        dropped = sum(stream.dropped.values())
    except* (Crash, RankFailed):
        if not mortal:
            raise
    witness.check(ahead=world.ahead, n=world.n, dropped=dropped)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "seeds"), [(0, 100), pytest.param(100, 1200, marks=pytest.mark.wide)])
def test_the_stream_keeps_its_promises_under_any_schedule(first: int, seeds: int) -> None:
    explore(anything, seeds=seeds, first=first)


class SwapsWithinAStep(TellingSampler):
    """A forward pass that pauses in the middle: new weights come meanwhile, and the row says that it is theirs."""

    async def generate(self, prompts: rl.Batch, sampling: rl.Sampling) -> AsyncIterator[rl.Batch]:
        async for chunk in super().generate(prompts, sampling):
            await asyncio.sleep(0.05)
            yield chunk.assign(oldest_version=np.full(len(chunk), self.weights.version, np.int32))


def test_the_explorer_finds_a_broken_promise() -> None:
    with pytest.raises(ScheduleFailed) as failure:
        explore(partial(anything, teller=SwapsWithinAStep), seeds=300)
    assert CLAIM in repr(failure.value.__cause__)
