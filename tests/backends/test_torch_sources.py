"""What the torch roles say of their log-probs, what an update asks of them, and corrected updates."""

import asyncio

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from meshrl import Batch, ClippedLoss, NewModel, OptimizerConfig, PolicyConfig, Ragged, ReferenceConfig
from meshrl.data import Source
from meshrl.errors import DataError
from meshrl.losses import Correction, effective_sample_size, spread
from meshrl.mesh import Array
from meshrl_torch.policy import TorchPolicy
from meshrl_torch.reference import TorchReference

MODEL = NewModel(characters="abcdefgh>", hidden_size=16, ffn_size=24, layers=2, heads=2, max_tokens=48)
SGD = OptimizerConfig(lr=1.0, eps=1.0, max_grad_norm=None)
"""With so large an epsilon Adam's first step is nearly the gradient."""


def policy(micro_batch_tokens: int = 1000) -> TorchPolicy:
    return TorchPolicy(PolicyConfig(model=MODEL, optimizer=SGD, micro_batch_tokens=micro_batch_tokens))


def floats(array: Array) -> NDArray[np.float32]:
    return np.asarray(array, np.float32)


def rollouts(rows: int = 12) -> Batch:
    """Rows with prompts of 2 tokens, some shared, and completions of 1 to 9 tokens."""
    rng = np.random.default_rng(0)
    tokens = Ragged.of(
        [np.concatenate([[2 + row % 3, 5], rng.integers(1, 11, 1 + row % 9)]) for row in range(rows)], int
    )
    logprobs = rng.normal(-2.3, 0.2, len(tokens.values)).astype(np.float32)
    return Batch.of(
        tokens=tokens,
        loss_mask=Ragged.of([np.arange(len(row)) >= 2 for row in tokens], np.bool_),
        sampler_logprobs=Ragged(logprobs, tokens.offsets, source=Source("sampler")),
        advantages=rng.normal(size=rows).astype(np.float32),
    )


async def test_log_probs_say_which_model_computed_them() -> None:
    trainer, reference = policy(), TorchReference(ReferenceConfig(model=MODEL))
    batch = await reference.logprobs(await trainer.logprobs(rollouts()))
    assert batch.source("logprobs") == Source.trainer(0)
    assert batch.source("reference_logprobs") == Source("reference")
    await trainer.update(batch, ClippedLoss(anchor="trainer", kl=0.1))
    assert (await trainer.logprobs(batch)).source("logprobs") == Source.trainer(1)


async def test_an_update_refuses_the_log_probs_of_another_model() -> None:
    batch = rollouts()
    mistaken = batch.assign(logprobs=batch.sampler_logprobs)
    with pytest.raises(
        DataError, match=r"must come from the trainer, but .* by the sampler: call `batch = await policy"
    ):
        await policy().update(mistaken, ClippedLoss(anchor="trainer"))


async def test_weights_and_logprobs_wait_for_the_update_that_runs() -> None:
    trainer = policy(micro_batch_tokens=20)
    update = asyncio.create_task(trainer.update(rollouts(), ClippedLoss()))
    await asyncio.sleep(0)
    weights, scored = await asyncio.gather(trainer.weights(), trainer.logprobs(rollouts()))
    assert update.done()
    assert weights.version == 1
    assert scored.source("logprobs") == Source.trainer(1)


def test_tokens_are_given_the_numbers_of_their_rows() -> None:
    batch = rollouts(4)  # their rows start at 0, 3, 7 and 12
    assert spread(batch, "rows", np.array([14, 15, 4, 5, 13])).tolist() == [1, 1, 0, 0, 1]
    assert spread(batch, "rows", np.array([2, 6, 11])).tolist() == [0, 1, 2]


@pytest.mark.parametrize("level", ["token", "sequence"])
async def test_a_corrected_step_does_not_depend_on_micro_batches(level: str) -> None:
    correction = Correction.model_validate({"level": level, "how": "mask", "low": 0.5, "high": 1.5})
    loss = ClippedLoss(anchor="trainer", correction=correction)
    steps = []
    for budget in (1000, 20):
        trainer = policy(budget)
        metrics = await trainer.update(await trainer.logprobs(rollouts()), loss)
        steps.append((metrics, (await trainer.weights()).tensors))
    (one, whole), (several, divided) = steps
    assert several.means() == pytest.approx(one.means(), rel=1e-5, abs=1e-7)
    for name, array in whole.items():
        np.testing.assert_allclose(floats(divided[name]), floats(array), rtol=0, atol=1e-6)
    assert 0 < one["correction_clipped"] < 1
    assert 0 < effective_sample_size(one) < 1


async def test_weights_of_one_give_the_step_without_correction() -> None:
    batch = await policy().logprobs(rollouts())
    agreed = batch.assign(sampler_logprobs=Ragged(batch.ragged("logprobs").values, batch.tokens.offsets))
    prints: list[str] = []
    for loss in (ClippedLoss(), ClippedLoss(anchor="trainer", correction=Correction(level="sequence", high=2.0))):
        trainer = policy()
        await trainer.update(agreed, loss)
        prints.append((await trainer.weights()).fingerprint())
    assert prints[0] == prints[1]


async def test_the_diagnostics_tell_the_anchor_from_the_sampler() -> None:
    trainer = policy()
    batch = await trainer.logprobs(rollouts())
    metrics = await trainer.update(batch, ClippedLoss(anchor="trainer"))
    assert metrics["ratio"] == pytest.approx(1, abs=1e-5)
    assert metrics["kl"] == pytest.approx(0, abs=1e-6)
    mask = torch.from_numpy(np.array(batch.loss_mask.values))
    gap = torch.from_numpy(floats(batch.ragged("logprobs").values) - floats(batch.sampler_logprobs.values))[mask]
    assert metrics["sampler_ratio"] == pytest.approx(gap.exp().mean().item(), rel=1e-5)
    assert metrics["sampler_kl"] == pytest.approx((gap.expm1() - gap).mean().item(), rel=1e-4)
