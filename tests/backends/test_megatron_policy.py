"""A Megatron policy of one rank: what its optimizer keeps when a checkpoint is taken, and layers computed twice."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from meshrl import Batch, ClippedLoss, NewModel, PolicyConfig, Ragged
from meshrl_hf.spread_state import MOMENTS
from meshrl_megatron.optimizer import Trained
from meshrl_megatron.policy import MegatronPolicy

pytestmark = pytest.mark.megatron

MODEL = NewModel(characters="abcdefgh>", hidden_size=16, ffn_size=24, layers=2, heads=2, max_tokens=48)
OPTIMIZER = {"lr": 0.03, "eps": 0.01, "max_grad_norm": 0.5}


def made(**keys: object) -> MegatronPolicy:
    return MegatronPolicy(
        PolicyConfig.model_validate({"model": MODEL, "backend": "megatron", "optimizer": OPTIMIZER, **keys})
    )


def rollouts(seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    tokens = Ragged.of([rng.integers(2, 11, 7 + row) for row in range(4)], np.int32)
    return Batch.of(
        tokens=tokens,
        loss_mask=Ragged(np.concatenate([np.arange(7 + row) >= 3 for row in range(4)]), tokens.offsets),
        sampler_logprobs=Ragged(np.full(len(tokens.values), -2.0, np.float32), tokens.offsets),
        advantages=rng.normal(size=4).astype(np.float32),
    )


def states(policy: MegatronPolicy) -> list[Mapping[str, Tensor]]:
    """What AdamW keeps of each parameter."""
    trained = policy._trainable.optimizer
    assert isinstance(trained, Trained)
    (optimizer,) = trained._optimizer.chained_optimizers
    return [optimizer.optimizer.state[shard] for shard in trained._shards()]


async def after_two(folder: Path) -> MegatronPolicy:
    policy = made()
    for seed in range(2):
        await policy.update(rollouts(seed), ClippedLoss())
    await policy.checkpoint(str(folder))
    return policy


async def test_a_policy_that_has_made_no_step_takes_moments(tmp_path: Path) -> None:
    source = await after_two(tmp_path / "state")
    fresh = made(seed=1)
    assert not any(states(fresh))
    await fresh.restore(str(tmp_path / "state"))
    for found, expected in zip(states(fresh), states(source), strict=True):
        for name in MOMENTS:
            assert expected[name].any()
            assert torch.equal(found[name], expected[name])


async def test_a_restored_policy_knows_how_many_steps_it_made(tmp_path: Path) -> None:
    """AdamW corrects its moments by that number: a step from 0 would be another."""
    source = await after_two(tmp_path / "state")
    fresh = made(seed=1)
    await fresh.restore(str(tmp_path / "state"))
    assert {float(each["step"]) for each in states(fresh)} == {2.0}
    told = [(await each.update(rollouts(2), ClippedLoss())).means() for each in (source, fresh)]
    assert told[0] == told[1]
    assert await (await fresh.weights()).load() == await (await source.weights()).load()


async def test_each_parameter_counts_its_own_steps(tmp_path: Path) -> None:
    """AdamW adds to the number in place: one that parameters share is counted up by each of them."""
    await after_two(tmp_path / "state")
    fresh = made(seed=1)
    await fresh.restore(str(tmp_path / "state"))
    counts = [each["step"] for each in states(fresh)]
    assert len({each.data_ptr() for each in counts}) == len(counts) > 1
    await fresh.update(rollouts(2), ClippedLoss())
    assert {float(each["step"]) for each in states(fresh)} == {3.0}


async def test_a_policy_in_use_forgets_its_moments_for_a_checkpoint_without(tmp_path: Path) -> None:
    policy, twin = made(), made()
    await policy.checkpoint(str(tmp_path / "new"))
    await policy.update(rollouts(), ClippedLoss())
    await policy.restore(str(tmp_path / "new"))
    assert not any(states(policy))
    told = [(await each.update(rollouts(1), ClippedLoss())).means() for each in (policy, twin)]
    assert told[0] == told[1]


async def test_layers_that_are_computed_twice_give_the_same_update() -> None:
    policy, twice = made(), made(activation_checkpointing=True)
    for seed in range(3):
        told = [(await each.update(rollouts(seed), ClippedLoss())).means() for each in (twice, policy)]
        assert told[0] == pytest.approx(told[1], rel=1e-6, abs=1e-6)
    found, expected = [(await (await each.weights()).load()).tensors for each in (twice, policy)]
    for name, array in expected.items():
        assert np.abs(found[name].astype(np.float64) - array.astype(np.float64)).max() <= 1e-6, name
