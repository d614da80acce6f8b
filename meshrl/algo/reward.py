"""Losses of reward models: for preference pairs of texts, and for the steps of a text, right or wrong.

A loss receives the score at each learned token: the last token of a row, or the last of each step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from meshrl.algo.base import Normalised, Predicts, SequenceNormalised, TokenLoss

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


class BradleyTerryLoss(SequenceNormalised):
    """The loss of preference pairs of texts: it raises the better text's score r_w above the other's, r_l.

    The loss is the mean over pairs of `bradley_terry`, plus `centre * (r_w + r_l)^2` if `centre` is above 0. Reads
    `token_scores`, `margins`, `least_margins`, `pair_sums` and `preferred`, which `score_columns` makes from pairs. If
    `preferred` is 0 in both rows, neither is preferred: the loss is 0 and nothing is learned.

    Each row changes the margin and the sum by its own score, starting from the values of `score_columns`. Until the
    model changes, the gradient is exactly that of the pairs' mean loss, regardless of how rows are divided. So call
    `score_columns` before each update. The diagnostic `drift`, the distance of a score from `token_scores`, is then 0
    except for rounding.
    """

    centre: float = Field(default=0.0, ge=0)
    """Weight of the squared sum of a pair's scores. It keeps the mean score near 0, which pairs alone do not determine
    (Eisenstein et al. 2023, arXiv:2312.09244, with 0.01)."""

    @property
    def predicts(self) -> Predicts:
        """A reward model's scores."""
        return "scores"

    @property
    def columns(self) -> tuple[str, ...]:
        """The batch columns that the loss reads."""
        return ("token_scores", "margins", "least_margins", "pair_sums", "preferred")

    def __call__(self, logprobs: Tensor, columns: Mapping[str, Tensor]) -> TokenLoss:
        """Compute the loss of each row's pair, float[rows]. `logprobs` are a reward model's scores here."""
        moved = logprobs - columns["token_scores"]
        preferred = columns["preferred"]
        values = bradley_terry(columns["margins"] + preferred * moved, columns["least_margins"])
        if self.centre:
            values = values + self.centre * (columns["pair_sums"] + moved).square()
        # As in PreferenceLoss: both rows of a pair give its loss, each with half of its gradient.
        values = (2 * values - values.detach()) * preferred.abs()
        return TokenLoss(values, {"drift": moved.detach().abs()})


def bradley_terry(margins: Tensor, least: Tensor) -> Tensor:
    """Compute `-log sigmoid(h - m)` of margins h = r_w - r_l and the margins m that they should exceed.

    Both are float[any], and so is the result. With m = 0: Ouyang et al. 2022 (arXiv:2203.02155), equation 1. With m as
    the degree of the preference: Llama 2 (Touvron et al. 2023, arXiv:2307.09288), equation 2.
    """
    apart = least - margins
    return apart.logaddexp(apart.new_zeros(()))


class ProcessLoss(Normalised):
    """The loss of a process reward model: binary cross-entropy of steps labelled with their chance to be right.

    Reads `labels`, float[tokens], from 0 to 1 at the last token of each step. `with_labels` makes them. "token-mean" is
    the mean over all steps, "sequence-mean" the mean over texts. Lightman et al. 2023 (arXiv:2305.20050); Math-Shepherd
    (Wang et al. 2023, arXiv:2312.08935), equation 2, whose labels are hard or soft estimates. Diagnostic: `accuracy`,
    the share of steps whose score and label agree on whether right is more likely.
    """

    @property
    def predicts(self) -> Predicts:
        """A reward model's scores."""
        return "scores"

    @property
    def columns(self) -> tuple[str, ...]:
        """The batch columns that the loss reads."""
        return ("labels",)

    def __call__(self, logprobs: Tensor, columns: Mapping[str, Tensor]) -> TokenLoss:
        """Compute the loss of each step, float[steps]. `logprobs` are a reward model's scores here."""
        labels = columns["labels"]
        scores = logprobs.detach()
        right = (scores > 0).where(labels > 0.5, scores < 0).float()
        return TokenLoss(step_cross_entropy(logprobs, labels), {"accuracy": right})


def step_cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    """Compute `-y log sigmoid(r) - (1 - y) log(1 - sigmoid(r))` of scores r and labels y. All are float[any]."""
    return scores.logaddexp(scores.new_zeros(())) - labels * scores
