"""Advantages of REINFORCE's kin, and the KL in rewards, against the papers' equations, row by row in float64."""

import re
from collections.abc import Callable

import numpy as np
import pytest

import meshrl as rl
from meshrl.rewards import RewardConfig
from meshrl.rewards.function import FunctionReward
from meshrl.testing import FakeSampler

REWARDS = np.array([1.0, 0.0, 0.5, 0.25, 1.0, 1.0], np.float32)
GROUPS = np.array([4, 2, 4, 2, 9, 9])
LENGTHS = np.array([3, 1, 5, 2, 4, 4])
MASK = rl.Ragged.of([[False, True, True], [False], [True, False, True, True]], np.bool_)


def test_the_mean_of_the_batch_is_the_baseline() -> None:
    values = REWARDS.astype(float)
    np.testing.assert_allclose(rl.batch_advantages(REWARDS), values - values.mean(), atol=1e-7)
    assert rl.batch_advantages([]).tolist() == []
    assert rl.batch_advantages([0.1, 0.1, 0.1]).tolist() == [0.0, 0.0, 0.0]


def test_opo_weighs_the_baseline_by_length_which_has_the_least_variance() -> None:
    """`sum_i l_i (r_i - b)^2`, in which the squared gradient grows with the length, is least at the baseline."""
    found = rl.optimal_advantages(REWARDS, GROUPS, LENGTHS)
    grid = np.linspace(0, 1, 1001)
    for row, (reward, group) in enumerate(zip(REWARDS.astype(float), GROUPS, strict=True)):
        own, lengths = REWARDS[group == GROUPS].astype(float), LENGTHS[group == GROUPS]
        baseline = (lengths * own).sum() / lengths.sum()
        assert found[row] == pytest.approx(reward - baseline, abs=1e-7)
        assert baseline == pytest.approx(grid[((own - grid[:, None]) ** 2 * lengths).sum(1).argmin()], abs=1e-3)
    assert rl.optimal_advantages([1.0, 0.0], [0, 0], [3, 3]).tolist() == [0.5, -0.5]
    assert rl.optimal_advantages([1.0, 0.0], [0, 0], [0, 0]).tolist() == [0.0, 0.0]


def test_gpg_makes_up_for_groups_that_teach_nothing() -> None:
    centred = [reward - REWARDS[group == GROUPS].mean() for reward, group in zip(REWARDS, GROUPS, strict=True)]
    np.testing.assert_allclose(rl.rescaled_advantages(REWARDS, GROUPS), np.array(centred) * 6 / (6 - 2), atol=1e-6)
    assert rl.rescaled_advantages([1.0, 1.0], [0, 0]).tolist() == [0.0, 0.0]
    assert rl.rescaled_advantages([], []).tolist() == []


def test_reinforce_pp_lowers_a_reward_by_the_kl_from_the_token_on() -> None:
    random = np.random.default_rng(3)
    logprobs, reference = (rl.Ragged(random.normal(size=8).astype(np.float32), MASK.offsets) for _ in range(2))
    rewards = [1.0, 5.0, -0.5]
    got = rl.rewards_to_go(rewards, MASK, 0.1, logprobs, reference)
    for row, reward in enumerate(rewards):
        distance = (logprobs[row].astype(float) - reference[row]) * MASK[row]
        expected = [(reward - 0.1 * distance[at:].sum()) * MASK[row][at] for at in range(len(distance))]
        assert got[row].tolist() == pytest.approx(expected, abs=1e-6)
    where = np.flatnonzero(MASK.values)
    learned = got.values[where].astype(float)
    whitened = rl.whiten(got, MASK).values[where]
    assert whitened.tolist() == pytest.approx(((learned - learned.mean()) / learned.std()).tolist(), abs=1e-5)
    without = rl.rewards_to_go([2.0, 3.0, -1.0], MASK)
    assert without.values.tolist() == [0.0, 2.0, 2.0, 0.0, -1.0, 0.0, -1.0, -1.0]


def test_long_completions_lose_up_to_one() -> None:
    assert rl.overlong_penalty([1, 6, 7, 8, 10, 11], 10, 4).tolist() == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    assert rl.overlong_penalty([9, 10, 11], 10, 0).tolist() == [0.0, 0.0, -1.0]


async def test_remax_draws_one_greedy_completion_a_prompt() -> None:
    sampler = FakeSampler(rl.SamplerConfig(model="none"))
    prompts = rl.Batch.of(prompt=["a", "b", "c"], answer=["A", "B", "C"], row=[{}] * 3, groups=np.array([5, 3, 8]))
    judge = FunctionReward(RewardConfig())
    for skill, greedy in ((0.4, 0.0), (0.6, 1.0)):
        await sampler.load(rl.Weights(0, {"skill": np.array([skill])}))
        drawn = await judge.score(await rl.rollout(sampler, prompts, rl.Sampling(n=2)))
        told = await rl.greedy_baseline(sampler, drawn, rl.Sampling(n=2), judge.score)
        assert told.row("baseline").tolist() == [greedy] * 6
        assert told.row("rewards").tolist() == drawn.row("rewards").tolist()
        assert told.objects("completion") == drawn.objects("completion")


# --- the KL to the reference


def judged() -> rl.Batch:
    """Six rows of other lengths, about half of whose tokens are learned."""
    random = np.random.default_rng(4)
    mask = rl.Ragged.of([random.integers(0, 2, length) for length in (5, 1, 7, 3, 4, 6)], np.bool_)
    own, reference = (rl.Ragged(random.normal(-2, 1, 26).astype(np.float32), mask.offsets) for _ in range(2))
    return rl.Batch.of(rewards=REWARDS, groups=GROUPS, loss_mask=mask, logprobs=own, reference_logprobs=reference)


def distances(batch: rl.Batch) -> list[list[float]]:
    """Of each row, `log(pi / pi_ref)` of the learned tokens."""
    columns = (batch.ragged(name) for name in ("logprobs", "reference_logprobs", "loss_mask"))
    return [
        [float(p) - float(q) for p, q, learned in zip(*row, strict=True) if learned]
        for row in zip(*columns, strict=True)
    ]


def test_rloo_lowers_all_rewards_by_the_kl_before_it_compares_them() -> None:
    """`R_i - mean(R_j, j != i)`, where `R_i = r_i - kl sum_t log(pi(y_i,t) / pi_ref(y_i,t))`."""
    batch = judged()
    lowered = np.array([reward - 0.3 * sum(row) for reward, row in zip(REWARDS, distances(batch), strict=True)])
    got = rl.penalised_rewards(batch, 0.3)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, lowered, rtol=1e-6)
    others = [(group == GROUPS) & (np.arange(6) != row) for row, group in enumerate(GROUPS)]
    expected = [own - lowered[other].mean() for own, other in zip(lowered, others, strict=True)]
    np.testing.assert_allclose(rl.leave_one_out(got, GROUPS), expected, atol=1e-6)
    assert rl.penalised_rewards(batch.select([]), 0.1).tolist() == []


def test_the_kl_that_is_told_is_the_mean_over_learned_tokens() -> None:
    batch = judged()
    everything = [each for row in distances(batch) for each in row]
    assert rl.kl_metrics(batch) == {"reference_k1": pytest.approx(np.mean(everything))}
    assert rl.kl_metrics(batch.select([])) == {}
    assert rl.kl_metrics(rl.Batch.of(rewards=REWARDS, loss_mask=batch.loss_mask)) == {}


def test_without_a_weight_of_the_kl_nothing_is_read() -> None:
    assert rl.kl_columns(0) == ()
    assert rl.penalised_rewards(rl.Batch.of(rewards=REWARDS), 0).tolist() == REWARDS.tolist()
    assert {"rewards", "groups", *rl.kl_columns(0.1)} == set(judged().stored)


def broken() -> rl.Batch:
    """All tokens learned, one of them, in row 2, of no log-prob."""
    batch = judged()
    logprobs = np.where(np.arange(26) == 7, np.nan, batch.ragged("logprobs").values)
    everything = rl.Ragged(np.ones(26, np.bool_), batch.loss_mask.offsets)
    return batch.assign(logprobs=rl.Ragged(logprobs, everything.offsets), loss_mask=everything)


MISTAKES: list[tuple[Callable[[], object], str]] = [
    (lambda: rl.batch_advantages([0.0, np.nan]), "1 of 2 rewards are not finite"),
    (lambda: rl.optimal_advantages([0.0], [1, 1], [1]), "both must be [rows]"),
    (lambda: rl.optimal_advantages([0.0], [1], [1, 2]), "lengths have shape (2,) and rewards (1,)"),
    (lambda: rl.rescaled_advantages([0.0, np.inf], [1, 1]), "1 of 2 rewards are not finite"),
    (lambda: rl.rewards_to_go([0.0], MASK), "rewards_to_go: rewards have shape (1,) and there are 3 rows"),
    (lambda: rl.rewards_to_go([0.0] * 3, MASK, 0.1), "rewards_to_go: kl = 0.1 needs the columns"),
    (lambda: rl.rewards_to_go([0.0] * 3, MASK, 0.1), "reference.logprobs first, or set kl = 0"),
    (
        lambda: rl.penalised_rewards(rl.Batch.of(rewards=REWARDS), 0.1),
        "the batch has no `loss_mask`, `logprobs`, `reference_logprobs`: call policy.logprobs and reference.logprobs",
    ),
    (lambda: rl.penalised_rewards(broken(), 0.1), "row 2 has log-probs that are not finite"),
]


def test_columns_that_do_not_fit_are_refused_in_words() -> None:
    for call, message in MISTAKES:
        with pytest.raises(rl.DataError, match=re.escape(message)):
            call()
