"""Pairs on the torch backend: one update is the gradient of the pairs' loss, however its rows are divided."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import meshrl as rl
from meshrl_torch.train.one_rank import TorchPolicy, TorchReference
from tests.backends.material import MODEL, SGD, by_row, near, norm_of

BETA = 0.5
COUNT = 10


def pairs() -> rl.Batch:
    """Pairs with prompts of their own, whose rows lie far apart; in one neither is preferred."""
    rng = np.random.default_rng(0)
    heads = [rng.integers(2, 11, rng.integers(1, 9)) for _ in range(COUNT)]
    rows = [(heads[row % COUNT], rng.integers(1, 11, rng.integers(1, 10))) for row in range(2 * COUNT)]
    preferred = np.repeat(np.array([1, -1], np.int8), COUNT)
    preferred[[3, 3 + COUNT]] = 0
    return rl.Batch.of(
        tokens=rl.Ragged.of([np.concatenate(row) for row in rows], np.int32),
        loss_mask=rl.Ragged.of([np.arange(len(a) + len(b)) >= len(a) for a, b in rows], np.bool_),
        groups=np.tile(np.arange(COUNT), 2),
        preferred=preferred,
    )


async def test_an_update_is_the_gradient_of_the_pairs_loss_for_any_micro_batches(small: str) -> None:
    def policy(budget: int) -> TorchPolicy:
        return TorchPolicy(rl.PolicyConfig(model=small, optimizer=SGD, micro_batch_tokens=budget))

    reference = TorchReference(rl.ReferenceConfig(model=MODEL, seed=2))
    batch = await rl.preference_columns(await reference.logprobs(await policy(1000).logprobs(pairs())))

    network = AutoModelForCausalLM.from_pretrained(small, dtype=torch.float64)
    sums: list[torch.Tensor] = []
    for row, logprobs in enumerate(by_row(network, batch)):
        ratios = logprobs - torch.from_numpy(batch.ragged("reference_logprobs")[row].astype(np.float64))
        sums.append(ratios[torch.from_numpy(batch.loss_mask[row].copy())].sum())
    margins = torch.stack(sums[:COUNT]) - torch.stack(sums[COUNT:])
    kept = [pair for pair in range(COUNT) if pair != 3]
    whole = -torch.nn.functional.logsigmoid(BETA * margins)[kept].sum() / COUNT
    whole.backward()

    updated = []
    for budget in (1000, 60, 1):
        trainer = policy(budget)
        metrics = await trainer.update(batch, rl.PreferenceLoss(beta=BETA))
        assert metrics["loss"] == pytest.approx(whole.item(), rel=1e-5)
        assert metrics["grad_norm"] == pytest.approx(norm_of(network), rel=1e-4)
        assert metrics["drift"] == pytest.approx(0, abs=1e-5)
        updated.append(await trainer.weights())
    for other in updated[1:]:
        near(other, updated[0], 1e-6)
