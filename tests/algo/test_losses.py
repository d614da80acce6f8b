"""Losses against numbers worked out by hand and their definitions, and corrections against those of their papers."""

import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import meshrl as rl
from meshrl import algo
from meshrl.algo.policy_loss import importance_weights, reverse_kl
from meshrl.config import Config, validate
from meshrl.data import Metrics, Ragged
from meshrl.errors import ConfigError, DataError


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def gradient(loss: torch.Tensor, parameter: torch.Tensor) -> list[float]:
    (answer,) = torch.autograd.grad(loss.sum(), parameter)
    return [float(value) for value in answer]


def test_the_clipped_loss_by_hand_and_what_it_tells() -> None:
    """It stops above its bound for a good token and below it for a bad one, whose loss a dual clip bounds."""
    ratios = (1.25, 1.5, 0.5, 1.5, 0.75, 0.5, 5.0, 5.0)
    logprobs = column(*map(math.log, ratios)).requires_grad_()
    columns = {"sampler_logprobs": column(*[0] * 8), "advantages": column(1, 1, 1, -2, -1, -2, -1, 1)}
    loss = rl.ClippedLoss(clip=0.2, clip_high=0.3, dual_clip=3.0)(logprobs, columns)
    assert loss.values.tolist() == pytest.approx([-1.25, -1.3, -0.5, 3.0, 0.8, 1.6, 3.0, -1.3])
    assert gradient(loss.values, logprobs) == pytest.approx([-1.25, 0, -0.5, 3.0, 0, 0, 0, 0])
    assert loss.metrics["clip_fraction"].tolist() == [0, 1, 0, 0, 1, 1, 1, 1]
    assert loss.metrics["ratio"].tolist() == pytest.approx(ratios)
    assert loss.metrics["kl"].tolist() == pytest.approx([r - 1 - math.log(r) for r in ratios])
    assert set(loss.metrics) == {"ratio", "clip_fraction", "kl"}


@given(st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3)), min_size=2, max_size=8))
def test_estimators_of_the_kl_are_unbiased_or_have_its_gradient(rows: list[tuple[float, float]]) -> None:
    """Over the policy's tokens: k1, k3 and a loss of `reverse_kl` are the KL, k2 and `reverse_kl` have its gradient.

    k3 has that of the KL of the reference from the policy, and k1 has none.
    """
    logits, other = (column(*numbers) for numbers in zip(*rows, strict=True))
    logits.requires_grad_()
    policy, reference = logits.log_softmax(0), other.log_softmax(0)
    fixed = policy.detach().exp()
    p, q = fixed.numpy(), reference.exp().numpy()
    kl = float(np.sum(p * np.log(p / q)))
    of_kl, of_reverse = p * (np.log(p / q) - kl), p - q  # by the logits of a softmax, worked out by hand
    for estimated, value, slope in (
        (algo.kl_k1(policy, reference), kl, np.zeros(len(rows))),
        (algo.kl_k2(policy, reference), float(np.sum(p * np.log(p / q) ** 2)) / 2, of_kl),
        (algo.kl_k3(policy, reference), kl, of_reverse),
        (reverse_kl(policy, policy.detach(), reference), kl, of_kl),
    ):
        assert (fixed * estimated).sum().item() == pytest.approx(value, abs=1e-9)
        (found,) = torch.autograd.grad((fixed * estimated).sum(), logits, retain_graph=True)
        np.testing.assert_allclose(found.numpy(), slope, atol=1e-9)


@pytest.mark.parametrize("most", [1e9, 1.5])
def test_a_weight_makes_the_kl_to_a_teacher_unbiased_on_others_tokens_up_to_its_bound(most: float) -> None:
    random = np.random.default_rng(7)
    logits, sampled, taught = (torch.tensor(random.normal(size=6)).log_softmax(0) for _ in range(3))
    student = logits.requires_grad_()
    p, s, q = (np.exp(each.detach().numpy()) for each in (student, sampled, taught))
    tokens = reverse_kl(student, sampled, taught, most)
    np.testing.assert_allclose(tokens.detach(), np.minimum(p / s, most) * (np.log(p) - np.log(q)), atol=1e-12)
    slope = gradient(sampled.exp() * tokens, student)
    np.testing.assert_allclose(slope, s * np.minimum(p / s, most) * np.log(p / q), atol=1e-12)


def test_distillation_tells_the_kl_and_its_ratio() -> None:
    columns = {"sampler_logprobs": column(-1.0, -3.0), "reference_logprobs": column(-0.5, -4.0)}
    told = rl.ReverseKl()(column(-1.0, -2.0).requires_grad_(), columns)
    assert told.values.tolist() == pytest.approx([-0.5, 2 * 2.0])
    assert told.metrics["teacher_kl"].tolist() == [-0.5, 2.0]
    assert told.metrics["ratio"].tolist() == pytest.approx([1.0, np.e])
    assert not any(each.requires_grad for each in told.metrics.values())


def test_a_value_stops_where_it_has_moved_towards_the_return_by_more_than_the_clip() -> None:
    # Within the clip, beyond it, past the return, and beyond it the wrong way.
    predicted = column(0.1, 0.5, 3.0, -0.5).requires_grad_()
    columns = {"values": torch.zeros_like(predicted), "returns": torch.ones_like(predicted)}
    judged = rl.ValueLoss(clip=0.2)(predicted, columns)
    assert judged.values.tolist() == pytest.approx([0.405, 0.32, 2.0, 1.125])
    assert gradient(judged.values, predicted) == pytest.approx([-0.9, 0.0, 2.0, -1.5])
    assert judged.metrics["value_error"].tolist() == pytest.approx([0.81, 0.25, 4.0, 2.25])
    assert judged.metrics["value_clip_fraction"].tolist() == [0, 1, 0, 0]
    assert rl.ValueLoss()(predicted, columns).metrics["value_clip_fraction"].tolist() == [0] * 4


def test_the_explained_variance_adds_up_over_parts() -> None:
    def metrics(values: torch.Tensor, returns: torch.Tensor) -> Metrics:
        told = rl.ValueLoss()(values, {"values": values, "returns": returns}).metrics
        return Metrics({name: (float(each.sum()), len(values)) for name, each in told.items()})

    values, returns = torch.randn(2, 20, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    whole = Metrics.mean([metrics(values[:7], returns[:7]), metrics(values[7:], returns[7:])])
    assert rl.explained_variance(whole) == pytest.approx(1 - float((returns - values).var() / returns.var()))
    assert math.isnan(rl.explained_variance(metrics(values, torch.full_like(returns, 0.1)))), "nothing to explain"


def test_a_step_is_told_right_where_its_score_is_on_the_labels_side() -> None:
    scores, labels = column(0.4, -2, 1.5, 0.1, -0.3, 3, -1, 0, 0, math.nan), column(1, 0, 0.25, 1, 0, 0.75, 1, 1, 0, 0)
    told = rl.ProcessLoss()(scores, {"labels": labels}).metrics["accuracy"]
    assert told.tolist() == [1, 1, 0, 1, 1, 1, 0, 0, 0, 0]


def test_numbers_far_apart_give_finite_numbers() -> None:
    logprobs = torch.zeros(3, requires_grad=True)
    far = {"sampler_logprobs": torch.tensor([-900.0, 900.0, -900.0]), "advantages": torch.tensor([-1.0, 1.0, 0.0])}
    far |= {"rows": torch.arange(3)}
    pair = {name: torch.tensor([1e4, -1e4, 0.0]) for name in ("token_scores", "margins", "pair_sums")}
    pair |= {"least_margins": torch.zeros(3), "preferred": torch.tensor([1, 1, -1])}
    weighed = rl.ReinforceLoss(correction=algo.Correction(high=2.0))
    losses: list[algo.Loss] = [rl.ClippedLoss(), rl.CispoLoss(), rl.SequenceLoss(), weighed]
    for loss, columns in [*((loss, far) for loss in losses), (rl.BradleyTerryLoss(), pair)]:
        told = loss(logprobs, columns)
        for values in (told.values, *told.metrics.values(), torch.tensor(gradient(told.values, logprobs))):
            assert bool(torch.isfinite(values).all()), loss
    assert rl.ClippedLoss()(logprobs, far).values[2] == 0, "an infinite ratio times no advantage would be NaN"
    margins = column(-1e6, 1e6).requires_grad_()
    of_margins = rl.PreferenceLoss(beta=1.0, smoothing=0.1).of_margins(margins)
    assert of_margins.tolist() == pytest.approx([0.9e6, 0.1e6])
    assert gradient(of_margins, margins) == pytest.approx([-0.9, 0.1])


def test_a_loss_lists_what_it_reads_in_a_stable_order() -> None:
    base = ("sampler_logprobs", "advantages")
    token, sequence = algo.Correction(high=2.0), algo.Correction(level="sequence", high=2.0)
    all_there_are = rl.ClippedLoss(anchor="trainer", correction=sequence, kl=0.1)
    expected: list[tuple[algo.Loss, tuple[str, ...]]] = [
        (rl.ClippedLoss(), base),
        (rl.ClippedLoss(kl=0.1), (*base, "reference_logprobs")),
        (rl.ClippedLoss(anchor="trainer", correction=token), ("logprobs", *base)),
        (all_there_are, ("logprobs", *base, "reference_logprobs", "rows")),
        (rl.ReinforceLoss(correction=sequence), (*base, "rows")),
        (rl.CispoLoss(kl=0.1), (*base, "reference_logprobs")),
        (rl.SequenceLoss(anchor="trainer"), ("logprobs", "advantages", "rows")),
        (rl.ReverseKl(), ("sampler_logprobs", "reference_logprobs")),
        (rl.CrossEntropy(), ()),
    ]
    assert [loss.columns for loss, _ in expected] == [columns for _, columns in expected]


NO_CONSTANT = "which is not set: set it to the longest completion that is allowed, in tokens"
WRONG: list[tuple[type[Config], dict[str, Any], str]] = [
    (rl.ClippedLoss, {"clip": 0.0}, "clip = 0.0: must be greater than 0"),
    (rl.ClippedLoss, {"dual_clip": 1.0}, "dual_clip = 1.0: must be greater than 1"),
    (rl.ClippedLoss, {"normalise": "constant"}, NO_CONSTANT),
    (rl.ClippedLoss, {"constant": 8}, 'constant = 8 has no effect with normalise = "token-mean"'),
    (rl.ClippedLoss, {"correction": {"high": 2.0}}, 'correction has no effect with anchor = "sampler"'),
    (algo.Correction, {"high": 0.5}, "high = 0.5: must be greater than or equal to 1"),
    (algo.Correction, {"high": 2.0, "low": 1.5}, "low = 1.5: must be less than or equal to 1"),
    (rl.ConstantLoss, {"clip": 0.1}, NO_CONSTANT),
    (rl.ReinforceLoss, {"constant": 8}, 'constant = 8 has no effect with normalise = "sequence-sum"'),
    (rl.SequenceLoss, {"clip": 0.0}, "clip = 0.0: must be greater than 0"),
    (rl.PreferenceLoss, {"beta": 0.0}, "beta = 0.0: must be greater than 0"),
    (rl.PreferenceLoss, {"smoothing": 0.5}, "smoothing = 0.5: must be less than 0.5"),
    (rl.PreferenceLoss, {"form": "ipo", "smoothing": 0.1}, 'smoothing = 0.1 has no effect with form = "ipo"'),
    (rl.BradleyTerryLoss, {"centre": -0.1}, "centre = -0.1: must be greater than or equal to 0"),
]


def test_a_wrong_option_is_refused_in_words() -> None:
    for schema, table, message in WRONG:
        with pytest.raises(ConfigError, match=re.escape(message)):
            validate(schema, table, "file.toml")


MASK = Ragged.of([[False, True, True, True], [False, False], [False, True]], np.bool_)


def test_token_weights_refuse_totals_that_miss_rows_and_a_missing_constant() -> None:
    for tokens, rows in ((4, 1), (3, 2)):
        told = f"4 learned tokens in 2 rows, more than the {tokens} tokens and {rows} rows"
        with pytest.raises(DataError, match=told):
            algo.token_weights(MASK, "token-mean", tokens=tokens, rows=rows)
    with pytest.raises(ConfigError, match="which is not set"):
        algo.token_weights(MASK, "constant", tokens=8, rows=4)


def test_weights_by_hand_at_their_bounds_too() -> None:
    weights = torch.tensor([0.25, 0.5, 1.0, 2.0, 3.0])
    for bound, by_hand in (
        (algo.Correction(low=0.5, high=2.0), [0.5, 0.5, 1.0, 2.0, 2.0]),
        (algo.Correction(how="mask", high=2.0), [0.25, 0.5, 1.0, 2.0, 0.0]),
        (algo.Correction(how="mask", low=0.5, high=2.0), [0.0, 0.5, 1.0, 2.0, 0.0]),
    ):
        assert bound(weights).tolist() == by_hand
    logprobs, columns = torch.zeros(5), {"sampler_logprobs": torch.zeros(5), "advantages": torch.ones(5)}
    loss = rl.ClippedLoss(anchor="trainer", correction=algo.Correction(low=0.5, high=2.0))
    clipped = loss(logprobs, {**columns, "logprobs": weights.log()}).metrics["correction_clipped"]
    assert clipped.tolist() == [1, 0, 0, 0, 1]


def test_the_weight_of_a_long_row_never_overflows() -> None:
    far = torch.full((3000,), 9.0)
    for trainer, sampler in ((far, -far), (-far, far)):
        weights = importance_weights(trainer, sampler, torch.zeros(3000, dtype=torch.int64))
        assert bool(torch.isfinite(weights).all())
        assert bool((weights > 0).all()), "a weight of 0 says that the token was masked"


def test_a_masked_token_learns_from_the_kl_to_the_reference_alone() -> None:
    logprobs = torch.tensor([-1.0], requires_grad=True)
    columns = {name: torch.tensor([at]) for name, at in (("logprobs", -1.0), ("sampler_logprobs", -9.0))}
    columns |= {"advantages": torch.tensor([1.0]), "reference_logprobs": torch.tensor([-4.0])}
    loss = rl.ClippedLoss(anchor="trainer", kl=0.5, kl_estimator="k2", correction=algo.Correction(how="mask", high=2.0))
    loss(logprobs, columns).values.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0.5 * 3.0]


def test_the_effective_sample_size_is_that_of_the_weights() -> None:
    for weights, expected in (((1.0, 3.0), 16 / 10 / 2), ((2.0, 2.0, 2.0), 1.0), ((0.0, 0.0), 0.0)):
        parts = [Metrics.of(correction=(weight, 1), correction_squared=(weight**2, 1)) for weight in weights]
        assert algo.effective_sample_size(Metrics.mean(parts)) == pytest.approx(expected)
