"""Advantages of REINFORCE's kin and the KL in rewards by hand; the algorithms' tests have the papers' equations."""

import re
from collections.abc import Callable

import numpy as np
import pytest

import meshrl as rl
from meshrl.errors import DataError

REWARDS = np.array([1.0, 0.0, 0.5, 0.25, 1.0, 1.0], np.float32)
GROUPS = np.array([4, 2, 4, 2, 9, 9])
LENGTHS = np.array([3, 1, 5, 2, 4, 4])
MASK = rl.Ragged.of([[False, True, True], [False], [True, False, True, True]], np.bool_)


def test_advantages_by_hand_where_the_rows_teach_nothing_too() -> None:
    values = REWARDS.astype(float)
    np.testing.assert_allclose(rl.batch_advantages(REWARDS), values - values.mean(), atol=1e-7)
    assert rl.batch_advantages([]).tolist() == []
    assert rl.batch_advantages([0.1, 0.1, 0.1]).tolist() == [0.0, 0.0, 0.0]
    # Weighed by length the means of groups 4 and 2 are 5.5 / 8 and 0.5 / 3.
    by_length = [1 - 5.5 / 8, -0.5 / 3, 0.5 - 5.5 / 8, 0.25 - 0.5 / 3, 0, 0]
    np.testing.assert_allclose(rl.optimal_advantages(REWARDS, GROUPS, LENGTHS), by_length, atol=1e-7)
    assert rl.optimal_advantages([1.0, 0.0], [0, 0], [0, 0]).tolist() == [0.0, 0.0]
    # Two of six rows are of a group of equal rewards.
    centred = np.array([0.25, -0.125, -0.25, 0.125, 0, 0])
    np.testing.assert_allclose(rl.rescaled_advantages(REWARDS, GROUPS), centred * 6 / 4, atol=1e-6)
    assert rl.rescaled_advantages([1.0, 1.0], [0, 0]).tolist() == [0.0, 0.0]
    assert rl.rescaled_advantages([], []).tolist() == []
    assert rl.rewards_to_go([2.0, 3.0, -1.0], MASK).values.tolist() == [0.0, 2.0, 2.0, 0.0, -1.0, 0.0, -1.0, -1.0]


def test_long_completions_lose_up_to_one() -> None:
    assert rl.overlong_penalty([1, 6, 7, 8, 10, 11], 10, 4).tolist() == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    assert rl.overlong_penalty([9, 10, 11], 10, 0).tolist() == [0.0, 0.0, -1.0]


# --- the KL to the reference


def judged() -> rl.Batch:
    """Six rows of other lengths, about half of whose tokens are learned."""
    random = np.random.default_rng(4)
    mask = rl.Ragged.of([random.integers(0, 2, length) for length in (5, 1, 7, 3, 4, 6)], np.bool_)
    own, reference = (rl.Ragged(random.normal(-2, 1, 26).astype(np.float32), mask.offsets) for _ in range(2))
    return rl.Batch.of(rewards=REWARDS, groups=GROUPS, loss_mask=mask, logprobs=own, reference_logprobs=reference)


def test_the_kl_lowers_rewards_by_its_sum_and_is_told_as_a_mean_over_learned_tokens() -> None:
    batch = judged()
    apart = (batch.ragged(name) for name in ("logprobs", "reference_logprobs", "loss_mask"))
    distances = [(p.astype(float) - q)[np.asarray(mask, np.bool_)] for p, q, mask in zip(*apart, strict=True)]
    got = rl.penalised_rewards(batch, 0.3)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, REWARDS - 0.3 * np.array([row.sum() for row in distances]), rtol=1e-6)
    assert rl.penalised_rewards(batch.select([]), 0.1).tolist() == []
    assert rl.kl_metrics(batch) == {"reference_k1": pytest.approx(np.concatenate(distances).mean())}
    assert rl.kl_metrics(batch.select([])) == {}
    assert rl.kl_metrics(rl.Batch.of(rewards=REWARDS, loss_mask=batch.loss_mask)) == {}


def test_without_a_weight_of_the_kl_nothing_is_read() -> None:
    assert rl.kl_columns(0) == ()
    assert rl.penalised_rewards(rl.Batch.of(rewards=REWARDS), 0).tolist() == REWARDS.tolist()
    assert {"rewards", "groups", *rl.kl_columns(0.1)} == set(judged().stored)


def broken() -> rl.Batch:
    """All tokens learned, one of them, in row 2, of no log-prob."""
    offsets = judged().loss_mask.offsets
    logprobs = rl.Ragged(np.where(np.arange(26) == 7, np.nan, -1).astype(np.float32), offsets)
    return judged().assign(logprobs=logprobs, loss_mask=rl.Ragged(np.ones(26, np.bool_), offsets))


MISTAKES: list[tuple[Callable[[], object], str]] = [
    (lambda: rl.batch_advantages([0.0, np.nan]), "1 of 2 rewards are not finite"),
    (lambda: rl.optimal_advantages([0.0], [1, 1], [1]), "both must be [rows]"),
    (lambda: rl.optimal_advantages([0.0], [1], [1, 2]), "lengths have shape (2,) and rewards (1,)"),
    (lambda: rl.rescaled_advantages([0.0, np.inf], [1, 1]), "1 of 2 rewards are not finite"),
    (lambda: rl.rewards_to_go([0.0], MASK), "rewards_to_go: rewards have shape (1,) and there are 3 rows"),
    (lambda: rl.rewards_to_go([0.0] * 3, MASK, 0.1), "reference.logprobs first, or set kl = 0"),
    (lambda: rl.penalised_rewards(rl.Batch.of(rewards=REWARDS), 0.1), "no `loss_mask`, `logprobs`, `reference_logp"),
    (lambda: rl.penalised_rewards(broken(), 0.1), "row 2 has log-probs that are not finite"),
]


def test_columns_that_do_not_fit_are_refused_in_words() -> None:
    for call, message in MISTAKES:
        with pytest.raises(DataError, match=re.escape(message)):
            call()
