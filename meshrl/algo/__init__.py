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
    turn_advantages,
    whiten,
    with_advantages,
)
from meshrl.algo.base import Loss, Normalised, Predicts, TokenLoss, WithKl, check_predicts
from meshrl.algo.clipped import ClippedLoss, ConstantLoss, clipped_surrogate
from meshrl.algo.columns import spread
from meshrl.algo.correction import Correction, effective_sample_size, importance_weights
from meshrl.algo.distillation import ReverseKl, reverse_kl
from meshrl.algo.kl import KlEstimator, kl_k1, kl_k2, kl_k3
from meshrl.algo.likelihood import CrossEntropy, cross_entropy
from meshrl.algo.minibatch import minibatches
from meshrl.algo.normalise import Normalise, token_weights
from meshrl.algo.preference import KtoLoss, PairForm, PreferenceLoss, dpo_loss, hinge_loss, ipo_loss, kto_utility
from meshrl.algo.preferences import (
    best_and_worst,
    log_ratios,
    pair_margins,
    pair_means,
    pair_metrics,
    preference_columns,
    reference_point,
)
from meshrl.algo.provenance_check import check_sources
from meshrl.algo.reference_kl import kl_columns, kl_metrics, penalised_rewards
from meshrl.algo.reinforce import CispoLoss, ReinforceLoss
from meshrl.algo.reward import BradleyTerryLoss, ProcessLoss, bradley_terry, step_cross_entropy
from meshrl.algo.reward_scores import score_columns, score_metrics, step_score_metrics, with_labels
from meshrl.algo.sequence import SequenceLoss, sequence_ratios
from meshrl.algo.value import ValueLoss, explained_variance

__all__ = [
    "BradleyTerryLoss",
    "CispoLoss",
    "ClippedLoss",
    "ConstantLoss",
    "Correction",
    "CrossEntropy",
    "Gae",
    "KlEstimator",
    "KtoLoss",
    "Loss",
    "Normalise",
    "Normalised",
    "PairForm",
    "Predicts",
    "PreferenceLoss",
    "ProcessLoss",
    "ReinforceLoss",
    "ReverseKl",
    "SequenceLoss",
    "TokenLoss",
    "ValueLoss",
    "WithKl",
    "batch_advantages",
    "best_and_worst",
    "bradley_terry",
    "check_predicts",
    "check_sources",
    "clipped_surrogate",
    "cross_entropy",
    "dpo_loss",
    "effective_sample_size",
    "explained_variance",
    "gae",
    "group_advantages",
    "hinge_loss",
    "importance_weights",
    "ipo_loss",
    "kl_columns",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "kl_metrics",
    "kto_utility",
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
    "reverse_kl",
    "rewards_to_go",
    "score_columns",
    "score_metrics",
    "sequence_ratios",
    "spread",
    "step_cross_entropy",
    "step_score_metrics",
    "token_weights",
    "turn_advantages",
    "whiten",
    "with_advantages",
    "with_labels",
]
