"""Advantages against numbers worked out by hand and their defining properties; mini-batches by the seed."""

import re
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import ArrayLike, NDArray

import meshrl as rl
from meshrl.algo import (
    Gae,
    gae,
    group_advantages,
    leave_one_out,
    minibatches,
    trace_advantages,
    turn_advantages,
    whiten,
)
from meshrl.data import Batch, Ragged
from meshrl.errors import DataError

rewards = st.floats(-10, 10, width=32)


def centred(values: ArrayLike, groups: ArrayLike) -> NDArray[np.float32]:
    return group_advantages(values, groups, scale="none")


Way: TypeAlias = Callable[[Any, Any], NDArray[np.float32]]
WAYS: tuple[Way, ...] = (group_advantages, centred, leave_one_out)


def test_groups_of_equal_rewards_and_rows_alone_have_no_advantages() -> None:
    for way in WAYS:
        assert way([1, 5, 0, 3, 0], [7, 2, 7, 2, 7]).dtype == np.float32
        assert way([0.1, 0.1, 0.1, 0.7], [0, 0, 0, 1]).tolist() == [0] * 4, "equal rewards and rows alone"
        assert way(np.zeros(0), np.zeros(0, np.int64)).tolist() == []
    with_epsilon = group_advantages([0, 2], [0, 0], epsilon=1.0)
    np.testing.assert_allclose(with_epsilon, [-0.41421356, 0.41421356], err_msg="epsilon is added to the deviation")


def test_a_turn_has_the_rewards_from_it_on() -> None:
    # Group 0 has the rewards 1, 0 and 0, of mean 1/3 and deviation sqrt(1/3).
    told = turn_advantages(Ragged.of([[1, 0], [2, 2], [0], []], np.float32), [0, 1, 0, 0])
    up, down = (2 / 3) / np.sqrt(1 / 3), -(1 / 3) / np.sqrt(1 / 3)
    assert [len(row) for row in told] == [2, 2, 1, 0]
    assert told.values == pytest.approx([up + down, down, 0, 0, down], abs=1e-5)
    unknown = turn_advantages(Ragged.of([[1, 0], [np.nan, np.nan], [0]], np.float32), [0, 0, 0]).values
    assert np.isfinite(unknown).all()
    assert not unknown[2:4].any()
    with pytest.raises(DataError, match="there are 1 rows of rewards"):
        turn_advantages(Ragged.of([[1, 0]], np.float32), [0, 0])
    assert len(turn_advantages(Ragged.of([], np.float32), np.zeros(0))) == 0


def test_an_answer_has_the_advantage_of_its_trace() -> None:
    # The three traces have the rewards 0, 1 and 1, of mean 2/3 and deviation sqrt(1/3). One more is unknown.
    rewards = Ragged.of([[0, 1, 0, np.nan], [1], []], np.float32)
    told = trace_advantages(rewards, Ragged.of([[0, 1, 0, 2], [0], []], np.int32), [5, 5, 5])
    low, high = -(2 / 3) / np.sqrt(1 / 3), (1 / 3) / np.sqrt(1 / 3)
    assert [row.tolist() for row in told] == [
        pytest.approx([low, high, low, 0], abs=1e-5),
        pytest.approx([high], abs=1e-5),
        [],
    ]


def test_a_trace_is_compared_with_those_of_its_seat() -> None:
    # Seat 0 has the rewards 0 and 0, and seat 1 the rewards 1 and 3, of mean 2 and deviation sqrt(2).
    rewards, traces = Ragged.of([[0, 1], [3, 0]], np.float32), Ragged.of([[0, 1], [0, 1]], np.int32)
    told = trace_advantages(rewards, traces, [5, 5], Ragged.of([[0, 1], [1, 0]], np.int32))
    assert told.values == pytest.approx([0, -1 / np.sqrt(2), 1 / np.sqrt(2), 0], abs=1e-5)
    with pytest.raises(DataError, match=r"there are 2 rows of rewards, and groups have shape \(1,\)"):
        trace_advantages(rewards, traces, [5])
    with pytest.raises(DataError, match="traces have 3 values in 2 rows, and rewards 4 in 2"):
        trace_advantages(rewards, Ragged.of([[0, 1], [0]], np.int32), [5, 5])


# --- of a critic

MASK = Ragged.of([[False, True, False, True, True], [False, False], [False, True]], np.bool_)


def like(mask: Ragged, values: NDArray[np.float64]) -> Ragged:
    return Ragged(values.astype(np.float32), mask.offsets)


rows = st.lists(st.lists(st.tuples(st.booleans(), st.floats(-3, 3, width=32)), max_size=6), max_size=6)
units = st.floats(0, 1)


@given(rows, units, units, units, st.data())
def test_gae_is_the_double_sum_of_the_paper(
    given_rows: list[list[tuple[bool, float]]], discount: float, decay: float, kl: float, data: st.DataObject
) -> None:
    mask = Ragged.of([[learned for learned, _ in row] for row in given_rows], np.bool_)
    values = Ragged.of([[value for _, value in row] for row in given_rows], np.float32)
    finals = [data.draw(rewards) if row.any() else np.nan for row in mask]  # one that learns nothing may be unknown
    rng = np.random.default_rng(0)
    logprobs, reference = (like(mask, rng.normal(size=len(mask.values))) for _ in range(2))
    config = Gae(discount=discount, decay=decay, kl=kl)
    found, returns = gae(np.array(finals), values, mask, config, logprobs, reference)
    for row in range(len(mask)):
        at = np.flatnonzero(mask[row])
        value = [*values[row][at].tolist(), 0.0]
        reward = [-kl * (own - other) for own, other in zip(logprobs[row][at], reference[row][at], strict=True)]
        if len(at):
            reward[-1] += finals[row]
        deltas = [reward[t] + discount * value[t + 1] - value[t] for t in range(len(at))]
        expected = np.zeros(len(mask[row]))
        for t in range(len(at)):
            expected[at[t]] = sum((discount * decay) ** (k - t) * deltas[k] for k in range(t, len(at)))
        np.testing.assert_allclose(found[row].tolist(), expected, atol=1e-4)
        expected[at] += value[:-1]
        np.testing.assert_allclose(returns[row].tolist(), expected, atol=1e-4)


def test_whitened_advantages_have_mean_zero_and_deviation_one_over_what_is_learned() -> None:
    found = whiten(like(MASK, np.array([99, 1, 99, 2, 3, 99, 99, 99, 6.0])), MASK)
    np.testing.assert_allclose(found.values.tolist(), np.array([0, -2, 0, -1, 0, 0, 0, 0, 3]) / 3.5**0.5, rtol=1e-6)
    equal = whiten(like(MASK, np.full(9, 0.1)), MASK)
    assert equal.values.tolist() == [0] * 9
    rounded = like(MASK, np.where(np.arange(9) % 2, 0.3, np.nextafter(np.float32(0.3), np.float32(1))))
    assert 0 < np.abs(whiten(rounded, MASK).values).max() < 1e-3, "rounding is no signal"
    assert whiten(Ragged.of([], np.float32), Ragged.of([], np.bool_)).values.tolist() == []


REWARDS = np.array([1.0, 0.0, 0.5, 0.25, 1.0, 1.0], np.float32)
GROUPS = np.array([4, 2, 4, 2, 9, 9])
LENGTHS = np.array([3, 1, 5, 2, 4, 4])
LEARNED = rl.Ragged.of([[False, True, True], [False], [True, False, True, True]], np.bool_)


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
    assert rl.rewards_to_go([2.0, 3.0, -1.0], LEARNED).values.tolist() == [0.0, 2.0, 2.0, 0.0, -1.0, 0.0, -1.0, -1.0]


def test_long_completions_lose_up_to_one() -> None:
    assert rl.overlong_penalty([1, 6, 7, 8, 10, 11], 10, 4).tolist() == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    assert rl.overlong_penalty([9, 10, 11], 10, 0).tolist() == [0.0, 0.0, -1.0]


# --- the KL to the reference


def judged() -> rl.Batch:
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
    offsets = judged().loss_mask.offsets
    logprobs = rl.Ragged(np.where(np.arange(26) == 7, np.nan, -1).astype(np.float32), offsets)
    return judged().assign(logprobs=logprobs, loss_mask=rl.Ragged(np.ones(26, np.bool_), offsets))


def of_critic(rewards: ArrayLike, values: Ragged, config: Gae) -> Callable[[], object]:
    return lambda: gae(rewards, values, MASK, config)


ZEROS = like(MASK, np.zeros(9))
MISTAKES: list[tuple[Callable[[], object], str]] = [
    (lambda: leave_one_out([1.0, 2.0, 3.0], [0, 0]), "rewards have shape (3,) and groups (2,)"),
    (lambda: leave_one_out([1.0, np.nan, np.inf], [0, 0, 0]), "1 of 3 rewards are infinite; the first is inf in row 2"),
    (of_critic([1.0], ZEROS, Gae()), "rewards have shape (1,) and there are 3 rows"),
    (of_critic([1.0, 0.0, np.inf], ZEROS, Gae()), "1 of 3 rewards are infinite; the first is inf in row 2"),
    (of_critic([0.0] * 3, Ragged.of([[1, 2], [3]], np.float32), Gae()), "2 rows of 3 tokens and `loss_mask` 3 rows"),
    (lambda: rl.batch_advantages([0.0, -np.inf]), "1 of 2 rewards are infinite"),
    (lambda: rl.optimal_advantages([0.0], [1, 1], [1]), "both must be [rows]"),
    (lambda: rl.optimal_advantages([0.0], [1], [1, 2]), "lengths have shape (2,) and rewards (1,)"),
    (lambda: rl.rescaled_advantages([0.0, np.inf], [1, 1]), "1 of 2 rewards are infinite"),
    (lambda: rl.rewards_to_go([0.0], LEARNED), "rewards_to_go: rewards have shape (1,) and there are 3 rows"),
    (lambda: rl.rewards_to_go([0.0] * 3, LEARNED, 0.1), "reference.logprobs first, or set kl = 0"),
    (lambda: rl.penalised_rewards(rl.Batch.of(rewards=REWARDS), 0.1), "no `loss_mask`, `logprobs`, `reference_logp"),
    (lambda: rl.penalised_rewards(broken(), 0.1), "row 2 has log-probs that are not finite"),
]


def test_columns_that_do_not_fit_are_refused_in_words() -> None:
    for call, message in MISTAKES:
        with pytest.raises(DataError, match=re.escape(message)):
            call()


def drawn(rows: int, epochs: int, count: int, seed: int | tuple[int, ...]) -> list[list[int]]:
    return [part.groups.tolist() for part in minibatches(Batch.of(groups=np.arange(rows)), epochs, count, seed)]


@given(st.integers(0, 30), st.integers(1, 3), st.integers(1, 9), st.integers(0, 99))
def test_each_row_comes_once_an_epoch(rows: int, epochs: int, count: int, seed: int) -> None:
    found = drawn(rows, epochs, count, seed)
    parts = min(rows, count)
    assert len(found) == epochs * parts
    for epoch in range(epochs):
        own = found[epoch * parts : (epoch + 1) * parts]
        assert sorted(row for part in own for row in part) == list(range(rows))
        assert {len(part) for part in own} <= {rows // max(1, parts), -(-rows // max(1, parts))}
        assert all(part == sorted(part) for part in own), "within a mini-batch rows keep their order"


def test_the_seed_decides_which_rows_meet_and_epochs_differ() -> None:
    found = drawn(40, 2, 4, (7, 3))
    assert found == drawn(40, 2, 4, (7, 3))
    assert found != drawn(40, 2, 4, (7, 4))
    assert found[:4] != found[4:]


@given(st.lists(st.lists(st.booleans(), max_size=3), min_size=1, max_size=12), st.integers(1, 5))
def test_no_mini_batch_has_nothing_to_learn(masks: list[list[bool]], count: int) -> None:
    batch = Batch.of(groups=np.arange(len(masks)), loss_mask=Ragged.of(masks, np.bool_))
    learned = [row for row, mask in enumerate(masks) if any(mask)]
    if not learned:
        with pytest.raises(DataError, match=f"nothing to learn: `loss_mask` is False for all tokens of {len(masks)}"):
            list(minibatches(batch, 1, count, 0))
        return
    parts = [part.groups.tolist() for part in minibatches(batch, 2, count, 0)]
    assert len(parts) == 2 * min(count, len(learned))
    assert sorted(row for part in parts for row in part) == sorted(learned * 2)


def test_none_is_refused() -> None:
    for epochs, count in ((0, 1), (1, 0)):
        with pytest.raises(DataError, match=f"{epochs} epochs of {count} mini-batches"):
            drawn(3, epochs, count, 0)
