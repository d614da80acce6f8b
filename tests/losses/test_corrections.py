"""Corrections of the clipped loss, against slow ones written as in the papers; and whose log-probs a loss takes."""

import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from meshrl.config import validate
from meshrl.data import Batch, Metrics, Ragged, Source
from meshrl.errors import ConfigError, DataError
from meshrl.losses import (
    ClippedLoss,
    Correction,
    CrossEntropy,
    ValueLoss,
    check_predicts,
    check_sources,
    effective_sample_size,
    importance_weights,
)
from meshrl.losses.correction import masked, truncated

LOGPROBS = st.floats(-9, 0)
TOKENS = st.lists(st.tuples(LOGPROBS, LOGPROBS, LOGPROBS, st.floats(-3, 3), st.integers(0, 3)), min_size=1, max_size=12)
"""The policy's log-prob, the trainer's before its updates, the sampler's, the advantage and the row of each token."""
BOUNDS = st.tuples(st.none() | st.floats(0.05, 1), st.floats(1, 8))


def tensors(tokens: list[tuple[float, float, float, float, int]]) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy's log-probs, which have a gradient, and the columns of a loss."""
    policy, anchor, sampler, advantages, rows = zip(*tokens, strict=True)
    columns = {"logprobs": anchor, "sampler_logprobs": sampler, "advantages": advantages}
    found = {name: torch.tensor(column, dtype=torch.float64) for name, column in columns.items()}
    found["rows"] = torch.from_numpy(np.unique(rows, return_inverse=True)[1])
    return torch.tensor(policy, dtype=torch.float64, requires_grad=True), found


def slow_weights(tokens: list[tuple[float, float, float, float, int]], correction: Correction) -> list[float]:
    weights: list[float] = []
    for _, anchor, sampler, _, own in tokens:
        log_weight = anchor - sampler
        if correction.level == "sequence":
            log_weight = sum(there - here for _, there, here, _, row in tokens if row == own)
        weight = math.exp(min(max(log_weight, -20), 20))
        low = correction.low or 0.0
        if correction.how == "mask":
            weights.append(weight if low <= weight <= correction.high else 0.0)
        else:
            weights.append(max(low, min(weight, correction.high)))
    return weights


CORRECTIONS = st.builds(
    lambda level, how, bounds: Correction(level=level, how=how, low=bounds[0], high=bounds[1]),
    st.sampled_from(["token", "sequence"]),
    st.sampled_from(["truncate", "mask"]),
    BOUNDS,
)


@given(TOKENS, CORRECTIONS)
def test_a_corrected_loss_is_the_plain_one_times_the_weights(
    tokens: list[tuple[float, float, float, float, int]], correction: Correction
) -> None:
    logprobs, columns = tensors(tokens)
    plain = ClippedLoss(anchor="trainer", dual_clip=3.0)
    corrected = plain.model_copy(update={"correction": correction})
    weights = torch.tensor(slow_weights(tokens, correction), dtype=torch.float64)
    found = corrected(logprobs, columns)
    expected = plain(logprobs, columns)
    slopes = torch.autograd.grad(expected.values.sum(), logprobs)[0] * weights
    # A processor may take advantages as small as 5e-324 for 0 in one order of operations and not in the other.
    np.testing.assert_allclose(found.values.detach(), expected.values.detach() * weights, rtol=1e-6, atol=1e-300)
    np.testing.assert_allclose(torch.autograd.grad(found.values.sum(), logprobs)[0], slopes, rtol=1e-6, atol=1e-300)
    np.testing.assert_allclose(found.metrics["correction"], weights, rtol=1e-6)
    np.testing.assert_allclose(found.metrics["correction_squared"], weights**2, rtol=1e-6)
    for name, values in expected.metrics.items():
        assert torch.equal(found.metrics[name], values), name
    assert not any(values.requires_grad for values in found.metrics.values())


@given(TOKENS)
def test_the_anchor_takes_the_samplers_place(tokens: list[tuple[float, float, float, float, int]]) -> None:
    logprobs, columns = tensors(tokens)
    found = ClippedLoss(anchor="trainer")(logprobs, columns)
    expected = ClippedLoss()(logprobs, {**columns, "sampler_logprobs": columns["logprobs"]})
    assert torch.equal(found.values, expected.values)
    assert found.metrics.keys() - expected.metrics.keys() == {"sampler_ratio", "sampler_kl"}
    gap = (columns["logprobs"] - columns["sampler_logprobs"]).numpy()
    np.testing.assert_allclose(found.metrics["sampler_ratio"], np.exp(gap), rtol=1e-9)
    np.testing.assert_allclose(found.metrics["sampler_kl"], np.exp(gap) - 1 - gap, atol=1e-9)


@given(TOKENS, CORRECTIONS)
def test_where_trainer_and_sampler_agree_nothing_is_corrected(
    tokens: list[tuple[float, float, float, float, int]], correction: Correction
) -> None:
    logprobs, columns = tensors(tokens)
    columns["logprobs"] = columns["sampler_logprobs"]
    found = ClippedLoss(anchor="trainer", correction=correction)(logprobs, columns)
    assert torch.equal(found.values, ClippedLoss()(logprobs, columns).values)
    assert not found.metrics["correction_clipped"].any()


def test_tokens_by_hand() -> None:
    weights = torch.tensor([0.25, 0.5, 1.0, 2.0, 3.0])
    assert truncated(weights, None, 2.0).tolist() == [0.25, 0.5, 1.0, 2.0, 2.0]
    assert truncated(weights, 0.5, 2.0).tolist() == [0.5, 0.5, 1.0, 2.0, 2.0]
    assert masked(weights, None, 2.0).tolist() == [0.25, 0.5, 1.0, 2.0, 0.0]
    assert masked(weights, 0.5, 2.0).tolist() == [0.0, 0.5, 1.0, 2.0, 0.0]


def test_a_rows_weight_is_the_product_of_its_tokens() -> None:
    trainer, sampler = torch.tensor([2.0, 3.0, 0.5, 5.0]).log(), torch.zeros(4)
    assert importance_weights(trainer, sampler).tolist() == pytest.approx([2, 3, 0.5, 5])
    rows = torch.tensor([1, 0, 1, 0])
    assert importance_weights(trainer, sampler, rows).tolist() == pytest.approx([1, 15, 1, 15])


def test_no_weight_overflows() -> None:
    far = torch.full((3000,), 9.0)
    for trainer, sampler in ((far, -far), (-far, far)):
        weights = importance_weights(trainer, sampler, torch.zeros(3000, dtype=torch.int64))
        assert bool(torch.isfinite(weights).all())
        assert bool((weights > 0).all()), "a weight of 0 says that the token was masked"


def test_the_kl_to_the_reference_is_not_corrected() -> None:
    logprobs, columns = tensors([(-1.0, -1.0, -3.0, 0.0, 0)])
    columns["reference_logprobs"] = torch.tensor([-1.5]).double()
    loss = ClippedLoss(anchor="trainer", correction=Correction(high=2.0), kl=0.1)
    plain = ClippedLoss(anchor="trainer", kl=0.1)
    assert torch.equal(loss(logprobs, columns).values, plain(logprobs, columns).values)


def test_it_reads_what_it_needs() -> None:
    token, sequence = Correction(high=2.0), Correction(level="sequence", high=2.0)
    base = ("logprobs", "sampler_logprobs", "advantages")
    assert ClippedLoss(anchor="trainer").columns == base
    assert ClippedLoss(anchor="trainer", correction=token).columns == base
    assert ClippedLoss(anchor="trainer", correction=sequence, kl=0.1).columns == (*base, "reference_logprobs", "rows")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"correction": {"high": 2.0}}, 'correction has no effect with anchor = "sampler": the weight pi_anchor'),
        ({"anchor": "trainer", "correction": {}}, "correction.high: is missing"),
        ({"anchor": "trainer", "correction": {"high": 0.5}}, "high = 0.5: must be greater than or equal to 1"),
        ({"anchor": "trainer", "correction": {"high": 2.0, "low": 1.5}}, "low = 1.5: must be less than or equal to 1"),
        (
            {"anchor": "trainer", "correction": {"high": 2.0, "how": "clip"}},
            "how = 'clip': must be 'truncate' or 'mask'",
        ),
        ({"anchor": "policy"}, "anchor = 'policy': must be 'sampler' or 'trainer'"),
    ],
)
def test_a_correction_that_cannot_be_is_refused(table: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        validate(ClippedLoss, table, "file.toml")


@given(st.lists(st.floats(0, 8), min_size=1))
def test_the_effective_sample_size_is_that_of_the_weights(weights: list[float]) -> None:
    total, squares = sum(weights), sum(weight**2 for weight in weights)
    parts = [Metrics.of(correction=(weight, 1), correction_squared=(weight**2, 1)) for weight in weights]
    expected = total**2 / squares / len(weights) if squares else 0.0
    assert effective_sample_size(Metrics.mean(parts)) == pytest.approx(expected)


def scored(**sources: Source | None) -> Batch:
    columns = {name: Ragged.of([[0.0, -1.0]], np.float32, source=source) for name, source in sources.items()}
    return Batch.of(advantages=np.ones(1, np.float32), **columns)


SAMPLER, TRAINER, REFERENCE = Source("sampler"), Source.trainer(3), Source("reference")


def test_log_probs_of_the_models_a_loss_asks_for_are_taken() -> None:
    loss = ClippedLoss(anchor="trainer", kl=0.1, correction=Correction(level="sequence", high=2.0))
    check_sources(scored(sampler_logprobs=SAMPLER, logprobs=TRAINER, reference_logprobs=REFERENCE), loss)
    check_sources(scored(sampler_logprobs=None, logprobs=None, reference_logprobs=None), loss)
    check_sources(scored(sampler_logprobs=SAMPLER, logprobs=SAMPLER), ClippedLoss())
    check_sources(scored(), CrossEntropy())
    check_sources(scored(sampler_logprobs=SAMPLER, logprobs=TRAINER), ClippedLoss(anchor="trainer"), 3)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            scored(sampler_logprobs=SAMPLER, logprobs=SAMPLER, reference_logprobs=REFERENCE),
            "must come from the trainer, but the batch's were computed by the sampler: call `batch = await policy.",
        ),
        (
            scored(sampler_logprobs=TRAINER, logprobs=TRAINER, reference_logprobs=REFERENCE),
            "ClippedLoss reads `sampler_logprobs`, which must come from the sampler, but the batch's were computed by",
        ),
        (
            scored(sampler_logprobs=SAMPLER, logprobs=TRAINER, reference_logprobs=TRAINER),
            "call `batch = await reference.logprobs(batch)` before the update",
        ),
        (
            scored(sampler_logprobs=SAMPLER, logprobs=TRAINER),
            "ClippedLoss reads `reference_logprobs`, which the batch does not have: call `batch = await reference",
        ),
    ],
)
def test_log_probs_of_another_model_are_refused(batch: Batch, message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        check_sources(batch, ClippedLoss(anchor="trainer", kl=0.1))


def test_a_masked_token_learns_from_the_kl_alone() -> None:
    logprobs = torch.tensor([-1.0], requires_grad=True)
    columns = {name: torch.tensor([at]) for name, at in (("logprobs", -1.0), ("sampler_logprobs", -9.0))}
    columns |= {"advantages": torch.tensor([1.0]), "reference_logprobs": torch.tensor([-4.0])}
    loss = ClippedLoss(anchor="trainer", kl=0.5, kl_estimator="k2", correction=Correction(how="mask", high=2.0))
    loss(logprobs, columns).values.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0.5 * 3.0]


def test_joining_with_rows_of_an_unknown_source_makes_nothing_acceptable() -> None:
    known, unknown = (scored(sampler_logprobs=SAMPLER, logprobs=source) for source in (SAMPLER, None))
    later = scored(sampler_logprobs=SAMPLER, logprobs=Source.trainer(4))
    for first, second in (known, unknown), (unknown, known), (later, unknown), (unknown, later):
        with pytest.raises(DataError, match="ClippedLoss reads `logprobs`, which"):
            check_sources(Batch.concat([first, second]), ClippedLoss(anchor="trainer"), 3)


def test_log_probs_of_weights_that_a_policy_has_not_had_are_refused() -> None:
    batch = scored(sampler_logprobs=SAMPLER, logprobs=Source("trainer", 1, 3))
    with pytest.raises(DataError, match="which the trainer computed at version 3, and this policy is at version 2"):
        check_sources(batch, ClippedLoss(anchor="trainer"), 2)


@pytest.mark.parametrize("column", [np.zeros(1, np.float32), [[0.0, -1.0]]])
def test_log_probs_must_be_those_of_tokens(column: NDArray[np.float32] | list[list[float]]) -> None:
    batch = scored(sampler_logprobs=SAMPLER).assign(logprobs=column)
    with pytest.raises(DataError, match=r"reads `logprobs` of each token, but the batch's is not a token column"):
        check_sources(batch, ClippedLoss(anchor="trainer"))


def test_a_loss_says_what_it_is_of() -> None:
    check_predicts(ClippedLoss(), "logprobs")
    check_predicts(ValueLoss(), "values")
    with pytest.raises(DataError, match=r"ValueLoss is a loss of `values`.* pass it to critic.update"):
        check_predicts(ValueLoss(), "logprobs")
    with pytest.raises(DataError, match=r"CrossEntropy is a loss of `logprobs`.* pass it to policy.update"):
        check_predicts(CrossEntropy(), "values")
