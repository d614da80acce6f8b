"""The shipped scripts keep their promises under any schedule, unchanged, on fake roles in virtual time."""

from functools import cache
from pathlib import Path
from random import Random
from unittest.mock import patch

import pytest

from meshrl import Batch, PolicyConfig, ReferenceConfig, RewardConfig, SamplerConfig, Task
from meshrl.config import validate
from meshrl.roles import CriticConfig
from meshrl.run.jobs import Script, load_script
from meshrl.testing import (
    FakeCritic,
    FakePolicy,
    FakeReference,
    FakeReward,
    FakeRun,
    FakeSampler,
    Lognormal,
    Scenario,
    Witness,
    delayed,
    explore,
)

_ALGORITHMS = Path(__file__).parents[2] / "algorithms"


@cache
def script(name: str) -> Script:
    return load_script(_ALGORITHMS / f"{name}.py")


@cache
def task() -> Task:
    def rows(count: int) -> Batch:
        sums = {"prompt": [f"{n}+1=" for n in range(count)], "answer": [f"{n + 1}" for n in range(count)]}
        return Batch.of(**sums, row=[{}] * count)

    return Task(train=rows(20), held_out=rows(2))


async def train(name: str, seed: int, **chosen: object) -> None:
    """Four steps of two prompts with two completions each."""
    random = Random(seed)
    ahead, steps = random.randrange(4), 4
    fake = {"backend": "fake", "model": "none"}
    table = {
        "task": {"source": "none"},
        "policy": fake,
        "reward": {"backend": "fake"},
        "sampling": {"n": 2},
        "prompts": 2,
        **chosen,
    }
    config = validate(script(name).schema, {**table, "ahead": ahead, "steps": steps}, "test")
    policy = delayed(FakePolicy, seed=seed, update=Lognormal(1, 0.5))(PolicyConfig(model="none"))
    sampler = delayed(FakeSampler, seed=seed, generate=Lognormal(0.3, 1), load=0.2)(SamplerConfig(model="none"))
    reward = delayed(FakeReward, seed=seed, score=Lognormal(0.1, 1))(RewardConfig())
    critic = delayed(FakeCritic, seed=seed, update=Lognormal(1, 0.5))(CriticConfig(model="none"))
    witness = Witness(policy)
    run = FakeRun(witness, sampler, reward, critic, FakeReference(ReferenceConfig(model="none")), seed=seed)
    with patch.object(Task, "load", lambda _: task()):
        await script(name).function(run, config)
    epochs = chosen.get("epochs", 1)
    assert isinstance(epochs, int)
    witness.check(ahead=ahead, n=2, epochs=epochs, dropped=None)
    assert len(run.recorded) == steps
    assert len(witness.rows) == steps * 4 * epochs


async def grpo(seed: int) -> None:
    await train("grpo", seed)


async def grpo_in_parts(seed: int) -> None:
    await train("grpo", seed, epochs=2, minibatches=2)


async def ppo(seed: int) -> None:
    await train("ppo", seed, epochs=2, minibatches=2)


async def rloo(seed: int) -> None:
    await train("rloo", seed, kl=0.1)


async def remax(seed: int) -> None:
    await train("remax", seed, kl=0.1 * (seed % 2))


@pytest.mark.parametrize("scenario", [grpo, grpo_in_parts, ppo, rloo, remax])
def test_a_shipped_script_keeps_the_bound(scenario: Scenario) -> None:
    explore(scenario, seeds=40)
