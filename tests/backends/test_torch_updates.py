"""Updates of the torch policy: what they ask of log-probs, corrected ones, and failed ones, which leave nothing."""

import numpy as np
import pytest
import torch

from meshrl import Batch, ClippedLoss, PolicyConfig, Ragged, ReferenceConfig
from meshrl.data import Source
from meshrl.losses import Correction, effective_sample_size, spread
from meshrl_torch.policy import TorchPolicy
from meshrl_torch.reference import TorchReference
from tests.backends import material
from tests.backends.material import MODEL, SGD, Late, floats


def policy(micro_batch_tokens: int = 1000) -> TorchPolicy:
    return TorchPolicy(PolicyConfig(model=MODEL, optimizer=SGD, micro_batch_tokens=micro_batch_tokens))


def rollouts(seed: int = 0) -> Batch:
    """Of a sampler, whose log-probs are near those of a new model."""
    batch = material.rollouts(seed=seed)
    logprobs = np.random.default_rng(seed).normal(-2.3, 0.4, len(batch.tokens.values)).astype(np.float32)
    return batch.assign(sampler_logprobs=Ragged(logprobs, batch.tokens.offsets, source=Source("sampler")))


async def test_an_update_that_failed_leaves_nothing_to_the_next() -> None:
    failed, fresh = policy(40), policy(40)
    with pytest.raises(ZeroDivisionError):
        await failed.update(rollouts(), Late())
    for trainer in (failed, fresh):
        await trainer.update(rollouts(), ClippedLoss())
    assert (await failed.weights()) == (await fresh.weights())


async def test_numpys_own_dtypes_are_taken() -> None:
    trainer, wide, batch = policy(), policy(), rollouts()
    advantages = np.asarray(batch.row("advantages"), np.float64)
    found = await wide.update(batch.assign(advantages=advantages), ClippedLoss())
    assert found == await trainer.update(batch, ClippedLoss())


async def test_log_probs_say_which_model_computed_them() -> None:
    trainer, reference = policy(), TorchReference(ReferenceConfig(model=MODEL))
    batch = await reference.logprobs(await trainer.logprobs(rollouts()))
    assert batch.source("logprobs") == Source.trainer(0)
    assert batch.source("reference_logprobs") == Source("reference")
    await trainer.update(batch, ClippedLoss(anchor="trainer", kl=0.1))
    assert (await trainer.logprobs(batch)).source("logprobs") == Source.trainer(1)


def test_tokens_are_given_the_numbers_of_their_rows() -> None:
    tokens = Ragged.of([[2] * length for length in (3, 4, 5, 6)], np.int32)  # rows start at 0, 3, 7 and 12
    batch = Batch.of(tokens=tokens, loss_mask=Ragged.of([np.arange(len(row)) >= 2 for row in tokens], np.bool_))
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
    assert several.means() == pytest.approx(one.means(), rel=1e-5, abs=1e-6)
    for name, array in whole.items():
        np.testing.assert_allclose(floats(divided[name]), floats(array), rtol=0, atol=1e-6)
    assert 0 < one["correction_clipped"] < 1
    assert 0 < effective_sample_size(one) < 1


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
