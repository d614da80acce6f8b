"""Losses for each token, as pure functions, and their normalisation over the global batch.

Tensors are 1-d, with one entry for each token of a packed micro-batch. `token_weights` turns the tokens of a
micro-batch into one number. It knows the global batch, so the gradient does not depend on how rows are divided. The
core does not import torch: these functions call methods of their tensors.
"""

from meshrl.losses.base import Loss, Normalised, Predicts, TokenLoss, WithKl, check_predicts
from meshrl.losses.clipped import ClippedLoss, ConstantLoss, clipped_surrogate
from meshrl.losses.columns import spread
from meshrl.losses.correction import Correction, effective_sample_size, importance_weights
from meshrl.losses.distillation import ReverseKl, reverse_kl
from meshrl.losses.kl import KlEstimator, kl_k1, kl_k2, kl_k3
from meshrl.losses.likelihood import CrossEntropy, cross_entropy
from meshrl.losses.normalise import Normalise, token_weights
from meshrl.losses.preference import KtoLoss, PairForm, PreferenceLoss, dpo_loss, hinge_loss, ipo_loss, kto_utility
from meshrl.losses.provenance_check import check_sources
from meshrl.losses.reinforce import CispoLoss, ReinforceLoss
from meshrl.losses.reward import BradleyTerryLoss, ProcessLoss, bradley_terry, step_cross_entropy
from meshrl.losses.sequence import SequenceLoss, sequence_ratios
from meshrl.losses.value import ValueLoss, explained_variance

__all__ = [
    "BradleyTerryLoss",
    "CispoLoss",
    "ClippedLoss",
    "ConstantLoss",
    "Correction",
    "CrossEntropy",
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
    "bradley_terry",
    "check_predicts",
    "check_sources",
    "clipped_surrogate",
    "cross_entropy",
    "dpo_loss",
    "effective_sample_size",
    "explained_variance",
    "hinge_loss",
    "importance_weights",
    "ipo_loss",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "kto_utility",
    "reverse_kl",
    "sequence_ratios",
    "spread",
    "step_cross_entropy",
    "token_weights",
]
