"""Losses of reward models, for pairs of texts and for the steps of a text, the columns that they read, and metrics.

A loss receives the score at each learned token: the last token of a row, or the last of each step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np
from pydantic import Field

from meshrl.algo.base import Normalised, Predicts, SequenceNormalised, TokenLoss
from meshrl.algo.columns import learned_column, learned_counts, learned_rows, learned_values, means
from meshrl.algo.preference import pair_loss, pair_margins, pair_means
from meshrl.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from meshrl.data import Batch


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
        return pair_loss(values, preferred, moved)


def bradley_terry(margins: Tensor, least: Tensor) -> Tensor:
    """Compute `-log sigmoid(h - m)` of margins h = r_w - r_l and the margins m that they should exceed.

    Both are float[any], and so is the result. With m = 0: Ouyang et al. 2022 (arXiv:2203.02155), equation 1. With m as
    the degree of the preference: Llama 2 (Touvron et al. 2023, arXiv:2307.09288), equation 2.
    """
    apart = least - margins
    return apart.logaddexp(apart.new_zeros(()))


class ProcessLoss(Normalised):
    """The loss of a process reward model: binary cross-entropy of steps labelled with their chance to be right.

    The loss of a step with score r and label y is `-y log sigmoid(r) - (1 - y) log(1 - sigmoid(r))`. Reads `labels`,
    float[tokens], from 0 to 1 at the last token of each step. `with_labels` makes them. "token-mean" is the mean over
    all steps, "sequence-mean" the mean over texts. Lightman et al. 2023 (arXiv:2305.20050); Math-Shepherd (Wang et al.
    2023, arXiv:2312.08935), equation 2, whose labels are hard or soft estimates. Diagnostic: `accuracy`, the share of
    steps whose score and label agree on whether right is more likely.
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
        return TokenLoss(logprobs.logaddexp(logprobs.new_zeros(())) - labels * logprobs, {"accuracy": right})


def score_metrics(batch: Batch) -> dict[str, float]:
    """Compute metrics of pairs from `score_columns`: means over pairs with a preference, NaN if there are none.

    The metrics are `margin`, `accuracy` (the share of margins above 0), `chosen_score` and `rejected_score`, all before
    the update.
    """
    return pair_means(batch, "scores", "score")


async def score_columns(batch: Batch) -> Batch:
    """Add the columns for `BradleyTerryLoss` to pairs. Call it before each update.

    Reads `token_scores`, `loss_mask`, `groups` and `preferred`. Adds float32[rows] columns: `scores` (the text's
    score), `margins` (the preferred text's score minus the other's), `pair_sums` (the sum of both), and, unless the
    batch has it, `least_margins` (0). Raises DataError if the rows are not pairs, or if a row does not have exactly one
    score.
    """
    batch = await batch.load("token_scores", "loss_mask", "groups", "preferred")
    counts = learned_counts(batch.loss_mask)
    if len(rows := np.flatnonzero(counts != 1)):
        raise DataError(
            f"row {rows[0]} of the pairs is scored at {counts[rows[0]]} tokens, and a text of a pair has one score: "
            "encode pairs from `prompt` and `completion`, without `steps`"
        )
    scores = learned_values("token_scores", batch.ragged("token_scores"), batch.loss_mask)
    margins = pair_margins(scores, batch.groups, batch.row("preferred"))
    _, pair = np.unique(batch.groups, return_inverse=True)
    sums = np.bincount(pair, scores)[pair] if len(batch) else scores
    if "least_margins" not in batch:
        batch = batch.assign(least_margins=np.zeros(len(batch), np.float32))
    return batch.assign(
        scores=scores.astype(np.float32), margins=margins.astype(np.float32), pair_sums=sums.astype(np.float32)
    )


async def with_labels(batch: Batch) -> Batch:
    """Add `labels`, float32 by token: each row's `step_labels` at the tokens where `loss_mask` is True, 0 elsewhere.

    Raises DataError if the number of a row's labels differs from the number of these tokens.
    """
    batch = await batch.load("loss_mask", "step_labels")
    steps = [cast("Sequence[float]", each) for each in batch.objects("step_labels")] if len(batch) else []
    for row, (count, own) in enumerate(zip(learned_counts(batch.loss_mask), steps, strict=True)):
        if count != len(own):
            raise DataError(
                f"row {row} is scored at {count} tokens and has {len(own)} labels: encode it from `steps`, with a "
                "label for each"
            )
    return batch.assign(labels=learned_column([float(label) for row in steps for label in row], batch.loss_mask))


async def step_score_metrics(batch: Batch) -> dict[str, float]:
    """Measure how well `token_scores` separate right from wrong steps, in a batch from `with_labels`. NaN if none.

    `accuracy` is the share of steps whose score is above 0 if the label is above 1/2, and below 0 otherwise. A score of
    0, as from a new head, is always wrong. `right_score` and `wrong_score` are the mean scores of right and of wrong
    steps. `solved` is the share of texts in which every step is judged correctly.
    """
    batch = await batch.load("token_scores", "loss_mask", "labels")
    mask = batch.loss_mask
    scores = learned_values("token_scores", batch.ragged("token_scores"), mask)
    right = learned_values("labels", batch.ragged("labels"), mask) > 0.5
    correct = np.where(right, scores > 0, scores < 0)
    row = learned_rows(mask)
    missed = np.bincount(row[~correct], minlength=len(batch))
    solved = missed[np.unique(row)] == 0
    return means(accuracy=correct, right_score=scores[right], wrong_score=scores[~right], solved=solved)
