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

    A reward of NaN is unknown: its row does not count in its group's mean and deviation, and its advantage is 0. This
    holds for all functions of rewards here. The deviation is that of a sample (n - 1), plus `epsilon`. The advantages
    of a group are 0 if it has one known reward, or if these are equal except for rounding (a few units in the last
    place of their dtype). Raises DataError if the shapes differ or a reward is infinite.

    GRPO: DeepSeekMath (arXiv:2402.03300), section 4.1.2. `scale="none"`: Dr. GRPO (arXiv:2503.20783),
    section 3: the division favours prompts that are too easy or too hard.
    """
    values, group, counts, known = _grouped("group_advantages", rewards, groups)
    centred = np.where(known, values - (np.bincount(group, values) / np.maximum(counts, 1))[group], 0.0)
    if scale == "none":
        return centred.astype(np.float32)
    deviation = np.sqrt(np.bincount(group, centred**2) / np.maximum(counts - 1, 1))
    dtype = np.asarray(rewards).dtype
    unit = np.finfo(dtype).eps if dtype.kind == "f" else 0.0
    sizes = np.zeros(len(counts))
    np.maximum.at(sizes, group[known], np.abs(np.asarray(rewards, np.float64)[known]))
    divisor = np.where(deviation <= _ROUNDING * unit * sizes, np.inf, deviation + epsilon)
    return (centred / divisor[group]).astype(np.float32)


def turn_advantages(rewards: Ragged, groups: ArrayLike) -> Ragged:
    """Compute the advantage of each turn: the sum of its reward and all later ones, standardised within the group.

    `rewards` is ragged float, with one value for each turn of a row. `groups` is int[rows]. Returns ragged float32, one
    value for each turn. The rewards of all turns of a group are standardised together, as in `group_advantages`. A turn
    gets 0 if its reward or a later one is unknown. Raises DataError if the shapes differ or a reward is infinite.

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
    compared[np.isnan(rewards.values)] = np.nan
    rows = [compared[begin:end] for begin, end in pairwise(rewards.offsets)]
    return Ragged.of([np.nan_to_num(np.cumsum(row[::-1])[::-1]) for row in rows], np.float32)


def trace_advantages(rewards: Ragged, traces: Ragged, groups: ArrayLike, seats: Ragged | None = None) -> Ragged:
    """Standardise the reward of each trace over the traces of its seat in its group. Each answer gets its trace's.

    `rewards`, `traces` and `seats` are ragged, float, int and int, with one value for each turn of a row: the reward,
    the number of its trace, and that of the trace's seat, such as the side of a game. Without `seats` there is one.
    `groups` is int[rows]. Returns ragged float32, one value for each turn, 0 where the reward is unknown. With one
    trace in each row these are the values of `group_advantages`. Raises DataError if the shapes differ or a reward is
    infinite.
    """
    labels = np.asarray(groups)
    seats = Ragged(np.zeros(len(traces.values), np.int32), traces.offsets) if seats is None else seats
    if labels.shape != (len(rewards),):
        raise DataError(
            f"trace_advantages: there are {len(rewards)} rows of rewards, and groups have shape {labels.shape}: give "
            "one group for each row"
        )
    for name, column in (("traces", traces), ("seats", seats)):
        if not np.array_equal(column.offsets, rewards.offsets):
            raise DataError(
                f"trace_advantages: {name} have {len(column.values)} values in {len(column)} rows, and rewards "
                f"{len(rewards.values)} in {len(rewards)}: give each row one value for each turn in both"
            )
    own = [np.unique(row, return_index=True, return_inverse=True)[1:] for row in traces]
    compared, sides = (
        Ragged.of([row[first] for row, (first, _) in zip(column, own, strict=True)], dtype)
        for column, dtype in ((rewards, np.float32), (seats, np.int32))
    )
    pairs = np.stack([np.unique(np.repeat(labels, compared.lengths), return_inverse=True)[1], sides.values], axis=1)
    rivals = np.unique(pairs, axis=0, return_inverse=True)[1].reshape(-1)
    compared = Ragged(group_advantages(compared.values, rivals), compared.offsets)
    return Ragged.of([row[number] for row, (_, number) in zip(compared, own, strict=True)], np.float32)


def leave_one_out(rewards: ArrayLike, groups: ArrayLike) -> NDArray[np.float32]:
    """Subtract from each reward the mean of the *other* rewards of its group.

    `rewards` is float[rows] and `groups` int[rows], in any order. Returns float32[rows]. The only known reward of a
    group has no baseline and gets 0. Raises DataError if the shapes differ or a reward is infinite.

    `r_i - mean(r_j, j != i)`: RLOO, Ahmadian et al. 2024 (arXiv:2402.14740), REINFORCE Leave-One-Out.
    """
    values, group, counts, known = _grouped("leave_one_out", rewards, groups)
    sums = np.bincount(group, values)[group]
    others = counts[group] - 1
    baseline = (sums - values) / np.maximum(others, 1)
    return np.where(known & (others > 0), values - baseline, 0.0).astype(np.float32)


def batch_advantages(rewards: ArrayLike) -> NDArray[np.float32]:
    """Subtract the mean of the batch from each reward: REINFORCE with the batch's mean as its baseline.

    `rewards` is float[rows]. Returns float32[rows]. Raises DataError if the shape is wrong or a reward is infinite.

    Williams 1992, "Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning", where
    the baseline must not depend on the row. This mean does, by one row of N, so the expected gradient is (N - 1) / N of
    the unbiased one.
    """
    return group_advantages(rewards, np.zeros(np.shape(rewards), np.int64), scale="none")


def optimal_advantages(rewards: ArrayLike, groups: ArrayLike, lengths: ArrayLike) -> NDArray[np.float32]:
    """Subtract from each reward the mean of its group, weighted by the number of learned tokens of each row.

    `rewards` is float[rows], `groups` and `lengths` are int[rows], in any order. Returns float32[rows]. A group without
    learned tokens gets 0. Raises DataError if the shapes differ or a reward is infinite.

    `r_i - sum_j l_j r_j / sum_j l_j`: the baseline with the lowest variance if a row's squared gradient grows with its
    length. OPO (arXiv:2505.23585).
    """
    values, group, _, known = _grouped("optimal_advantages", rewards, groups)
    weights = np.asarray(lengths, np.float64)
    if weights.shape != values.shape:
        raise DataError(
            f"optimal_advantages: lengths have shape {weights.shape} and rewards {values.shape}: give one length for "
            "each row"
        )
    weights = np.where(known, weights, 0.0)
    totals = np.bincount(group, weights)
    baseline = np.bincount(group, weights * values) / np.where(totals > 0, totals, 1)
    return np.where(known & (totals[group] > 0), values - baseline[group], 0.0).astype(np.float32)


def rescaled_advantages(rewards: ArrayLike, groups: ArrayLike) -> NDArray[np.float32]:
    """Subtract the mean of its group from each reward, and scale up to make good for groups of equal rewards.

    `rewards` is float[rows] and `groups` int[rows], in any order. Returns float32[rows]. Groups of equal rewards teach
    nothing and make the mean gradient smaller. The factor undoes that: it is the number of known rewards, divided by
    the number of those in groups with different rewards. Raises DataError if the shapes differ or a reward is infinite.

    GPG (arXiv:2504.02546), whose factor is `B / (B - M)` for M of B rows in such groups, without dividing by the
    standard deviation.
    """
    centred = group_advantages(rewards, groups, scale="none")
    _, group = np.unique(groups, return_inverse=True)
    differ = np.bincount(group, centred != 0) > 0
    known = ~np.isnan(np.asarray(rewards, np.float64))
    return centred * np.float32(known.sum() / max(1, int((differ[group] & known).sum())))


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
    whose reward is that of the text so far. With an unknown reward, NaN, the advantages of a row are 0 and its returns
    are its values. Raises DataError for wrong shapes, an infinite reward, or a missing column. Schulman et al. 2016
    (arXiv:1506.02438), equations 16 to 18; KL in the reward: Ziegler et al. 2019 (arXiv:1909.08593), equation 2.
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
    unknown = np.isnan(last)
    last[unknown] = 0
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
    advantages[np.repeat(unknown, counts)] = 0
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
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Return rewards minus the first known one of their group, float64[rows], and 0 for unknown ones.

    Advantages do not depend on a constant added to a group's rewards, and equal rewards give exactly 0 this way. Also
    returns each row's group from 0, each group's number of known rewards, and which rewards are known.
    """
    values, labels = np.asarray(rewards, np.float64), np.asarray(groups)
    if values.ndim != 1 or values.shape != labels.shape:
        raise DataError(
            f"{name}: rewards have shape {values.shape} and groups {labels.shape}; "
            "both must be [rows], one reward and one group for each row."
        )
    _check_finite(name, values)
    known = ~np.isnan(values)
    names, group = np.unique(labels, return_inverse=True)
    rows = np.flatnonzero(known)[::-1]  # the first row of a group is assigned last
    first = np.zeros(len(names))
    first[group[rows]] = values[rows]
    counts = np.bincount(group[known], minlength=len(names))
    return np.where(known, values - first[group], 0.0), group.astype(np.int64), counts.astype(np.int64), known


def _check_finite(name: str, rewards: NDArray[np.float64]) -> None:
    bad = np.flatnonzero(np.isinf(rewards))
    if len(bad):
        raise DataError(
            f"{name}: {len(bad)} of {len(rewards)} rewards are infinite; the first is {rewards[bad[0]]} "
            f"in row {bad[0]}. Give such rows a reward, NaN if it is unknown, or drop them with batch.select."
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
