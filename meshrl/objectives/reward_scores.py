"""What a reward model's losses read of pairs of texts and of texts in steps, and how well its scores tell them."""

from meshrl.data import Batch
from meshrl.objectives.preferences import pair_means


def score_metrics(batch: Batch) -> dict[str, float]:
    """What `with_scores` found: means over pairs in which one is preferred; NaN where there are none.

    `margin`; `accuracy`, how often it is above 0; `chosen_score` and `rejected_score`. All before the update.
    """
    return pair_means(batch, "scores", "score")
