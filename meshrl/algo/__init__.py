"""The mathematics of the algorithms: losses for each token, and what comes between rewards and losses.

Losses are pure functions of 1-d tensors, with one entry for each token of a packed micro-batch. `token_weights` turns
the tokens of a micro-batch into one number. It knows the global batch, so the gradient does not depend on how rows are
divided. The core does not import torch: these functions call methods of their tensors.

Advantages, KL penalties, margins of pairs and minibatches are pure functions of numpy columns. They name the paper and
the equation that they implement, and call no role.
"""

from meshrl.algo.advantages import (
    Gae,
    batch_advantages,
    gae,
    group_advantages,
    leave_one_out,
    optimal_advantages,
    rescaled_advantages,
    rewards_to_go,
    trace_advantages,
    turn_advantages,
    whiten,
    with_advantages,
)
from meshrl.algo.base import (
    Loss,
    Normalise,
    Normalised,
    Predicts,
    TokenLoss,
    WithKl,
    check_predicts,
    check_sources,
    loss_divisor,
    token_weights,
)
from meshrl.algo.columns import minibatches, spread
from meshrl.algo.kl import kl_columns, kl_k1, kl_k2, kl_k3, kl_metrics, penalised_rewards
from meshrl.algo.policy_loss import (
    CispoLoss,
    ClippedLoss,
    ConstantLoss,
    Correction,
    CrossEntropy,
    ReinforceLoss,
    ReverseKl,
    SequenceLoss,
    effective_sample_size,
)
from meshrl.algo.preference import (
    KtoLoss,
    PreferenceLoss,
    best_and_worst,
    pair_metrics,
    preference_columns,
    reference_point,
)
from meshrl.algo.reward import (
    BradleyTerryLoss,
    ProcessLoss,
    score_columns,
    score_metrics,
    step_score_metrics,
    with_labels,
)
from meshrl.algo.sum_loss import (
    CispoSum,
    ClippedSum,
    DroLoss,
    GspoSum,
    ImportanceLoss,
    SumLoss,
    WeightedCrossEntropy,
)
from meshrl.algo.value import ValueLoss, explained_variance

__all__ = [
    "BradleyTerryLoss",
    "CispoLoss",
    "CispoSum",
    "ClippedLoss",
    "ClippedSum",
    "ConstantLoss",
    "Correction",
    "CrossEntropy",
    "DroLoss",
    "Gae",
    "GspoSum",
    "ImportanceLoss",
    "KtoLoss",
    "Loss",
    "Normalise",
    "Normalised",
    "Predicts",
    "PreferenceLoss",
    "ProcessLoss",
    "ReinforceLoss",
    "ReverseKl",
    "SequenceLoss",
    "SumLoss",
    "TokenLoss",
    "ValueLoss",
    "WeightedCrossEntropy",
    "WithKl",
    "batch_advantages",
    "best_and_worst",
    "check_predicts",
    "check_sources",
    "effective_sample_size",
    "explained_variance",
    "gae",
    "group_advantages",
    "kl_columns",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "kl_metrics",
    "leave_one_out",
    "loss_divisor",
    "minibatches",
    "optimal_advantages",
    "pair_metrics",
    "penalised_rewards",
    "preference_columns",
    "reference_point",
    "rescaled_advantages",
    "rewards_to_go",
    "score_columns",
    "score_metrics",
    "spread",
    "step_score_metrics",
    "token_weights",
    "trace_advantages",
    "turn_advantages",
    "whiten",
    "with_advantages",
    "with_labels",
]
