"""Losses against numbers worked out by hand, torch's autograd and the definitions in the papers."""

import math
import re
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshrl.config import validate
from meshrl.data import Ragged
from meshrl.errors import ConfigError, DataError
from meshrl.losses import (
    ClippedLoss,
    CrossEntropy,
    KlEstimator,
    Loss,
    Normalise,
    clipped_surrogate,
    cross_entropy,
    kl_k1,
    kl_k2,
    kl_k3,
    token_weights,
)

RATIOS = (0.5, 0.9, 1.0, 1.1, 1.5, 4.0)


def of_ratio(*ratios: float) -> torch.Tensor:
    """Log-probs whose ratio to log-probs of zero is as given."""
    return torch.tensor([math.log(ratio) for ratio in ratios], dtype=torch.float64, requires_grad=True)


def zeros(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.float64)


def gradient(loss: torch.Tensor, parameter: torch.Tensor) -> list[float]:
    (answer,) = torch.autograd.grad(loss.sum(), parameter)
    return [float(value) for value in answer]


def test_the_clipped_surrogate_of_a_good_token_stops_above_its_bound() -> None:
    logprobs = of_ratio(*RATIOS)
    loss = clipped_surrogate(logprobs, zeros(6), torch.full((6,), 2.0).double(), 0.2, 0.2)
    assert loss.tolist() == pytest.approx([-1.0, -1.8, -2.0, -2.2, -2.4, -2.4])
    assert gradient(loss, logprobs) == pytest.approx([-1.0, -1.8, -2.0, -2.2, 0.0, 0.0])


def test_the_clipped_surrogate_of_a_bad_token_stops_below_its_bound() -> None:
    logprobs = of_ratio(*RATIOS)
    loss = clipped_surrogate(logprobs, zeros(6), torch.full((6,), -2.0).double(), 0.2, 0.2)
    assert loss.tolist() == pytest.approx([1.6, 1.8, 2.0, 2.2, 3.0, 8.0])
    assert gradient(loss, logprobs) == pytest.approx([0.0, 1.8, 2.0, 2.2, 3.0, 8.0])


def test_two_bounds_clip_each_side_at_its_own() -> None:
    logprobs = of_ratio(1.25, 1.35, 0.85, 0.75)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    loss = clipped_surrogate(logprobs, zeros(4), advantages, 0.2, 0.3)
    assert loss.tolist() == pytest.approx([-1.25, -1.3, 0.85, 0.8])
    assert gradient(loss, logprobs) == pytest.approx([-1.25, 0.0, 0.85, 0.0])


def test_a_dual_clip_bounds_the_loss_of_bad_tokens_alone() -> None:
    logprobs = of_ratio(2.0, 4.0, 4.0)
    advantages = torch.tensor([-1.0, -1.0, 1.0], dtype=torch.float64)
    loss = clipped_surrogate(logprobs, zeros(3), advantages, 0.2, 0.2, dual_clip=3.0)
    assert loss.tolist() == pytest.approx([2.0, 3.0, -1.2])
    assert gradient(loss, logprobs) == pytest.approx([2.0, 0.0, 0.0])


@given(
    st.lists(st.tuples(st.floats(-30, 0), st.floats(-30, 0), st.floats(-5, 5)), min_size=1),
    st.floats(0.01, 0.9),
    st.floats(0.01, 2.0),
)
def test_the_clipped_surrogate_is_a_pessimistic_bound(
    rows: list[tuple[float, float, float]], low: float, high: float
) -> None:
    logprobs, old, advantages = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    loss = clipped_surrogate(logprobs, old, advantages, low, high)
    unclipped = -(logprobs - old).clamp(-20, 20).exp() * advantages
    assert bool((loss >= unclipped).all())
    assert bool((loss >= -(1 + high) * advantages.abs()).all())
    assert bool(torch.isfinite(loss).all())


def test_no_ratio_overflows() -> None:
    logprobs = torch.tensor([0.0, 0.0], requires_grad=True)
    old = torch.tensor([-500.0, -500.0])
    loss = ClippedLoss()(logprobs, {"sampler_logprobs": old, "advantages": torch.tensor([0.0, -1.0])})
    assert loss.values[0] == 0
    assert all(bool(torch.isfinite(values).all()) for values in (loss.values, *loss.metrics.values()))
    assert all(math.isfinite(value) for value in gradient(loss.values, logprobs))


def test_the_kl_estimators_by_hand() -> None:
    policy, reference = torch.tensor([math.log(0.5)]).double(), torch.tensor([math.log(0.25)]).double()
    assert kl_k1(policy, reference).item() == pytest.approx(math.log(2))
    assert kl_k2(policy, reference).item() == pytest.approx(math.log(2) ** 2 / 2)
    assert kl_k3(policy, reference).item() == pytest.approx(0.5 - 1 + math.log(2))


@given(st.lists(st.tuples(st.floats(-18, 0), st.floats(-18, 0)), min_size=1))
def test_k2_and_k3_are_never_negative(rows: list[tuple[float, float]]) -> None:
    policy, reference = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    assert bool((kl_k2(policy, reference) >= 0).all())
    assert bool((kl_k3(policy, reference) >= -1e-12).all())


@given(st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3)), min_size=2, max_size=8))
def test_k1_and_k3_are_unbiased_and_the_gradient_of_k2_is_that_of_the_kl(
    rows: list[tuple[float, float]],
) -> None:
    logits, other = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    logits.requires_grad_()
    policy, reference = logits.log_softmax(0), other.log_softmax(0)
    probabilities = policy.exp()
    kl = (probabilities * (policy - reference)).sum()
    assert (probabilities * kl_k1(policy, reference)).sum().item() == pytest.approx(kl.item(), abs=1e-9)
    assert (probabilities * kl_k3(policy, reference)).sum().item() == pytest.approx(kl.item(), abs=1e-9)
    fixed = probabilities.detach()
    exact = gradient(kl, logits)
    policy, reference = logits.log_softmax(0), other.log_softmax(0)
    assert gradient(fixed * kl_k2(policy, reference), logits) == pytest.approx(exact, abs=1e-9)
    policy = logits.log_softmax(0)
    assert gradient(fixed * kl_k1(policy, reference), logits) == pytest.approx([0.0] * len(rows), abs=1e-9)


@given(st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3)), min_size=2, max_size=8))
def test_the_gradient_of_k3_is_that_of_the_kl_of_the_reference_from_the_policy(rows: list[tuple[float, float]]) -> None:
    logits, other = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    logits.requires_grad_()
    policy, reference = logits.log_softmax(0), other.log_softmax(0)
    exact = gradient(reference.exp() * (reference - policy), logits)
    policy = logits.log_softmax(0)
    assert gradient(policy.detach().exp() * kl_k3(policy, reference), logits) == pytest.approx(exact, abs=1e-9)


EQUATIONS: dict[KlEstimator, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "k2": lambda logprobs, reference: (reference - logprobs) ** 2 / 2,
    "k3": lambda logprobs, reference: reference.exp() / logprobs.exp() - (reference - logprobs) - 1,
}
"""Of each token: Schulman 2020; k3 is DeepSeekMath (arXiv:2402.03300), equation 4."""


@pytest.mark.parametrize("estimator", EQUATIONS)
def test_the_kl_in_a_loss_has_the_gradient_of_its_equation_token_by_token(estimator: KlEstimator) -> None:
    random = torch.Generator().manual_seed(5)
    reference, start = (-4 * torch.rand(20, generator=random, dtype=torch.float64) for _ in range(2))
    columns = {"sampler_logprobs": start, "advantages": torch.zeros(20).double(), "reference_logprobs": reference}
    found, expected = start.clone().requires_grad_(), start.clone().requires_grad_()
    told = ClippedLoss(kl=0.1, kl_estimator=estimator)(found, columns).values
    equation = 0.1 * EQUATIONS[estimator](expected, reference)
    torch.testing.assert_close(told, equation, rtol=1e-9, atol=1e-12)
    assert gradient(told, found) == pytest.approx(gradient(equation, expected), rel=1e-9)


def test_cross_entropy_equals_torch() -> None:
    logits, targets = torch.randn(5, 7, dtype=torch.float64), torch.tensor([0, 3, 6, 2, 2])
    logprobs = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    expected = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    torch.testing.assert_close(cross_entropy(logprobs), expected)
    torch.testing.assert_close(CrossEntropy()(logprobs, {}).values, expected)


def test_the_clipped_loss_reports_ratio_clipping_and_divergence() -> None:
    logprobs = of_ratio(1.5, 0.5, 1.5, 0.5, 5.0)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    loss = ClippedLoss(clip=0.2, dual_clip=3.0)(logprobs, {"sampler_logprobs": zeros(5), "advantages": advantages})
    assert loss.metrics["ratio"].tolist() == pytest.approx([1.5, 0.5, 1.5, 0.5, 5.0])
    assert loss.metrics["clip_fraction"].tolist() == [1.0, 0.0, 0.0, 1.0, 1.0]
    assert loss.metrics["kl"].tolist() == pytest.approx([r - 1 - math.log(r) for r in (1.5, 0.5, 1.5, 0.5, 5.0)])
    assert set(loss.metrics) == {"ratio", "clip_fraction", "kl"}
    assert not any(values.requires_grad for values in loss.metrics.values())
    zero_where_clipped = [bool(slope) for slope in gradient(loss.values, logprobs)]
    assert zero_where_clipped == [False, True, True, False, False]


def test_the_kl_to_the_reference_is_added_with_its_weight() -> None:
    logprobs = of_ratio(0.5, 2.0)
    columns = {"sampler_logprobs": logprobs.detach(), "advantages": zeros(2), "reference_logprobs": zeros(2)}
    by_hand: dict[KlEstimator, float] = {"k2": math.log(2) ** 2 / 2, "k3": 2 - 1 - math.log(2)}
    for estimator, expected in by_hand.items():
        loss = ClippedLoss(kl=0.1, kl_estimator=estimator)(logprobs, columns)
        assert loss.values[0].item() == pytest.approx(0.1 * expected)
        assert loss.metrics["reference_kl"][0].item() == pytest.approx(expected)
        assert not loss.metrics["reference_kl"].requires_grad


def test_columns_are_listed_in_a_stable_order() -> None:
    assert ClippedLoss().columns == ("sampler_logprobs", "advantages")
    assert ClippedLoss(kl=0.1).columns == ("sampler_logprobs", "advantages", "reference_logprobs")
    assert CrossEntropy().columns == ()


def test_both_losses_are_losses() -> None:
    losses: list[Loss] = [
        ClippedLoss(normalise="sequence-mean"),
        CrossEntropy(normalise="constant", constant=8),
    ]
    assert [(loss.normalise, loss.constant) for loss in losses] == [("sequence-mean", None), ("constant", 8)]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"clip": 0.0}, "clip = 0.0: must be greater than 0"),
        ({"clip": 1.5}, "clip = 1.5: must be less than 1"),
        ({"clip_high": -0.1}, "clip_high = -0.1: must be greater than 0"),
        ({"kl": -1.0}, "kl = -1.0: must be greater than or equal to 0"),
        ({"dual_clip": 1.0}, "dual_clip = 1.0: must be greater than 1"),
        ({"kl_estimator": "k1"}, "kl_estimator = 'k1': must be 'k2' or 'k3'"),
        ({"normalise": "constant"}, "which is not set: set it to the longest completion that is allowed, in tokens"),
        ({"constant": 8}, 'constant = 8 has no effect with normalise = "token-mean"'),
        ({"clip_hi": 0.3}, "no such key; did you mean clip_high?"),
    ],
)
def test_a_wrong_option_is_refused_in_words(table: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        validate(ClippedLoss, table, "file.toml")


MASK = Ragged.of([[False, True, True, True], [False, False], [False, True]], np.bool_)


def test_token_weights_by_hand() -> None:
    mean = token_weights(MASK, "token-mean", tokens=8, rows=4)
    assert mean.dtype == np.float32
    np.testing.assert_allclose(mean, np.array([0, 1, 1, 1, 0, 0, 0, 1]) / 8)
    sequences = token_weights(MASK, "sequence-mean", tokens=8, rows=4)
    np.testing.assert_allclose(sequences, np.array([0, 1 / 3, 1 / 3, 1 / 3, 0, 0, 0, 1]) / 4)
    sums = token_weights(MASK, "sequence-sum", tokens=8, rows=4)
    np.testing.assert_allclose(sums, np.array([0, 1, 1, 1, 0, 0, 0, 1]) / 4)
    constant = token_weights(MASK, "constant", tokens=8, rows=4, constant=10)
    np.testing.assert_allclose(constant, np.array([0, 1, 1, 1, 0, 0, 0, 1]) / 40)


def test_rows_without_learned_tokens_weigh_nothing() -> None:
    nothing = Ragged.of([[False, False], []], np.bool_)
    assert token_weights(nothing, "sequence-mean", tokens=5, rows=2).tolist() == [0.0, 0.0]
    assert token_weights(nothing, "token-mean", tokens=0, rows=0).tolist() == [0.0, 0.0]


def test_token_weights_refuse_totals_that_miss_rows_and_a_missing_constant() -> None:
    with pytest.raises(DataError, match=r"4 learned tokens in 2 rows, more than the 4 tokens and 1 rows"):
        token_weights(MASK, "token-mean", tokens=4, rows=1)
    with pytest.raises(ConfigError, match="which is not set"):
        token_weights(MASK, "constant", tokens=8, rows=4)


masks = st.lists(st.lists(st.booleans(), max_size=6), min_size=1, max_size=12)


@given(masks, st.sampled_from(["token-mean", "sequence-mean", "sequence-sum", "constant"]), st.data())
def test_the_loss_does_not_depend_on_how_rows_are_divided(
    rows: list[list[bool]], normalise: Normalise, data: st.DataObject
) -> None:
    tokens, learned_rows = sum(map(sum, rows)), sum(any(row) for row in rows)
    constant = 6 if normalise == "constant" else None
    inner = data.draw(st.lists(st.integers(0, len(rows)), max_size=4).map(sorted))

    def weights(part: list[list[bool]]) -> list[float]:
        mask = Ragged.of(part, np.bool_)
        found = token_weights(mask, normalise, tokens=tokens, rows=learned_rows, constant=constant)
        return [float(weight) for weight in found]

    parts = [rows[start:stop] for start, stop in pairwise([0, *inner, len(rows)])]
    assert [weight for part in parts for weight in weights(part)] == weights(rows)
    if tokens and normalise in ("token-mean", "sequence-mean"):
        assert sum(weights(rows)) == pytest.approx(1, rel=1e-5)
