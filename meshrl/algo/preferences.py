"""Preferences: pairs of a better and a worse completion, and completions that are labelled good or bad."""

from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshrl.data import Batch
from meshrl.errors import DataError

_READ: Final = ("logprobs", "reference_logprobs", "loss_mask")


def best_and_worst(batch: Batch) -> Batch:
    """Select the rows with the highest and the lowest reward of each group, next to each other.

    Reads `rewards` and `groups`. Adds `preferred`, int8: 1 for the best row and -1 for the worst, and 0 for both if all
    rewards of the group are equal. Among equal rewards, the first row is the best and the last one the worst. Raises
    DataError if a group has only one row.
    """
    order = np.lexsort((-np.arange(len(batch)), batch.rewards, batch.groups))  # by group, the worst first, then later
    _, starts, counts = np.unique(batch.groups[order], return_index=True, return_counts=True)
    if (counts < 2).any():
        group = int(batch.groups[order][starts[counts < 2][0]])
        raise DataError(f"group {group} has one row, and a pair takes two: draw sampling.n = 2 or more a prompt")
    worst, best = order[starts], order[starts + counts - 1]
    better = (batch.rewards[best] > batch.rewards[worst]).astype(np.int8)
    chosen = np.stack([best, worst], axis=1).reshape(-1)
    return batch.select(chosen).assign(preferred=np.stack([better, -better], axis=1).reshape(-1))


def log_ratios(batch: Batch) -> NDArray[np.float64]:
    """Compute `log pi(y|x) / ref(y|x)` of each row: `logprobs` minus `reference_logprobs`, summed over learned tokens.

    Returns float64[rows] in nats, 0 for a row without learned tokens.
    """
    mask = batch.loss_mask
    apart = np.asarray(batch.ragged("logprobs").values, np.float64)
    apart = np.where(mask.values, apart - np.asarray(batch.ragged("reference_logprobs").values, np.float64), 0)
    sums = np.bincount(np.repeat(np.arange(len(mask)), mask.lengths), apart, minlength=len(mask))
    return sums.astype(np.float64, copy=False)


def pair_margins(log_ratios: ArrayLike, groups: ArrayLike, preferred: ArrayLike) -> NDArray[np.float64]:
    """Compute the margin of each row's pair: the log-ratio of the preferred row minus that of the other.

    `log_ratios` is float[rows]. `groups` is int[rows], with two rows for each number. `preferred`, [rows], is 1 and -1
    in a pair, or 0 in both, which gives a margin of 0. Returns float64[rows], the same for both rows: h in DPO
    (arXiv:2305.18290), equation 7, before beta. Raises DataError if the rows are not pairs.
    """
    values, labels, signs = np.asarray(log_ratios, np.float64), np.asarray(groups), np.asarray(preferred, np.int64)
    if not values.shape == labels.shape == signs.shape or values.ndim != 1:
        raise DataError(
            f"pair_margins: log-ratios have shape {values.shape}, groups {labels.shape}, preferred {signs.shape}: "
            "give one of each a row"
        )
    names, pair, counts = np.unique(labels, return_inverse=True, return_counts=True)
    whole = (counts == 2) & (np.bincount(pair, signs) == 0) & np.isin(np.bincount(pair, np.abs(signs)), (0, 2))
    if not whole.all():
        at = int(np.flatnonzero(~whole)[0])
        raise DataError(
            f"pair_margins: group {names[at]} has {counts[at]} rows, preferred {signs[pair == at].tolist()}: a pair is "
            "two rows of one group, one with 1 and one with -1, or both with 0; answer_pairs and best_and_worst make "
            "pairs"
        )
    margins = np.bincount(pair, signs * values, minlength=len(names))
    return margins.astype(np.float64, copy=False)[pair]


async def preference_columns(batch: Batch) -> Batch:
    """Add `log_ratios` and `margins` (float32[rows]) to pairs, for `PreferenceLoss`. Call it before each update.

    Reads `logprobs`, `reference_logprobs`, `loss_mask`, `groups` and `preferred`. Raises DataError if the rows are not
    pairs, or if a row has no learned tokens.
    """
    batch = await batch.load(*_READ, "groups", "preferred")
    learned = np.array([mask.any() for mask in batch.loss_mask], np.bool_)
    if not learned.all():
        raise DataError(
            f"row {int(np.flatnonzero(~learned)[0])} of the pairs has no learned token: `loss_mask` is False in all of "
            "it; leave its pair out"
        )
    ratios = log_ratios(batch)
    margins = pair_margins(ratios, batch.groups, batch.row("preferred"))
    return batch.assign(log_ratios=ratios.astype(np.float32), margins=margins.astype(np.float32))


async def reference_point(batch: Batch) -> float:
    """Estimate KTO's reference point, the KL of the policy from the reference, in nats. Never below 0.

    It is the mean log-ratio of rows that `mismatched` has made, with `logprobs`, `reference_logprobs` and `loss_mask`.
    KTO (arXiv:2402.01306).
    """
    return max(0.0, float(log_ratios(await batch.load(*_READ)).mean()))


def pair_metrics(batch: Batch) -> dict[str, float]:
    """Compute metrics of pairs from `preference_columns`: means over pairs with a preference, NaN if there are none.

    The metrics are `margin`, `accuracy` (the share of margins above 0), `chosen_log_ratio` and `rejected_log_ratio`,
    all before the update.
    """
    return pair_means(batch, "log_ratios", "log_ratio")


def pair_means(batch: Batch, column: str, name: str) -> dict[str, float]:
    """Compute means over pairs with a preference: of `margins`, of whether they are above 0, and of a column.

    The result has `margin`, `accuracy`, `chosen_NAME` and `rejected_NAME`, NaN if there are no such pairs.
    """
    preferred, values, margins = (np.asarray(batch.row(each), np.float64) for each in ("preferred", column, "margins"))
    chosen, rejected = preferred > 0, preferred < 0
    found = {
        "margin": margins[chosen],
        "accuracy": margins[chosen] > 0,
        f"chosen_{name}": values[chosen],
        f"rejected_{name}": values[rejected],
    }
    return {key: float(each.mean()) if len(each) else float("nan") for key, each in found.items()}
