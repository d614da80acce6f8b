"""A policy and a sampler on the same GPUs are never awake together beyond what these hold, under any schedule.

Their memory is an account. The policy keeps its parameters, has gradients and activations while it learns, and its
moments while it steps (`fsdp.offload_moments`). The sampler does what an engine with `sleep` does: it is awake while a
row is decoded or weights are loaded, and asleep before the last row is told.
"""

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from random import Random
from typing import Any

import pytest

from meshrl import Batch, Metrics, PolicyConfig, RewardConfig, SamplerConfig, Sampling, Task
from meshrl.algo import Loss
from meshrl.data import Weights
from meshrl.testing import FakePolicy, FakeReward, FakeRun, FakeSampler, ScheduleFailed, explore
from tests.algorithms.pages import FAKES, numbers, play

BUDGET = 20
PARAMETERS, GRADIENTS, ACTIVATIONS, MOMENTS = 4, 4, 7, 8
WEIGHTS, CACHE = 2, 8


class Ledger:
    """What is held on the GPUs, by name."""

    def __init__(self) -> None:
        self.held = Counter({"parameters": PARAMETERS})
        self.most = 0

    def take(self, **amounts: int) -> None:
        self.held.update(amounts)
        self.most = max(self.most, self.held.total())
        assert self.held.total() <= BUDGET, f"{dict(self.held)} are {self.held.total()} of {BUDGET}"

    def give(self, *names: str) -> None:
        for name in names:
            assert self.held.pop(name)


class Learner(FakePolicy):
    """A policy whose moments are on the GPUs while it steps alone."""

    ledger: Ledger
    random: Random

    async def update(self, batch: Batch, loss: Loss) -> Metrics:
        for _ in range(2):
            self.ledger.take(gradients=0 if "gradients" in self.ledger.held else GRADIENTS, activations=ACTIVATIONS)
            await asyncio.sleep(self.random.expovariate(1))
            self.ledger.give("activations")
        self.ledger.take(moments=MOMENTS)
        metrics = await super().update(batch, loss)
        await asyncio.sleep(self.random.expovariate(1))
        self.ledger.give("gradients", "moments")
        return metrics


class Sleeper(FakeSampler):
    """A sampler that sleeps where it has nothing to do, `late` only after its last rows are told."""

    ledger: Ledger
    random: Random
    late: bool
    busy = 0

    @contextmanager
    def awake(self) -> Generator[None]:
        self.busy += 1
        if self.busy == 1:
            self.ledger.take(weights=WEIGHTS, cache=CACHE)
        try:
            yield
        finally:
            self.busy -= 1
            if not self.busy:
                self.ledger.give("weights", "cache")

    async def generate(self, prompts: Batch, sampling: Sampling) -> AsyncIterator[Batch]:
        last: Batch | None = None
        with ExitStack() as awake:
            awake.enter_context(self.awake())
            async for rows in super().generate(prompts, sampling):
                await asyncio.sleep(self.random.expovariate(2))
                if last is not None:
                    yield last
                last = rows
            if not self.late:
                awake.close()
            if last is not None:
                yield last
                await asyncio.sleep(0.5 * self.late)

    async def load(self, weights: Weights) -> Batch:
        with self.awake():
            await asyncio.sleep(self.random.expovariate(5))
            return await super().load(weights)


async def train(seed: int, *, ahead: int = 0, late: bool = False, epochs: int = 1) -> None:
    random, ledger = Random(seed), Ledger()
    sizes = {"sampling": {"n": 2}, "prompts": 2, "ahead": ahead, "steps": 4, "epochs": epochs, "minibatches": epochs}
    policy, sampler = Learner(PolicyConfig(model="none")), Sleeper(SamplerConfig(model="none"))
    policy.ledger = sampler.ledger = ledger
    policy.random = sampler.random = random
    sampler.late = late
    run = FakeRun(policy, sampler, FakeReward(RewardConfig()), seed=seed)
    await play("grpo", run, {**FAKES, **sizes}, Task(train=numbers(0, 20), held_out=numbers(0, 2)))
    assert len(run.recorded) == 4
    assert dict(ledger.held) == {"parameters": PARAMETERS}
    assert ledger.most == PARAMETERS + GRADIENTS + MOMENTS


@pytest.mark.parametrize("seeds", [40, pytest.param(400, marks=pytest.mark.wide)])
@pytest.mark.parametrize("epochs", [1, 2])
def test_policy_and_sampler_stay_within_the_memory_of_their_gpus(epochs: int, seeds: int) -> None:
    explore(partial(train, epochs=epochs), seeds=seeds)


@pytest.mark.parametrize("fault", [{"ahead": 1}, {"late": True}], ids=str)
def test_the_ledger_finds_a_planted_overdraft(fault: dict[str, Any]) -> None:
    """Both at once, and a sampler that falls asleep too late."""
    with pytest.raises(ScheduleFailed) as failure:
        explore(partial(train, **fault), seeds=50)
    assert re.search(r"are 2\d of 20", repr(failure.value.__cause__))
