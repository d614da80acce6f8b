"""Losses of reward models: on pairs with a better text, and on the steps of a text, right or wrong.

A loss is given the score at each token that is learned: the last of a row, or the last of each step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from meshrl.losses.base import Normalised, Predicts, SequenceNormalised, TokenLoss

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


class BradleyTerryLoss(SequenceNormalised):
    """The loss of pairs of texts: the better one's score r_w is to be above the other's, r_l.

    The mean over pairs of `bradley_terry` and, where `centre` is above 0, of `centre * (r_w + r_l)^2`. Reads
    `token_scores`, `margins`, `least_margins`, `pair_sums` and `preferred`, which `score_columns` makes of pairs. Where
    `preferred` is 0 in both rows, neither is preferred: the loss is 0 there, and nothing is learned.

    Each row moves the margin and the sum by its own score, from where they were when `score_columns` computed them.
    Before the model has changed the gradient is exactly that of the pairs' mean loss, however rows are divided; so call
    it before each update. The diagnostic `drift`, how far a score is from `token_scores`, is 0 then but for rounding.
    """

    centre: float = Field(default=0.0, ge=0)
    """The weight of the squared sum of a pair's scores, which pairs leave free: it holds their mean near 0 (Eisenstein
    et al. 2023, arXiv:2312.09244, with 0.01)."""

    @property
    def predicts(self) -> Predicts:
        """A reward model's scores."""
        return "scores"

    @property
    def columns(self) -> tuple[str, ...]:
        """The batch's columns it reads."""
        return ("token_scores", "margins", "least_margins", "pair_sums", "preferred")

    def __call__(self, logprobs: Tensor, columns: Mapping[str, Tensor]) -> TokenLoss:
        """The loss of each row's pair, float[rows]; what a policy's loss is given as `logprobs` are scores."""
        moved = logprobs - columns["token_scores"]
        preferred = columns["preferred"]
        values = bradley_terry(columns["margins"] + preferred * moved, columns["least_margins"])
        if self.centre:
            values = values + self.centre * (columns["pair_sums"] + moved).square()
        # As PreferenceLoss: a pair's two rows give its loss twice, each with one half of its gradient.
        values = (2 * values - values.detach()) * preferred.abs()
        return TokenLoss(values, {"drift": moved.detach().abs()})


def bradley_terry(margins: Tensor, least: Tensor) -> Tensor:
    """`-log sigmoid(h - m)` of margins h = r_w - r_l and the margins m that they should exceed.

    float[any] both, as the answer. Ouyang et al. 2022 (arXiv:2203.02155), equation 1, with m = 0; with m by how much
    the one is better, Llama 2 (Touvron et al. 2023, arXiv:2307.09288), equation 2.
    """
    apart = least - margins
    return apart.logaddexp(apart.new_zeros(()))


class ProcessLoss(Normalised):
    """The loss of the steps of texts, each labelled with the chance that it is right: binary cross-entropy.

    Reads `labels`, float[tokens], from 0 to 1 at the last token of each step: `with_labels` makes them. "token-mean" is
    the mean over all steps, "sequence-mean" that over texts. Lightman et al. 2023 (arXiv:2305.20050); Math-Shepherd
    (Wang et al. 2023, arXiv:2312.08935), equation 2, whose labels are hard or soft estimates. Diagnostic: `accuracy`,
    whether the score is on the label's side of even chances.
    """

    @property
    def predicts(self) -> Predicts:
        """A reward model's scores."""
        return "scores"

    @property
    def columns(self) -> tuple[str, ...]:
        """The batch's columns it reads."""
        return ("labels",)

    def __call__(self, logprobs: Tensor, columns: Mapping[str, Tensor]) -> TokenLoss:
        """The loss of each step, float[steps]; what a policy's loss is given as `logprobs` are scores."""
        labels = columns["labels"]
        scores = logprobs.detach()
        right = (scores > 0).where(labels > 0.5, scores < 0).float()
        return TokenLoss(step_cross_entropy(logprobs, labels), {"accuracy": right})


def step_cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    """`-y log sigmoid(r) - (1 - y) log(1 - sigmoid(r))` of scores r and labels y, float[any] both, as the answer."""
    return scores.logaddexp(scores.new_zeros(())) - labels * scores
