"""The shipped scripts keep their promises under any schedule, unchanged, on fake roles in virtual time."""

from functools import partial
from random import Random
from typing import Any

import pytest

from meshrl import PolicyConfig, ReferenceConfig, RewardConfig, SamplerConfig, Task
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
from tests.algorithms.pages import FAKES, numbers, play

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
