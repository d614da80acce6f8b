"""Advantages of REINFORCE's kin against the papers' equations, row by row in float64."""

import re
from collections.abc import Callable

import numpy as np
import pytest

from meshrl import (
    Batch,
    DataError,
    Ragged,
    SamplerConfig,
    Sampling,
    Weights,
    batch_advantages,
    greedy_baseline,
    optimal_advantages,
    overlong_penalty,
    rescaled_advantages,
    rewards_to_go,
    rollout,
    whiten,
)
from meshrl.rewards import RewardConfig
from meshrl.rewards.function import FunctionReward
from meshrl.testing import FakeSampler

REWARDS = np.array([1.0, 0.0, 0.5, 0.25, 1.0, 1.0], np.float32)
GROUPS = np.array([4, 2, 4, 2, 9, 9])
LENGTHS = np.array([3, 1, 5, 2, 4, 4])
MASK = Ragged.of([[False, True, True], [False], [True, False, True, True]], np.bool_)
ONE_ROW = Ragged.of([[0.0]], np.float32)


def test_the_mean_of_the_batch_is_the_baseline() -> None:
    values = REWARDS.astype(float)
    np.testing.assert_allclose(batch_advantages(REWARDS), values - values.mean(), atol=1e-7)
    assert batch_advantages([]).tolist() == []
    assert batch_advantages([0.1, 0.1, 0.1]).tolist() == [0.0, 0.0, 0.0]


def test_opo_weighs_the_baseline_by_length() -> None:
    expected = []
    for reward, group in zip(REWARDS.astype(float), GROUPS, strict=True):
        own = group == GROUPS
        expected.append(reward - (LENGTHS[own] * REWARDS[own].astype(float)).sum() / LENGTHS[own].sum())
    np.testing.assert_allclose(optimal_advantages(REWARDS, GROUPS, LENGTHS), expected, atol=1e-7)


def test_opo_of_equal_lengths_is_the_mean_and_of_none_is_zero() -> None:
    assert optimal_advantages([1.0, 0.0], [0, 0], [3, 3]).tolist() == [0.5, -0.5]
    assert optimal_advantages([1.0, 0.0], [0, 0], [0, 0]).tolist() == [0.0, 0.0]


def test_opos_baseline_has_the_least_variance_where_the_squared_gradient_grows_with_the_length() -> None:
    """`sum_i l_i (r_i - b)^2` is least at the baseline."""
    rewards, lengths = REWARDS[:4].astype(float), LENGTHS[:4]
    best = rewards[0] - float(optimal_advantages(rewards, [0] * 4, lengths)[0])
    grid = np.linspace(0, 1, 1001)
    assert best == pytest.approx(grid[((rewards - grid[:, None]) ** 2 * lengths).sum(1).argmin()], abs=1e-3)


def test_gpg_makes_up_for_groups_that_teach_nothing() -> None:
    centred = [reward - REWARDS[group == GROUPS].mean() for reward, group in zip(REWARDS, GROUPS, strict=True)]
    np.testing.assert_allclose(rescaled_advantages(REWARDS, GROUPS), np.array(centred) * 6 / (6 - 2), atol=1e-6)
    assert rescaled_advantages([1.0, 1.0], [0, 0]).tolist() == [0.0, 0.0]
    assert rescaled_advantages([], []).tolist() == []


def test_reinforce_pp_lowers_a_reward_by_the_kl_from_the_token_on() -> None:
    random = np.random.default_rng(3)
    logprobs, reference = (Ragged(random.normal(size=8).astype(np.float32), MASK.offsets) for _ in range(2))
    rewards = [1.0, 5.0, -0.5]
    got = rewards_to_go(rewards, MASK, 0.1, logprobs, reference)
    for row, reward in enumerate(rewards):
        distance = (logprobs[row].astype(float) - reference[row]) * MASK[row]
        expected = [(reward - 0.1 * distance[at:].sum()) * MASK[row][at] for at in range(len(distance))]
        assert got[row].tolist() == pytest.approx(expected, abs=1e-6)
    where = np.flatnonzero(MASK.values)
    learned = got.values[where].astype(float)
    whitened = whiten(got, MASK).values[where]
    assert whitened.tolist() == pytest.approx(((learned - learned.mean()) / learned.std()).tolist(), abs=1e-5)


def test_without_a_kl_each_learned_token_has_its_rows_reward() -> None:
    got = rewards_to_go([2.0, 3.0, -1.0], MASK)
    assert got.values.tolist() == [0.0, 2.0, 2.0, 0.0, -1.0, 0.0, -1.0, -1.0]


def test_long_completions_lose_up_to_one() -> None:
    assert overlong_penalty([1, 6, 7, 8, 10, 11], 10, 4).tolist() == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    assert overlong_penalty([9, 10, 11], 10, 0).tolist() == [0.0, 0.0, -1.0]


async def test_remax_draws_one_greedy_completion_a_prompt() -> None:
    sampler = FakeSampler(SamplerConfig(model="none"))
    prompts = Batch.of(prompt=["a", "b", "c"], answer=["A", "B", "C"], row=[{}] * 3, groups=np.array([5, 3, 8]))
    judge = FunctionReward(RewardConfig())
    for skill, greedy in ((0.4, 0.0), (0.6, 1.0)):
        await sampler.load(Weights(0, {"skill": np.array([skill])}))
        drawn = await judge.score(await rollout(sampler, prompts, Sampling(n=2)))
        told = await greedy_baseline(sampler, drawn, Sampling(n=2), judge.score)
        assert told.row("baseline").tolist() == [greedy] * 6
        assert told.row("rewards").tolist() == drawn.row("rewards").tolist()
        assert told.objects("completion") == drawn.objects("completion")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: batch_advantages([0.0, np.nan]), "1 of 2 rewards are not finite"),
        (lambda: optimal_advantages([0.0], [1, 1], [1]), "both must be [rows]"),
        (lambda: optimal_advantages([0.0], [1], [1, 2]), "lengths have shape (2,) and rewards (1,)"),
        (lambda: rescaled_advantages([0.0, np.inf], [1, 1]), "1 of 2 rewards are not finite"),
        (lambda: rewards_to_go([0.0], MASK), "rewards_to_go: rewards have shape (1,) and there are 3 rows"),
        (lambda: rewards_to_go([0.0] * 3, MASK, 0.1), "rewards_to_go: kl = 0.1 needs the columns"),
        (lambda: rewards_to_go([0.0] * 3, MASK, 0.1), "reference.logprobs first, or set kl = 0"),
    ],
)
def test_columns_that_do_not_fit_are_refused_in_words(call: Callable[[], object], message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        call()
