"""Computations between rewards and losses: advantages, KL penalties, margins of pairs, and minibatches.

They are pure functions of numpy columns, and name the paper and the equation that they implement. They call no role.
"""

from meshrl.objectives.advantages import (
    Gae,
    batch_advantages,
    gae,
    group_advantages,
    leave_one_out,
    optimal_advantages,
    rescaled_advantages,
    rewards_to_go,
    turn_advantages,
    whiten,
    with_advantages,
)
from meshrl.objectives.minibatch import minibatches
from meshrl.objectives.preferences import (
    best_and_worst,
    log_ratios,
    pair_margins,
    pair_means,
    pair_metrics,
    preference_columns,
    reference_point,
)
from meshrl.objectives.reference_kl import kl_columns, kl_metrics, penalised_rewards
from meshrl.objectives.reward_scores import score_columns, score_metrics, step_score_metrics, with_labels

__all__ = [
    "Gae",
    "batch_advantages",
    "best_and_worst",
    "gae",
    "group_advantages",
    "kl_columns",
    "kl_metrics",
    "leave_one_out",
    "log_ratios",
    "minibatches",
    "optimal_advantages",
    "pair_margins",
    "pair_means",
    "pair_metrics",
    "penalised_rewards",
    "preference_columns",
    "reference_point",
    "rescaled_advantages",
    "rewards_to_go",
    "score_columns",
    "score_metrics",
    "step_score_metrics",
    "turn_advantages",
    "whiten",
    "with_advantages",
    "with_labels",
]
