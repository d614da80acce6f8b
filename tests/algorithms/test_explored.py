"""The shipped scripts keep their promises under any schedule, and divide batches as they say, on fake roles."""

from collections.abc import Iterator
from functools import partial
from itertools import chain, count
from random import Random
from typing import Any

import numpy as np
import pytest

from meshrl import Batch, Metrics, PolicyConfig, ReferenceConfig, RewardConfig, SamplerConfig, Task
from meshrl.roles import CriticConfig
from meshrl.testing import (
    FakeCritic,
    FakePolicy,
    FakeReference,
    FakeReward,
    FakeRun,
    FakeSampler,
    Lognormal,
    Witness,
    delayed,
    explore,
)
from tests.algorithms.pages import ALGORITHMS, FAKES, NAMES, numbers, play

PARTS: dict[str, Any] = {"epochs": 2, "minibatches": 2}
SCRIPTS: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("grpo", {}),
    "grpo in parts": ("grpo", PARTS),
    "ppo": ("ppo", PARTS),
    "rloo": ("rloo", {"kl": 0.1}),
    "remax": ("remax", {}),
    "remax with a reference": ("remax", {"kl": 0.1}),
}


async def train(name: str, chosen: dict[str, Any], seed: int) -> None:
    """Four steps of two prompts with two completions each."""
    random = Random(seed)
    ahead, steps = random.randrange(4), 4
    table = {**FAKES, "sampling": {"n": 2}, "prompts": 2, "ahead": ahead, "steps": steps, **chosen}
    policy = delayed(FakePolicy, seed=seed, update=Lognormal(1, 0.5))(PolicyConfig(model="none"))
    sampler = delayed(FakeSampler, seed=seed, generate=Lognormal(0.3, 1), load=0.2)(SamplerConfig(model="none"))
    reward = delayed(FakeReward, seed=seed, score=Lognormal(0.1, 1))(RewardConfig())
    critic = delayed(FakeCritic, seed=seed, update=Lognormal(1, 0.5))(CriticConfig(model="none"))
    witness = Witness(policy)
    run = FakeRun(witness, sampler, reward, critic, FakeReference(ReferenceConfig(model="none")), seed=seed)
    await play(name, run, table, Task(train=numbers(0, 20), held_out=numbers(0, 2)))
    epochs: int = chosen.get("epochs", 1)
    witness.check(ahead=ahead, n=2, epochs=epochs, dropped=None)
    assert len(run.recorded) == steps
    assert len(witness.rows) == steps * 4 * epochs


@pytest.mark.parametrize("case", SCRIPTS)
def test_a_shipped_script_keeps_the_bound(case: str) -> None:
    name, chosen = SCRIPTS[case]
    explore(partial(train, name, chosen), seeds=40)


PAGES = [name for name in NAMES if "minibatches: int" in (ALGORITHMS / f"{name}.py").read_text("utf-8")]


class Numbered(FakeReward):
    """Gives each row a number of its own, which is its reward too: they differ in each group, so that all teach."""

    numbers: Iterator[int]

    async def score(self, batch: Batch) -> Batch:
        numbers = np.array([next(self.numbers) for _ in range(len(batch))])
        return batch.assign(number=numbers, rewards=numbers.astype(np.float32), reward_error=[None] * len(batch))


class Keeps(FakeRun):
    """Keeps the numbers of the rows of each recorded batch."""

    kept: tuple[list[int], ...] = ()

    async def record(self, metrics: Metrics, batch: Batch | None = None, **extra: float) -> None:
        assert batch is not None
        self.kept = *self.kept, sorted(batch.row("number").tolist())
        await super().record(metrics, batch, **extra)


@pytest.mark.parametrize("name", PAGES)
async def test_each_epoch_is_the_batch_in_parts_and_each_step_one_publication(name: str) -> None:
    steps, prompts, n, epochs, parts = 3, 5, 2, 3, 2
    sizes = {"sampling": {"n": n}, "prompts": prompts, "steps": steps, "epochs": epochs, "minibatches": parts}
    policy, reward = FakePolicy(PolicyConfig(model="none")), Numbered(RewardConfig())
    witness, critic, reward.numbers = Witness(policy), FakeCritic(CriticConfig(model="none")), count()
    run = Keeps(witness, critic, FakeSampler(SamplerConfig(model="none")), reward)
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
