"""Corrections of the clipped loss, against slow ones written as in the papers."""

import math
from typing import TypeAlias

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from meshrl.algo import ClippedLoss, Correction, effective_sample_size
from meshrl.algo.policy_loss import importance_weights
from meshrl.data import Metrics

Tokens: TypeAlias = list[tuple[float, float, float, float, int]]
"""The policy's log-prob, the trainer's before its updates, the sampler's, the advantage and the row of each token."""

LOGPROBS = st.floats(-9, 0)
TOKENS = st.lists(st.tuples(LOGPROBS, LOGPROBS, LOGPROBS, st.floats(-3, 3), st.integers(0, 3)), min_size=1, max_size=12)
CORRECTIONS = st.builds(
    Correction,
    level=st.sampled_from(["token", "sequence"]),
    how=st.sampled_from(["truncate", "mask"]),
    low=st.none() | st.floats(0.05, 1),
    high=st.floats(1, 8),
)


def tensors(tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy's log-probs, which have a gradient, and the columns of a loss."""
    policy, anchor, sampler, advantages, rows = zip(*tokens, strict=True)
    columns = {"logprobs": anchor, "sampler_logprobs": sampler, "advantages": advantages}
    found = {name: torch.tensor(column, dtype=torch.float64) for name, column in columns.items()}
    found["rows"] = torch.from_numpy(np.unique(rows, return_inverse=True)[1])
    return torch.tensor(policy, dtype=torch.float64, requires_grad=True), found


def slow_weights(tokens: Tokens, correction: Correction) -> Tensor:
    weights: list[float] = []
    for _, anchor, sampler, _, own in tokens:
        log_weight = anchor - sampler
        if correction.level == "sequence":
            log_weight = sum(there - here for _, there, here, _, row in tokens if row == own)
        weight = math.exp(min(max(log_weight, -20), 20))
        bounded = max(correction.low or 0.0, min(weight, correction.high))
        weights.append(0.0 if correction.how == "mask" and bounded != weight else bounded)
    return torch.tensor(weights, dtype=torch.float64)


@given(TOKENS, CORRECTIONS)
def test_a_corrected_loss_is_the_plain_one_times_the_weights(tokens: Tokens, correction: Correction) -> None:
    logprobs, columns = tensors(tokens)
    plain = ClippedLoss(anchor="trainer", dual_clip=3.0)
    corrected = plain.model_copy(update={"correction": correction})
    weights = slow_weights(tokens, correction)
    found, expected = corrected(logprobs, columns), plain(logprobs, columns)
    slopes = torch.autograd.grad(expected.values.sum(), logprobs)[0] * weights
    # A processor may take advantages as small as 5e-324 for 0 in one order of operations and not in the other.
    np.testing.assert_allclose(found.values.detach(), expected.values.detach() * weights, rtol=1e-6, atol=1e-300)
    np.testing.assert_allclose(torch.autograd.grad(found.values.sum(), logprobs)[0], slopes, rtol=1e-6, atol=1e-300)
    np.testing.assert_allclose(found.metrics["correction"], weights, rtol=1e-6)
    np.testing.assert_allclose(found.metrics["correction_squared"], weights**2, rtol=1e-6)
    for name, values in expected.metrics.items():
        assert torch.equal(found.metrics[name], values), name
    assert not any(values.requires_grad for values in found.metrics.values())


@given(TOKENS, CORRECTIONS)
def test_the_anchor_takes_the_samplers_place(tokens: Tokens, correction: Correction) -> None:
    logprobs, columns = tensors(tokens)
    found = ClippedLoss(anchor="trainer")(logprobs, columns)
    expected = ClippedLoss()(logprobs, {**columns, "sampler_logprobs": columns["logprobs"]})
    assert torch.equal(found.values, expected.values)
    assert found.metrics.keys() - expected.metrics.keys() == {"sampler_ratio", "sampler_kl"}
    gap = (columns["logprobs"] - columns["sampler_logprobs"]).numpy()
    np.testing.assert_allclose(found.metrics["sampler_ratio"], np.exp(gap), rtol=1e-9)
    np.testing.assert_allclose(found.metrics["sampler_kl"], np.exp(gap) - 1 - gap, atol=1e-9)
    columns["logprobs"] = columns["sampler_logprobs"]  # where both agree nothing is corrected
    found = ClippedLoss(anchor="trainer", correction=correction)(logprobs, columns)
    assert torch.equal(found.values, ClippedLoss()(logprobs, columns).values)
    assert not found.metrics["correction_clipped"].any()


def test_weights_by_hand_at_their_bounds_too() -> None:
    weights = torch.tensor([0.25, 0.5, 1.0, 2.0, 3.0])
    for bound, by_hand in (
        (Correction(low=0.5, high=2.0), [0.5, 0.5, 1.0, 2.0, 2.0]),
        (Correction(how="mask", high=2.0), [0.25, 0.5, 1.0, 2.0, 0.0]),
        (Correction(how="mask", low=0.5, high=2.0), [0.0, 0.5, 1.0, 2.0, 0.0]),
    ):
        assert bound(weights).tolist() == by_hand
    logprobs, columns = torch.zeros(5), {"sampler_logprobs": torch.zeros(5), "advantages": torch.ones(5)}
    loss = ClippedLoss(anchor="trainer", correction=Correction(low=0.5, high=2.0))
    clipped = loss(logprobs, {**columns, "logprobs": weights.log()}).metrics["correction_clipped"]
    assert clipped.tolist() == [1, 0, 0, 0, 1]


def test_a_rows_weight_is_the_product_of_its_tokens_and_never_overflows() -> None:
    trainer, sampler = torch.tensor([2.0, 3.0, 0.5, 5.0]).log(), torch.zeros(4)
    assert importance_weights(trainer, sampler).tolist() == pytest.approx([2, 3, 0.5, 5])
    rows = torch.tensor([1, 0, 1, 0])
    assert importance_weights(trainer, sampler, rows).tolist() == pytest.approx([1, 15, 1, 15])
    far = torch.full((3000,), 9.0)
    for trainer, sampler in ((far, -far), (-far, far)):
        weights = importance_weights(trainer, sampler, torch.zeros(3000, dtype=torch.int64))
        assert bool(torch.isfinite(weights).all())
        assert bool((weights > 0).all()), "a weight of 0 says that the token was masked"


def test_a_masked_token_learns_from_the_kl_to_the_reference_alone() -> None:
    logprobs = torch.tensor([-1.0], requires_grad=True)
    columns = {name: torch.tensor([at]) for name, at in (("logprobs", -1.0), ("sampler_logprobs", -9.0))}
    columns |= {"advantages": torch.tensor([1.0]), "reference_logprobs": torch.tensor([-4.0])}
    loss = ClippedLoss(anchor="trainer", kl=0.5, kl_estimator="k2", correction=Correction(how="mask", high=2.0))
    loss(logprobs, columns).values.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0.5 * 3.0]


def test_the_effective_sample_size_is_that_of_the_weights() -> None:
    for weights, expected in (((1.0, 3.0), 16 / 10 / 2), ((2.0, 2.0, 2.0), 1.0), ((0.0, 0.0), 0.0)):
        parts = [Metrics.of(correction=(weight, 1), correction_squared=(weight**2, 1)) for weight in weights]
        assert effective_sample_size(Metrics.mean(parts)) == pytest.approx(expected)
