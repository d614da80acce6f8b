import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain, count
from random import Random
from typing import Any

import numpy as np
import pytest

from meshrl import Batch, Metrics, PolicyConfig, ReferenceConfig, RewardConfig, SamplerConfig, Sampling, Task, testing
from meshrl.algo import Loss
from meshrl.data import Weights
from meshrl.roles import CriticConfig
from meshrl.testing import Lognormal, ScheduleFailed, Witness, delayed, explore
from tests.algorithms.pages import ALGORITHMS, FAKES, NAMES, numbers, play

PARTS: dict[str, Any] = {"epochs": 2, "minibatches": 2}
SCRIPTS: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo in parts": ("grpo", PARTS),
    "ppo": ("ppo", PARTS),
    "remax with a reference": ("remax", {"kl": 0.1}),
}


async def train(name: str, chosen: dict[str, Any], seed: int) -> None:
    random = Random(seed)
    ahead, steps = random.randrange(4), 4
    table = {**FAKES, "sampling": {"n": 2}, "prompts": 2, "ahead": ahead, "steps": steps, **chosen}
    policy = delayed(testing.FakePolicy, seed=seed, update=Lognormal(1, 0.5))(PolicyConfig(model="none"))
    sampler = delayed(testing.FakeSampler, seed=seed, generate=Lognormal(0.3, 1), load=0.2)(SamplerConfig(model="none"))
    reward = delayed(testing.FakeReward, seed=seed, score=Lognormal(0.1, 1))(RewardConfig())
    critic = delayed(testing.FakeCritic, seed=seed, update=Lognormal(1, 0.5))(CriticConfig(model="none"))
    witness = Witness(policy)
    run = testing.FakeRun(
        witness, sampler, reward, critic, testing.FakeReference(ReferenceConfig(model="none")), seed=seed
    )
    await play(name, run, table, Task(train=numbers(0, 20), held_out=numbers(0, 2)))
    epochs: int = chosen.get("epochs", 1)
    witness.check(ahead=ahead, n=2, epochs=epochs, dropped=None)
    assert len(run.recorded) == steps
    assert len(witness.rows) == steps * 4 * epochs


@pytest.mark.parametrize("case", SCRIPTS)
def test_a_shipped_script_keeps_the_bound(case: str) -> None:
    name, chosen = SCRIPTS[case]
    explore(partial(train, name, chosen), seeds=30)


PAGES = [name for name in NAMES if "minibatches: int" in (ALGORITHMS / f"{name}.py").read_text("utf-8")]


class Numbered(testing.FakeReward):
    numbers: Iterator[int]

    async def score(self, batch: Batch) -> Batch:
        numbers = np.array([next(self.numbers) for _ in range(len(batch))])
        return batch.assign(number=numbers, rewards=numbers.astype(np.float32), reward_error=[None] * len(batch))


class Keeps(testing.FakeRun):
    kept: tuple[list[int], ...] = ()

    async def record(self, metrics: Metrics, batch: Batch | None = None, **extra: float) -> None:
        assert batch is not None
        self.kept = *self.kept, sorted(batch.row("number").tolist())
        await super().record(metrics, batch, **extra)


@pytest.mark.parametrize("name", PAGES)
async def test_each_epoch_is_the_batch_in_parts_and_each_step_one_publication(name: str) -> None:
    steps, prompts, n, epochs, parts = 3, 5, 2, 3, 2
    sizes = {"sampling": {"n": n}, "prompts": prompts, "steps": steps, "epochs": epochs, "minibatches": parts}
    policy, reward = testing.FakePolicy(PolicyConfig(model="none")), Numbered(RewardConfig())
    witness, critic, reward.numbers = Witness(policy), testing.FakeCritic(CriticConfig(model="none")), count()
    run = Keeps(witness, critic, testing.FakeSampler(SamplerConfig(model="none")), reward)
    await play(name, run, {**FAKES, **sizes}, Task(train=numbers(0, 20), held_out=numbers(0, 2)))
    assert witness.versions == [step * epochs * parts for step in range(steps + 1)]
    witness.check(ahead=0, n=n, epochs=epochs, dropped=None)
    given = [part.row("number").tolist() for part in policy.updates]
    assert len(given) == steps * epochs * parts
    assert all(given)
    for epoch in range(steps * epochs):
        rows = sorted(chain.from_iterable(given[epoch * parts : (epoch + 1) * parts]))
        first = epoch // epochs * prompts * n
        assert rows == list(range(first, first + prompts * n)), "each row of the step once"
        assert run.kept[epoch // epochs] == rows, "the whole step is recorded, not a part"


# --- A policy and a sampler on the same GPUs are never awake together beyond what these hold.
#
# Their memory is an account. The policy keeps its parameters, has gradients and activations while it learns, and its
# moments while it steps (`fsdp.offload_moments`). The sampler does what an engine with `sleep` does: it is awake while
# a row is decoded or weights are loaded, and asleep before the last row is told.

BUDGET = 20
PARAMETERS, GRADIENTS, ACTIVATIONS, MOMENTS = 4, 4, 7, 8
WEIGHTS, CACHE = 2, 8


class Ledger:
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


class Learner(testing.FakePolicy):
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


class Sleeper(testing.FakeSampler):
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


async def train_colocated(seed: int, *, ahead: int = 0, late: bool = False, epochs: int = 1) -> None:
    random, ledger = Random(seed), Ledger()
    sizes = {"sampling": {"n": 2}, "prompts": 2, "ahead": ahead, "steps": 4, "epochs": epochs, "minibatches": epochs}
    policy, sampler = Learner(PolicyConfig(model="none")), Sleeper(SamplerConfig(model="none"))
    policy.ledger = sampler.ledger = ledger
    policy.random = sampler.random = random
    sampler.late = late
    run = testing.FakeRun(policy, sampler, testing.FakeReward(RewardConfig()), seed=seed)
    await play("grpo", run, {**FAKES, **sizes}, Task(train=numbers(0, 20), held_out=numbers(0, 2)))
    assert len(run.recorded) == 4
    assert dict(ledger.held) == {"parameters": PARAMETERS}
    assert ledger.most == PARAMETERS + GRADIENTS + MOMENTS


@pytest.mark.parametrize("seeds", [40, pytest.param(400, marks=pytest.mark.wide)])
@pytest.mark.parametrize("epochs", [1, 2])
def test_policy_and_sampler_stay_within_the_memory_of_their_gpus(epochs: int, seeds: int) -> None:
    explore(partial(train_colocated, epochs=epochs), seeds=seeds)


@pytest.mark.parametrize("fault", [{"ahead": 1}, {"late": True}], ids=str)
def test_the_ledger_finds_a_planted_overdraft(fault: dict[str, Any]) -> None:
    with pytest.raises(ScheduleFailed) as failure:
        explore(partial(train_colocated, **fault), seeds=50)
    assert re.search(r"are 2\d of 20", repr(failure.value.__cause__))
