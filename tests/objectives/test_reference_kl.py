"""The KL to the reference in rewards, and told, against its definition in float64."""

import re

import numpy as np
import pytest

from meshrl import Batch, DataError, Ragged, kl_columns, kl_metrics, leave_one_out, penalised_rewards

REWARDS = np.array([1.0, 0.0, 0.5, 0.25, 1.0, 1.0], np.float32)
GROUPS = np.array([4, 4, 9, 4, 9, 9])


def rows() -> Batch:
    """Six rows of other lengths, about half of whose tokens are learned."""
    random = np.random.default_rng(4)
    mask = Ragged.of([random.integers(0, 2, length) for length in (5, 1, 7, 3, 4, 6)], np.bool_)
    own, reference = (Ragged(random.normal(-2, 1, 26).astype(np.float32), mask.offsets) for _ in range(2))
    return Batch.of(rewards=REWARDS, groups=GROUPS, loss_mask=mask, logprobs=own, reference_logprobs=reference)


def distances(batch: Batch) -> list[list[float]]:
    """Of each row, `log(pi / pi_ref)` of the learned tokens."""
    columns = (batch.ragged(name) for name in ("logprobs", "reference_logprobs", "loss_mask"))
    return [
        [float(p) - float(q) for p, q, learned in zip(*row, strict=True) if learned]
        for row in zip(*columns, strict=True)
    ]


def test_rloo_lowers_all_rewards_by_the_kl_before_it_compares_them() -> None:
    """`R_i - mean(R_j, j != i)`, where `R_i = r_i - kl sum_t log(pi(y_i,t) / pi_ref(y_i,t))`."""
    batch = rows()
    lowered = [float(reward) - 0.3 * sum(row) for reward, row in zip(REWARDS, distances(batch), strict=True)]
    got = penalised_rewards(batch, 0.3)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, lowered, rtol=1e-6)
    others = [np.array([GROUPS[j] == GROUPS[i] and i != j for j in range(6)]) for i in range(6)]
    expected = [lowered[i] - np.mean(np.array(lowered)[others[i]]) for i in range(6)]
    np.testing.assert_allclose(leave_one_out(got, GROUPS), expected, atol=1e-6)


def test_what_is_told_is_the_mean_over_learned_tokens() -> None:
    batch = rows()
    assert kl_metrics(batch) == {
        "reference_k1": pytest.approx(np.mean([each for row in distances(batch) for each in row]))
    }
    assert kl_metrics(batch.select([])) == {}
    assert kl_metrics(Batch.of(rewards=REWARDS, loss_mask=batch.loss_mask)) == {}


def test_without_a_weight_nothing_is_read() -> None:
    assert kl_columns(0) == ()
    assert penalised_rewards(Batch.of(rewards=REWARDS), 0).tolist() == REWARDS.tolist()
    batch = rows()
    assert {"rewards", "groups", *kl_columns(0.1)} == set(batch.stored)
    assert penalised_rewards(batch.select([]), 0.1).tolist() == []


def test_what_cannot_be_penalised_is_told_in_words() -> None:
    batch = rows()
    missing = (
        "the batch has no `loss_mask`, `logprobs`, `reference_logprobs`: call policy.logprobs and reference.logprobs"
    )
    with pytest.raises(DataError, match=re.escape(missing)):
        penalised_rewards(Batch.of(rewards=REWARDS), 0.1)
    broken = np.where(np.arange(26) == 7, np.nan, batch.ragged("logprobs").values)
    everything = Ragged(np.ones(26, np.bool_), batch.loss_mask.offsets)
    batch = batch.assign(logprobs=Ragged(broken, everything.offsets), loss_mask=everything)
    with pytest.raises(DataError, match="row 2 has log-probs that are not finite"):
        penalised_rewards(batch, 0.1)
