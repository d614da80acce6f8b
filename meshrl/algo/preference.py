"""Preferences: losses for pairs of completions and for labelled completions, and the columns that they read.

Each is a loss of a whole row, and every token of the row has its value. Columns that are computed before the update
hold what a row needs from other rows. So the rows of a pair may be in different micro-batches and on different ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self, TypeAlias

import numpy as np
from pydantic import Field, model_validator

from meshrl.algo.base import SequenceNormalised, TokenLoss, row_sums
from meshrl.algo.columns import learned_counts, means
from meshrl.algo.kl import KL_COLUMNS, log_ratios
from meshrl.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import ArrayLike, NDArray
    from torch import Tensor

    from meshrl.data import Batch

PairForm: TypeAlias = Literal["sigmoid", "ipo", "hinge"]
"""The function of a pair's margin that is minimised: `dpo_loss`, `ipo_loss` or `hinge_loss`."""


class NearReference(SequenceNormalised):
    """The base of losses of whole rows that hold a policy near its reference."""

    beta: float = Field(default=0.1, gt=0)
    """Strength of the pull towards the reference. Small values let the policy move far from it."""


class PreferenceLoss(NearReference):
    """The loss of preference pairs: DPO (arXiv:2305.18290), IPO (arXiv:2310.12036) or a hinge.

    The loss is the mean over pairs of a function of the margin, `log pi(w)/ref(w) - log pi(l)/ref(l)`, for the
    preferred row w and the other row l, summed over their learned tokens. Reads `logprobs`, `margins` and `preferred`,
    which `preference_columns` and `answer_pairs` or `best_and_worst` make. `preferred` is 1 and -1 for the rows of a
    pair. If it is 0 in both, neither is preferred: the loss is 0 and nothing is learned.

    Each row changes the margin by its own log-probs, starting from `margins`. Until the policy changes, the gradient is
    exactly that of the pairs' mean loss, regardless of how rows are divided. So compute `margins` again before each
    update. The diagnostic `drift`, the distance of a token's log-prob from `logprobs`, is then 0 except for rounding.
    """

    form: PairForm = "sigmoid"
    """The function of the margin: `sigmoid` is DPO, `ipo` is IPO, `hinge` is a hinge."""
    smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Probability that a label is wrong, for form "sigmoid" (conservative DPO)."""

    @model_validator(mode="after")
    def _smoothing_of_the_sigmoid(self) -> Self:
        if self.smoothing and self.form != "sigmoid":
            raise ValueError(
                f'smoothing = {self.smoothing:g} has no effect with form = "{self.form}": set form = "sigmoid", or '
                "remove it"
            )
        return self

    @property
    def columns(self) -> tuple[str, ...]:
        """The batch columns that the loss reads."""
        return ("logprobs", "margins", "preferred", "rows")

    def __call__(self, logprobs: Tensor, columns: Mapping[str, Tensor]) -> TokenLoss:
        """Compute the loss of each token's row, float[tokens]."""
        moved = logprobs - columns["logprobs"]
        preferred = columns["preferred"]
        values = self.of_margins(columns["margins"] + preferred * row_sums(moved, columns["rows"]))
        return pair_loss(values, preferred, moved)

    def of_margins(self, margins: Tensor) -> Tensor:
        """Compute the loss of pairs with these margins, float[any]."""
        match self.form:
            case "sigmoid":
                return dpo_loss(margins, self.beta, self.smoothing)
            case "ipo":
                return ipo_loss(margins, self.beta)
            case "hinge":
                return hinge_loss(margins, self.beta)


def pair_loss(values: Tensor, preferred: Tensor, moved: Tensor) -> TokenLoss:
    """Make the loss of pairs, float[any], from their `values`, 0 where neither row is preferred. `drift` is `|moved|`.

    Both rows of a pair give its loss, each with half of its gradient, and the mean is over rows. So the value is right,
    and the gradient is doubled here.
    """
    return TokenLoss((2 * values - values.detach()) * preferred.abs(), {"drift": moved.detach().abs()})


def dpo_loss(margins: Tensor, beta: float, smoothing: float = 0.0) -> Tensor:
    """Compute DPO's logistic loss of margins h.

    `-(1 - smoothing) log sigmoid(beta h) - smoothing log sigmoid(-beta h)`. Takes float[any] and returns the same
    shape. Without smoothing it is DPO: Rafailov et al. 2023 (arXiv:2305.18290), equation 7. SPIN uses it too (Chen et
    al. 2024, arXiv:2401.01335, with the logistic loss), and calls beta lambda. With smoothing it is conservative DPO:
    Mitchell 2023, "A note on DPO with noisy preferences & relationship to IPO".
    """
    scaled = beta * margins
    zero = scaled.new_zeros(())
    loss = (-scaled).logaddexp(zero)
    return loss if not smoothing else (1 - smoothing) * loss + smoothing * scaled.logaddexp(zero)


def ipo_loss(margins: Tensor, beta: float) -> Tensor:
    """Compute IPO's squared distance of margins h from their target: `(h - 1 / (2 beta))^2`.

    Takes float[any] and returns the same shape. Azar et al. 2023 (arXiv:2310.12036), the sampled loss, whose tau is
    beta. As in the paper, margins are sums over tokens. Some implementations divide by the lengths.
    """
    return (margins - 1 / (2 * beta)).square()


def hinge_loss(margins: Tensor, beta: float) -> Tensor:
    """Compute the hinge loss of margins h, `max(0, 1 - beta h)`: a pair with a margin above `1 / beta` learns nothing.

    Takes float[any] and returns the same shape. SLiC's calibration loss on margins to a reference, as in Liu et al.
    2023 (arXiv:2309.06657), "hinge-norm".
    """
    return (1 - beta * margins).clamp(min=0)


class KtoLoss(NearReference):
    """The loss of KTO (arXiv:2402.01306), for single completions that are labelled good or bad.

    Reads `reference_logprobs`, `desirable` (bool, one for each row) and `kl`. `kl` has one number for each row, the
    same for all, which `mismatched_kl` estimates. `kto_utility` has the formula. Diagnostic: `utility`.
    """

    desirable: float = Field(default=1.0, ge=0)
    """Weight of good rows, lambda_D. Raise it if there are far fewer good rows than bad ones."""
    undesirable: float = Field(default=1.0, ge=0)
    """Weight of bad rows, lambda_U."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The batch columns that the loss reads."""
        return ("reference_logprobs", "desirable", "kl", "rows")

    def __call__(self, logprobs: Tensor, columns: Mapping[str, Tensor]) -> TokenLoss:
        """Compute the loss of each token's row, float[tokens]."""
        log_ratios = row_sums(logprobs - columns["reference_logprobs"], columns["rows"])
        desirable = columns["desirable"] > 0
        utility = kto_utility(log_ratios, columns["kl"], desirable, self.beta)
        weights = utility.new_full(utility.shape, self.undesirable).masked_fill(desirable, self.desirable)
        return TokenLoss(weights * (1 - utility), {"utility": utility.detach()})


def kto_utility(log_ratios: Tensor, kl: Tensor, desirable: Tensor, beta: float) -> Tensor:
    """Compute KTO's utility of rows: `sigmoid(beta (r - z))` for a desirable row, else `sigmoid(beta (z - r))`.

    `log_ratios` r and `kl` z are float[any], and `desirable` is bool. All have the same shape, which is that of the
    result. KTO's value v is the utility times the row's weight lambda, and its loss is the mean of `lambda - v`:
    Ethayarajh et al. 2024 (arXiv:2402.01306), L_KTO. No gradient goes through z.
    """
    gain = beta * (log_ratios - kl.detach())
    return gain.where(desirable, -gain).sigmoid()


def best_and_worst(batch: Batch) -> Batch:
    """Select the rows with the highest and the lowest reward of each group, next to each other.

    Reads `rewards` and `groups`. Adds `preferred`, int8: 1 for the best row and -1 for the worst, and 0 for both if all
    rewards of the group are equal. Among equal rewards, the first row is the best and the last one the worst. A group
    with fewer than two known rewards gives no pair. Raises DataError if a group has only one row.
    """
    names, counts = np.unique(batch.groups, return_counts=True)
    if (counts < 2).any():
        group = int(names[counts < 2][0])
        raise DataError(f"group {group} has one row, and a pair takes two: draw sampling.n = 2 or more a prompt")
    order = np.lexsort((-np.arange(len(batch)), batch.rewards, batch.groups))  # by group, the worst first, then later
    order = order[~np.isnan(batch.rewards[order])]
    _, starts, counts = np.unique(batch.groups[order], return_index=True, return_counts=True)
    starts, counts = starts[counts > 1], counts[counts > 1]
    worst, best = order[starts], order[starts + counts - 1]
    better = (batch.rewards[best] > batch.rewards[worst]).astype(np.int8)
    chosen = np.stack([best, worst], axis=1).reshape(-1)
    return batch.select(chosen).assign(preferred=np.stack([better, -better], axis=1).reshape(-1))


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
    batch = await batch.load(*KL_COLUMNS, "groups", "preferred")
    if len(empty := np.flatnonzero(learned_counts(batch.loss_mask) == 0)):
        raise DataError(
            f"row {empty[0]} of the pairs has no learned token: `loss_mask` is False in all of it; leave its pair out"
        )
    ratios = log_ratios(batch)
    margins = pair_margins(ratios, batch.groups, batch.row("preferred"))
    return batch.assign(log_ratios=ratios.astype(np.float32), margins=margins.astype(np.float32))


async def reference_point(batch: Batch) -> float:
    """Estimate KTO's reference point, the KL of the policy from the reference, in nats. Never below 0.

    It is the mean log-ratio of rows that `mismatched` has made, with `logprobs`, `reference_logprobs` and `loss_mask`.
    KTO (arXiv:2402.01306).
    """
    return max(0.0, float(log_ratios(await batch.load(*KL_COLUMNS)).mean()))


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
    scores = {f"chosen_{name}": values[chosen], f"rejected_{name}": values[rejected]}
    return means(margin=margins[chosen], accuracy=margins[chosen] > 0, **scores)
