"""Columns for the losses of reward models, from pairs of texts and from texts in steps, and metrics of their scores."""

from typing import TYPE_CHECKING, cast

import numpy as np

from meshrl.algo.preferences import pair_margins, pair_means
from meshrl.data import Batch, Ragged
from meshrl.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence


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
    counts = np.array([int(np.count_nonzero(mask)) for mask in batch.loss_mask], np.int64)
    if (counts != 1).any():
        row = int(np.flatnonzero(counts != 1)[0])
        raise DataError(
            f"row {row} of the pairs is scored at {counts[row]} tokens, and a text of a pair has one score: encode "
            "pairs from `prompt` and `completion`, without `steps`"
        )
    scores = np.asarray(batch.ragged("token_scores").values, np.float64)[np.asarray(batch.loss_mask.values, np.bool_)]
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
    mask = np.asarray(batch.loss_mask.values, np.bool_)
    told = [cast("Sequence[float]", each) for each in batch.objects("step_labels")] if len(batch) else []
    for row, (places, own) in enumerate(zip(batch.loss_mask, told, strict=True)):
        if np.count_nonzero(places) != len(own):
            raise DataError(
                f"row {row} is scored at {np.count_nonzero(places)} tokens and has {len(own)} labels: encode it from "
                "`steps`, with a label for each"
            )
    labels = np.zeros(len(mask), np.float32)
    labels[mask] = [float(label) for row in told for label in row]
    return batch.assign(labels=Ragged(labels, batch.loss_mask.offsets))


async def step_score_metrics(batch: Batch) -> dict[str, float]:
    """Measure how well `token_scores` separate right from wrong steps, in a batch from `with_labels`. NaN if none.

    `accuracy` is the share of steps whose score is above 0 if the label is above 1/2, and below 0 otherwise. A score of
    0, as from a new head, is always wrong. `right_score` and `wrong_score` are the mean scores of right and of wrong
    steps. `solved` is the share of texts in which every step is judged correctly.
    """
    batch = await batch.load("token_scores", "loss_mask", "labels")
    mask = np.asarray(batch.loss_mask.values, np.bool_)
    scores = np.asarray(batch.ragged("token_scores").values, np.float64)[mask]
    right = np.asarray(batch.ragged("labels").values, np.float64)[mask] > 0.5
    told = np.where(right, scores > 0, scores < 0)
    row = np.repeat(np.arange(len(batch)), batch.loss_mask.lengths)[mask]
    missed = np.bincount(row[~told], minlength=len(batch))
    found = {
        "accuracy": told,
        "right_score": scores[right],
        "wrong_score": scores[~right],
        "solved": missed[np.unique(row)] == 0,
    }
    return {name: float(values.mean()) if len(values) else float("nan") for name, values in found.items()}
