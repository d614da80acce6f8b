"""Preferences: pairs with a better completion, and completions with a label good or bad."""

from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshrl.data import Batch
from meshrl.errors import DataError

_READ: Final = ("logprobs", "reference_logprobs", "loss_mask")


def best_and_worst(batch: Batch) -> Batch:
    """Of each group the row of the highest and that of the lowest reward, side by side.

    Needs `rewards` and `groups`. Adds `preferred`, int8: 1 for the best and -1 for the worst, 0 for both in a group
    whose rewards are all equal. Of equal rewards the first is the best and the last the worst. DataError where a group
    has one row only.
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
    """`log pi(y|x) / ref(y|x)` of each row: `logprobs` less `reference_logprobs` over its learned tokens, in nats.

    float64[rows]; 0 for a row without a learned token.
    """
    mask = batch.loss_mask
    apart = np.asarray(batch.ragged("logprobs").values, np.float64)
    apart = np.where(mask.values, apart - np.asarray(batch.ragged("reference_logprobs").values, np.float64), 0)
    sums = np.bincount(np.repeat(np.arange(len(mask)), mask.lengths), apart, minlength=len(mask))
    return sums.astype(np.float64, copy=False)


def pair_margins(log_ratios: ArrayLike, groups: ArrayLike, preferred: ArrayLike) -> NDArray[np.float64]:
    """The margin of each row's pair: the log-ratio of its preferred row less that of the other.

    `log_ratios` float[rows]; `groups` int[rows], two rows of each number; `preferred` [rows], 1 and -1 in a pair, or 0
    in both, whose margin is 0. Returns float64[rows], the same for both rows: h in DPO (arXiv:2305.18290), equation 7,
    before beta. DataError where the rows are no pairs.
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
    """Pairs with `log_ratios` and `margins` (float32, one a row), which `PreferenceLoss` reads: before each update.

    The batch has `logprobs`, `reference_logprobs`, `loss_mask`, `groups` and `preferred`. DataError where its rows are
    no pairs, or one has nothing to learn.
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
    """An estimate of the policy's KL from the reference, in nats, as KTO takes it: never below 0.

    The mean log-ratio of rows that `mismatched` has made, with `logprobs`, `reference_logprobs` and `loss_mask`. KTO
    (arXiv:2402.01306), the estimate of its reference point.
    """
    return max(0.0, float(log_ratios(await batch.load(*_READ)).mean()))


def pair_metrics(batch: Batch) -> dict[str, float]:
    """What `preference_columns` found: means over pairs in which one is preferred; NaN where there are none.

    `margin`; `accuracy`, how often it is above 0; `chosen_log_ratio` and `rejected_log_ratio`. All before the update.
    """
    return pair_means(batch, "log_ratios", "log_ratio")


def pair_means(batch: Batch, column: str, name: str) -> dict[str, float]:
    """Means over pairs in which one is preferred: of `margins`, how often they are above 0, and a column of both texts.

    That is `margin`, `accuracy`, `chosen_NAME` and `rejected_NAME`; NaN where there are no such pairs.
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
