"""Advantages: how much better a completion is than others of its prompt, or a token than a critic expected."""

from itertools import pairwise
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field

from meshrl.algo.columns import learned_column, learned_counts, learned_values
from meshrl.config import Config
from meshrl.data import Batch, Ragged
from meshrl.errors import DataError

Scale: TypeAlias = Literal["std", "none"]
"""Whether group advantages are divided by the group's standard deviation."""


_ROUNDING: Final = 4
"""Units in the last place: a smaller deviation of a group's rewards counts as rounding error."""
_EPSILON: Final = 1e-8
"""Added to the variance in `whiten`, so that values that differ only by rounding stay near 0."""


class Gae(Config):
    """Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438), with an optional KL in the reward."""

    discount: float = Field(default=1.0, ge=0, le=1)
    """Discount of rewards for each learned token, gamma."""
    decay: float = Field(default=0.95, ge=0, le=1)
    """Trade-off between bias and variance, lambda: 0 trusts the critic (low variance), 1 the reward (no bias)."""
    kl: float = Field(default=0.0, ge=0)
    """Weight of the KL to the reference, which is subtracted from each token's reward."""


def group_advantages(
    rewards: ArrayLike, groups: ArrayLike, *, scale: Scale = "std", epsilon: float = 1e-6
) -> NDArray[np.float32]:
    """Subtract the mean of its group from each reward, and divide by the group's standard deviation.

    `rewards` is float[rows]. `groups` is int[rows]: rows with the same number are completions of one prompt. They need
    not be adjacent, and groups may differ in size. `scale="none"` does not divide. Returns float32[rows].

    The deviation is that of a sample (n - 1), plus `epsilon`. The advantages of a group are 0 if it has one row, or if
    its rewards are equal except for rounding (a few units in the last place of their dtype). Raises DataError if the
    shapes differ or a reward is not finite.

    GRPO: DeepSeekMath (arXiv:2402.03300), section 4.1.2. `scale="none"`: Dr. GRPO (arXiv:2503.20783),
    section 3: the division favours prompts that are too easy or too hard.
    """
    values, group, counts = _grouped("group_advantages", rewards, groups)
    centred = values - (np.bincount(group, values) / counts)[group]
    if scale == "none":
        return centred.astype(np.float32)
    deviation = np.sqrt(np.bincount(group, centred**2) / np.maximum(counts - 1, 1))
    given = np.asarray(rewards)
    unit = np.finfo(given.dtype).eps if given.dtype.kind == "f" else 0.0
    sizes = np.zeros(len(counts))
    np.maximum.at(sizes, group, np.abs(given))
    divisor = np.where(deviation <= _ROUNDING * unit * sizes, np.inf, deviation + epsilon)
    return (centred / divisor[group]).astype(np.float32)


def turn_advantages(rewards: Ragged, groups: ArrayLike) -> Ragged:
    """Compute the advantage of each turn: the sum of its reward and all later ones, standardised within the group.

    `rewards` is ragged float, with one value for each turn of a row. `groups` is int[rows]. Returns ragged float32, one
    value for each turn. The rewards of all turns of a group are standardised together, as in `group_advantages`. Raises
    DataError if the shapes differ or a reward is not finite.

    `A_t = sum_{k >= t} (r_k - mean(R)) / std(R)`, with R all rewards of the group: GRPO with process supervision,
    DeepSeekMath (arXiv:2402.03300), section 4.1.3, where a turn is a step.
    """
    labels = np.asarray(groups)
    if labels.shape != (len(rewards),):
        raise DataError(
            f"turn_advantages: there are {len(rewards)} rows of rewards, and groups have shape {labels.shape}: give "
            "one group for each row"
        )
    compared = group_advantages(rewards.values, np.repeat(labels, rewards.lengths)).astype(np.float64)
    rows = [compared[begin:end] for begin, end in pairwise(rewards.offsets)]
    return Ragged.of([np.cumsum(row[::-1])[::-1] for row in rows], np.float32)


def leave_one_out(rewards: ArrayLike, groups: ArrayLike) -> NDArray[np.float32]:
    """Subtract from each reward the mean of the *other* rewards of its group.

    `rewards` is float[rows] and `groups` int[rows], in any order. Returns float32[rows]. A row that is alone in its
    group has no baseline and gets 0. Raises DataError if the shapes differ or a reward is not finite.

    `r_i - mean(r_j, j != i)`: RLOO, Ahmadian et al. 2024 (arXiv:2402.14740), REINFORCE Leave-One-Out.
    """
    values, group, counts = _grouped("leave_one_out", rewards, groups)
    sums = np.bincount(group, values)[group]
    others = counts[group] - 1
    baseline = (sums - values) / np.maximum(others, 1)
    return np.where(others > 0, values - baseline, 0.0).astype(np.float32)


def batch_advantages(rewards: ArrayLike) -> NDArray[np.float32]:
    """Subtract the mean of the batch from each reward: REINFORCE with the batch's mean as its baseline.

    `rewards` is float[rows]. Returns float32[rows]. Raises DataError if the shape is wrong or a reward is not finite.

    Williams 1992, "Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning", where
    the baseline must not depend on the row. This mean does, by one row of N, so the expected gradient is (N - 1) / N of
    the unbiased one.
    """
    return group_advantages(rewards, np.zeros(np.shape(rewards), np.int64), scale="none")


def optimal_advantages(rewards: ArrayLike, groups: ArrayLike, lengths: ArrayLike) -> NDArray[np.float32]:
    """Subtract from each reward the mean of its group, weighted by the number of learned tokens of each row.

    `rewards` is float[rows], `groups` and `lengths` are int[rows], in any order. Returns float32[rows]. A group without
    learned tokens gets 0. Raises DataError if the shapes differ or a reward is not finite.

    `r_i - sum_j l_j r_j / sum_j l_j`: the baseline with the lowest variance if a row's squared gradient grows with its
    length. OPO (arXiv:2505.23585).
    """
    values, group, _ = _grouped("optimal_advantages", rewards, groups)
    weights = np.asarray(lengths, np.float64)
    if weights.shape != values.shape:
        raise DataError(
            f"optimal_advantages: lengths have shape {weights.shape} and rewards {values.shape}: give one length for "
            "each row"
        )
    totals = np.bincount(group, weights)
    baseline = np.bincount(group, weights * values) / np.where(totals > 0, totals, 1)
    return np.where(totals[group] > 0, values - baseline[group], 0.0).astype(np.float32)


def rescaled_advantages(rewards: ArrayLike, groups: ArrayLike) -> NDArray[np.float32]:
    """Subtract the mean of its group from each reward, and scale up to make good for groups of equal rewards.

    `rewards` is float[rows] and `groups` int[rows], in any order. Returns float32[rows]. Groups of equal rewards teach
    nothing and make the mean gradient smaller. The factor undoes that: it is the number of rows, divided by the number
    of rows in groups with different rewards. Raises DataError if the shapes differ or a reward is not finite.

    GPG (arXiv:2504.02546), whose factor is `B / (B - M)` for M of B rows in such groups, without dividing by the
    standard deviation.
    """
    centred = group_advantages(rewards, groups, scale="none")
    _, group = np.unique(groups, return_inverse=True)
    differ = np.bincount(group, centred != 0) > 0
    return centred * np.float32(len(centred) / max(1, int(differ[group].sum())))


def rewards_to_go(
    rewards: ArrayLike,
    loss_mask: Ragged,
    kl: float = 0.0,
    logprobs: Ragged | None = None,
    reference: Ragged | None = None,
) -> Ragged:
    """Compute for each learned token the sum of its reward and later ones in the row, ragged float32, 0 elsewhere.

    `rewards`, float[rows], are given to the last learned token of each row. With `kl` above 0, each token's reward is
    lowered by `kl (logprobs - reference)`. Raises DataError as `gae` does.

    `r - kl sum_{i >= t} log(pi(y_i) / pi_ref(y_i))`: REINFORCE++ (arXiv:2501.03262). Its advantages are
    `whiten(rewards_to_go(...), loss_mask)`.
    """
    nothing = Ragged(np.zeros(len(loss_mask.values), np.float32), loss_mask.offsets)
    return _gae("rewards_to_go", "kl", rewards, nothing, loss_mask, Gae(decay=1, kl=kl), logprobs, reference)[0]


def gae(
    rewards: ArrayLike,
    values: Ragged,
    loss_mask: Ragged,
    config: Gae,
    logprobs: Ragged | None = None,
    reference: Ragged | None = None,
) -> tuple[Ragged, Ragged]:
    """Compute advantages and returns of each learned token, ragged float32, zero where `loss_mask` is False.

    `rewards`, float[rows], are given to the last learned token of each row. A row without learned tokens is skipped.
    Entry t of `values` belongs to token t, like that of a log-prob column: it is the value of the state that the token
    was sampled from, which the critic predicts at the token before. With `config.kl` = b > 0, each token's reward is
    lowered by `b (logprobs - reference)`, the k1 estimate of the KL.

    The formulas use gamma and lambda of `config`, and run over the learned tokens of a row only. The state after a
    token is that of the next learned token, so the text of a tool between them is not a step:

        delta_t = r_t + gamma V_{t+1} - V_t        advantage_t = sum_l (gamma lambda)^l delta_{t+l}
        return_t = advantage_t + V_t

    V is 0 after the last learned token. Every row counts as ended there, even one that was cut at its token limit,
    whose reward is that of the text so far. Raises DataError for wrong shapes, a reward that is not finite, or a
    missing column. Schulman et al. 2016 (arXiv:1506.02438), equations 16 to 18; KL in the reward: Ziegler et al. 2019
    (arXiv:1909.08593), equation 2.
    """
    return _gae("gae", "gae.kl", rewards, values, loss_mask, config, logprobs, reference)


def whiten(advantages: Ragged, loss_mask: Ragged) -> Ragged:
    """Scale advantages to mean 0 and standard deviation 1 over the learned tokens of the batch, and to 0 elsewhere.

    Returns ragged float32. The deviation is that of the population (n). 1e-8 is added to the variance, so equal values
    become 0, and nearly equal values stay small. PPO implementations do this before each update; see Huang et al. 2024
    (arXiv:2403.17031), detail "Whiten advantages". Raises DataError if the columns do not fit each other.
    """
    values = learned_values("advantages", advantages, loss_mask)
    if len(values):
        values = values - values[0]  # so that equal ones give exactly 0
        values -= values.mean()
        values /= np.sqrt(values.var() + _EPSILON)
    return learned_column(values, loss_mask)


def _gae(
    name: str,
    setting: str,
    rewards: ArrayLike,
    values: Ragged,
    loss_mask: Ragged,
    config: Gae,
    logprobs: Ragged | None,
    reference: Ragged | None,
) -> tuple[Ragged, Ragged]:
    """Compute the result of `gae`. `name`, `setting`: names of the function and of the KL's weight, for messages."""
    last = np.array(rewards, np.float64)
    if last.shape != (len(loss_mask),):
        raise DataError(
            f"{name}: rewards have shape {last.shape} and there are {len(loss_mask)} rows: give one for each row"
        )
    value = learned_values("values", values, loss_mask)
    counts = learned_counts(loss_mask)
    last[counts == 0] = 0
    _check_finite(name, last)
    ends = np.cumsum(counts)
    reward = np.zeros(len(value))
    if config.kl:
        if logprobs is None or reference is None:
            raise DataError(
                f"{name}: kl = {config.kl:g} needs the columns `logprobs` and `reference_logprobs`, and one of them is "
                f"missing: call policy.logprobs and reference.logprobs first, or set {setting} = 0"
            )
        own = learned_values("logprobs", logprobs, loss_mask)
        reward -= config.kl * (own - learned_values("reference_logprobs", reference, loss_mask))
    reward[ends[counts > 0] - 1] += last[counts > 0]
    advantages = _discounted(reward, value, counts, config)
    return learned_column(advantages, loss_mask), learned_column(advantages + value, loss_mask)


def _discounted(
    rewards: NDArray[np.float64], values: NDArray[np.float64], counts: NDArray[np.int64], config: Gae
) -> NDArray[np.float64]:
    """Run the recursion from the end, for all rows at once. `counts`: learned tokens of each row."""
    longest = np.argsort(-counts, kind="stable")
    tails = (np.cumsum(counts) - 1)[longest]  # the last learned token of each row, longest row first
    alive = np.searchsorted(-counts[longest], -np.arange(int(counts.max(initial=0))))
    advantages = np.empty_like(values)
    after, later = np.zeros(len(counts)), np.zeros(len(counts))  # V and the advantage one token later
    for back, rows in enumerate(alive.tolist()):
        at = tails[:rows] - back
        delta = rewards[at] + config.discount * after[:rows] - values[at]
        later = delta + config.discount * config.decay * later[:rows]
        after = values[at]
        advantages[at] = later
    return advantages


def _grouped(
    name: str, rewards: ArrayLike, groups: ArrayLike
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """Return rewards minus the first of their group, float64[rows], each row's group from 0, and each group's size.

    Advantages do not depend on a constant added to a group's rewards, and equal rewards give exactly 0 this way.
    """
    values, labels = np.asarray(rewards, np.float64), np.asarray(groups)
    if values.ndim != 1 or values.shape != labels.shape:
        raise DataError(
            f"{name}: rewards have shape {values.shape} and groups {labels.shape}; "
            "both must be [rows], one reward and one group for each row."
        )
    _check_finite(name, values)
    _, first, group, counts = np.unique(labels, return_index=True, return_inverse=True, return_counts=True)
    return values - values[first][group], group.astype(np.int64), counts.astype(np.int64)


def _check_finite(name: str, rewards: NDArray[np.float64]) -> None:
    bad = np.flatnonzero(~np.isfinite(rewards))
    if len(bad):
        raise DataError(
            f"{name}: {len(bad)} of {len(rewards)} rewards are not finite; the first is {rewards[bad[0]]} "
            f"in row {bad[0]}. Give such rows a reward, or drop them with batch.select."
        )


def with_advantages(batch: Batch, values: Ragged, config: Gae) -> Batch:
    """Add `values` (float32, aligned with `tokens`), `advantages` and `returns` to a batch, as `gae` defines them.

    Reads `rewards` and `loss_mask`, and `logprobs` and `reference_logprobs` if `config.kl` is above 0. Raises DataError
    if one is missing.
    """
    logprobs, reference = (
        batch.ragged(name) if config.kl and name in batch else None for name in ("logprobs", "reference_logprobs")
    )
    advantages, returns = gae(batch.rewards, values, batch.loss_mask, config, logprobs, reference)
    return batch.assign(values=values, advantages=advantages, returns=returns)
