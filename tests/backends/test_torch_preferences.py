"""Pairs on the torch backend: one update is the gradient of the pairs' loss, however its rows are divided."""

import numpy as np
import pytest
import torch

from meshrl import (
    Batch,
    NewModel,
    OptimizerConfig,
    PolicyConfig,
    PreferenceLoss,
    Ragged,
    ReferenceConfig,
    preference_columns,
)
from meshrl_hf.packing import learned, micro_batches
from meshrl_hf.scoring import predicted
from meshrl_torch.policy import TorchPolicy
from meshrl_torch.reference import TorchReference

MODEL = NewModel(characters="abcdefgh>", hidden_size=16, ffn_size=24, layers=2, heads=2, max_tokens=48)
SGD = OptimizerConfig(lr=1.0, eps=1.0, max_grad_norm=None)
"""With a large eps AdamW's first step is nearly the gradient."""
BETA = 0.5


def policy(budget: int) -> TorchPolicy:
    return TorchPolicy(PolicyConfig(model=MODEL, seed=1, optimizer=SGD, micro_batch_tokens=budget))


def pairs(count: int = 10) -> Batch:
    """Pairs with prompts of their own, whose rows lie far apart; in one neither is preferred."""
    rng = np.random.default_rng(0)
    heads = [rng.integers(2, 11, rng.integers(1, 9)) for _ in range(count)]
    rows = [(heads[row % count], rng.integers(1, 11, rng.integers(1, 10))) for row in range(2 * count)]
    preferred = np.repeat(np.array([1, -1], np.int8), count)
    preferred[[3, 3 + count]] = 0
    return Batch.of(
        tokens=Ragged.of([np.concatenate(row) for row in rows], np.int32),
        loss_mask=Ragged.of([np.arange(len(a) + len(b)) >= len(a) for a, b in rows], np.bool_),
        groups=np.tile(np.arange(count), 2),
        preferred=preferred,
    )


async def test_an_update_is_the_gradient_of_the_pairs_loss_for_any_micro_batches() -> None:
    reference = TorchReference(ReferenceConfig(model=MODEL, seed=2))
    plain = policy(1000)
    batch = await preference_columns(await reference.logprobs(await plain.logprobs(pairs())))

    rows = learned(batch.tokens, batch.loss_mask)  # all rows at once, through which torch differentiates
    (micro,) = micro_batches(batch.tokens, rows, batch.loss_mask, 1000)
    logprobs = predicted(plain._model, batch, micro)[:, 0].double()
    row = np.searchsorted(batch.tokens.offsets, micro.target, side="right") - 1
    ratios = logprobs - torch.from_numpy(batch.ragged("reference_logprobs").values[micro.target].astype(np.float64))
    sums = torch.zeros(20, dtype=torch.float64).index_add(0, torch.from_numpy(row), ratios)
    kept = [pair for pair in range(10) if pair != 3]
    whole = -torch.nn.functional.logsigmoid(BETA * (sums[:10] - sums[10:]))[kept].sum() / 10
    whole.backward()
    slopes = [each.grad for each in plain._model.network.parameters() if each.grad is not None]

    updated = []
    for budget in (1000, 60, 1):
        trainer = policy(budget)
        metrics = await trainer.update(batch, PreferenceLoss(beta=BETA))
        assert metrics["loss"] == pytest.approx(whole.item(), rel=1e-5)
        assert metrics["grad_norm"] == pytest.approx(float(torch.nn.utils.get_total_norm(slopes)), rel=1e-4)
        assert metrics["drift"] == pytest.approx(0, abs=1e-5)
        updated.append((await trainer.weights()).tensors)
    for other in updated[1:]:
        for name, array in updated[0].items():
            np.testing.assert_allclose(np.asarray(other[name], np.float32), np.asarray(array, np.float32), atol=1e-6)


async def test_drift_tells_that_margins_are_of_an_older_policy() -> None:
    reference, trainer = TorchReference(ReferenceConfig(model=MODEL, seed=2)), policy(1000)
    batch = await preference_columns(await reference.logprobs(await trainer.logprobs(pairs())))
    fast = PolicyConfig(model=MODEL, seed=1, optimizer=OptimizerConfig(lr=1e-2))
    trainer = TorchPolicy(fast)
    drifts = [(await trainer.update(batch, PreferenceLoss(beta=BETA)))["drift"] for _ in range(3)]
    assert drifts[0] < 1e-5
    assert 1e-2 < drifts[1] < drifts[2]
