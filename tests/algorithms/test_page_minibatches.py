"""Several updates of a batch: which rows each page gives to `policy.update`, and when it publishes."""

from itertools import chain, count

import numpy as np
import pytest

from meshrl import Batch, CriticConfig, Metrics, PolicyConfig, RewardConfig, SamplerConfig, Task
from meshrl.testing import FakeCritic, FakePolicy, FakeReward, FakeRun, FakeSampler, Witness
from tests.algorithms.pages import ALGORITHMS, FAKES, NAMES, numbers, play

PAGES = [name for name in NAMES if "minibatches: int" in (ALGORITHMS / f"{name}.py").read_text("utf-8")]
EPOCHS, PARTS, STEPS, PROMPTS, N = 3, 2, 3, 5, 2


class Numbered(FakeReward):
    """Gives each row a number of its own, which is its reward too: they differ in each group, so that all teach."""

    def __init__(self, config: RewardConfig) -> None:
        super().__init__(config)
        self.numbers = count()

    async def score(self, batch: Batch) -> Batch:
        numbers = np.array([next(self.numbers) for _ in range(len(batch))])
        return batch.assign(number=numbers, rewards=numbers.astype(np.float32), reward_error=[None] * len(batch))


class Kept(FakeRun):
    """A run that keeps the rows of each step's batch."""

    def __init__(self, *actors: FakePolicy | FakeCritic | FakeSampler | FakeReward | Witness) -> None:
        super().__init__(*actors)
        self.batches: list[list[int]] = []

    async def record(self, metrics: Metrics, batch: Batch | None = None, **numbers: float) -> None:
        assert batch is not None
        self.batches.append(numbers_of(batch))
        await super().record(metrics, batch, **numbers)


def numbers_of(batch: Batch) -> list[int]:
    """Which rows they are, sorted."""
    return sorted(batch.row("number").tolist())


@pytest.mark.parametrize("name", PAGES)
async def test_each_epoch_is_the_batch_in_parts_and_each_step_one_publication(name: str) -> None:
    sizes = {"sampling": {"n": N}, "prompts": PROMPTS, "steps": STEPS, "epochs": EPOCHS, "minibatches": PARTS}
    policy = FakePolicy(PolicyConfig(model="none"))
    witness = Witness(policy)
    critic = FakeCritic(CriticConfig(model="none"))
    run = Kept(witness, critic, FakeSampler(SamplerConfig(model="none")), Numbered(RewardConfig()))
    await play(name, run, {**FAKES, **sizes}, Task(train=numbers(0, 20), held_out=numbers(0, 2)))

    updates = EPOCHS * PARTS  # of a step
    assert witness.versions == [step * updates for step in range(STEPS + 1)]
    witness.check(ahead=0, n=N, epochs=EPOCHS, dropped=None)
    given = [numbers_of(part) for part in policy.updates]
    assert len(given) == STEPS * updates
    assert [len(set(batch)) for batch in run.batches] == [PROMPTS * N] * STEPS
    for epoch in range(STEPS * EPOCHS):
        parts = given[epoch * PARTS : (epoch + 1) * PARTS]
        assert all(parts)
        assert sorted(chain.from_iterable(parts)) == run.batches[epoch // EPOCHS]
