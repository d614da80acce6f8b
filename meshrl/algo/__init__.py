"""The mathematics of the algorithms: losses for each token, and what comes between rewards and losses.

Losses are pure functions of 1-d tensors, with one entry for each token of a packed micro-batch. `token_weights` turns
the tokens of a micro-batch into one number. It knows the global batch, so the gradient does not depend on how rows are
divided. The core does not import torch: these functions call methods of their tensors.

Advantages, KL penalties, margins of pairs and minibatches are pure functions of numpy columns. They name the paper and
the equation that they implement, and call no role.
"""

from meshrl.algo.advantages import (
    Gae as Gae,
    batch_advantages as batch_advantages,
    gae as gae,
    group_advantages as group_advantages,
    leave_one_out as leave_one_out,
    optimal_advantages as optimal_advantages,
    rescaled_advantages as rescaled_advantages,
    rewards_to_go as rewards_to_go,
    trace_advantages as trace_advantages,
    turn_advantages as turn_advantages,
    whiten as whiten,
    with_advantages as with_advantages,
)
from meshrl.algo.base import (
    Loss as Loss,
    Normalise as Normalise,
    Normalised as Normalised,
    Predicts as Predicts,
    TokenLoss as TokenLoss,
    WithKl as WithKl,
    check_predicts as check_predicts,
    check_sources as check_sources,
    loss_divisor as loss_divisor,
    token_weights as token_weights,
)
from meshrl.algo.columns import minibatches as minibatches, spread as spread
from meshrl.algo.kl import (
    kl_columns as kl_columns,
    kl_k1 as kl_k1,
    kl_k2 as kl_k2,
    kl_k3 as kl_k3,
    kl_metrics as kl_metrics,
    penalised_rewards as penalised_rewards,
)
from meshrl.algo.policy_loss import (
    CispoLoss as CispoLoss,
    ClippedLoss as ClippedLoss,
    ConstantLoss as ConstantLoss,
    Correction as Correction,
    CrossEntropy as CrossEntropy,
    ReinforceLoss as ReinforceLoss,
    ReverseKl as ReverseKl,
    SequenceLoss as SequenceLoss,
    effective_sample_size as effective_sample_size,
)
from meshrl.algo.preference import (
    KtoLoss as KtoLoss,
    PreferenceLoss as PreferenceLoss,
    best_and_worst as best_and_worst,
    pair_metrics as pair_metrics,
    preference_columns as preference_columns,
    reference_point as reference_point,
)
from meshrl.algo.reward import (
    BradleyTerryLoss as BradleyTerryLoss,
    ProcessLoss as ProcessLoss,
    score_columns as score_columns,
    score_metrics as score_metrics,
    step_score_metrics as step_score_metrics,
    with_labels as with_labels,
)
from meshrl.algo.sum_loss import (
    CispoSum as CispoSum,
    ClippedSum as ClippedSum,
    DroLoss as DroLoss,
    GspoSum as GspoSum,
    ImportanceLoss as ImportanceLoss,
    SumLoss as SumLoss,
    WeightedCrossEntropy as WeightedCrossEntropy,
)
from meshrl.algo.value import ValueLoss as ValueLoss, explained_variance as explained_variance
