"""meshrl: reinforcement learning of language models on typed actor meshes."""

from meshrl.actor import Actor, Rank, Together, current_rank, endpoint
from meshrl.advantages import (
    Gae,
    batch_advantages,
    gae,
    group_advantages,
    leave_one_out,
    optimal_advantages,
    rescaled_advantages,
    rewards_to_go,
    whiten,
)
from meshrl.config import Config
from meshrl.data import Batch
from meshrl.engine import Resources
from meshrl.engines.local import LocalEngine
from meshrl.environment import Environment, EnvironmentConfig
from meshrl.episodes import Episodes
from meshrl.errors import (
    BackendError,
    ConfigError,
    ContractError,
    DataError,
    EngineDied,
    MeshrlError,
    MeshStopped,
    ModelError,
    RankDied,
    RankFailed,
    ReplicasDisagree,
)
from meshrl.handle import at, each, ranks, respawn, stop
from meshrl.judging import evaluate_during
from meshrl.layout import FsdpConfig, MegatronConfig, VllmConfig
from meshrl.losses.correction import Correction, effective_sample_size
from meshrl.losses.distillation import ReverseKl
from meshrl.losses.likelihood import CrossEntropy
from meshrl.losses.loss import Loss
from meshrl.losses.preference import KtoLoss, PreferenceLoss
from meshrl.losses.reinforce import CispoLoss, ReinforceLoss
from meshrl.losses.reward import BradleyTerryLoss, ProcessLoss
from meshrl.losses.sequence import SequenceLoss
from meshrl.losses.sources import check_sources
from meshrl.losses.surrogate import ClippedLoss, ConstantLoss
from meshrl.losses.value import ValueLoss, explained_variance
from meshrl.mesh import Mesh
from meshrl.metrics import Metrics
from meshrl.minibatches import minibatches
from meshrl.preferences import (
    PairSampling,
    answer_pairs,
    best_and_worst,
    labelled,
    log_ratios,
    mismatched_kl,
    pair_margins,
    pair_metrics,
    rejected_answers,
    with_margins,
)
from meshrl.ragged import Ragged, Source
from meshrl.reference_kl import kl_columns, kl_metrics, penalised_rewards
from meshrl.rewards import RewardConfig, overlong_penalty
from meshrl.role_config import (
    AlgorithmConfig,
    CriticConfig,
    EvaluationConfig,
    GroupSampling,
    LoraConfig,
    ModelConfig,
    NewModel,
    OptimizerConfig,
    PolicyConfig,
    ReferenceConfig,
    RewardModelConfig,
    RewardTrainingConfig,
    RoleConfig,
    SamplerConfig,
    Sampling,
    TeacherConfig,
)
from meshrl.roles import Critic, Policy, Reference, Reward, RewardModel, Sampler
from meshrl.rollout import evaluate, greedy_baseline, has_signal, publish, rollout
from meshrl.run import MeshConfig, Run, RunConfig
from meshrl.scores import labelled_steps, least_margins, score_metrics, step_metrics, with_labels, with_scores
from meshrl.sharding import CP, DP, EP, EVERY, PP, TP, Gather, Mean, Replicate, Same, Shard, Sum
from meshrl.stream import Rollouts, rollouts
from meshrl.tasks import Task, TaskConfig
from meshrl.teacher import check_teacher
from meshrl.weights import Weights

__all__ = [
    "CP",
    "DP",
    "EP",
    "EVERY",
    "PP",
    "TP",
    "Actor",
    "AlgorithmConfig",
    "BackendError",
    "Batch",
    "BradleyTerryLoss",
    "CispoLoss",
    "ClippedLoss",
    "Config",
    "ConfigError",
    "ConstantLoss",
    "ContractError",
    "Correction",
    "Critic",
    "CriticConfig",
    "CrossEntropy",
    "DataError",
    "EngineDied",
    "Environment",
    "EnvironmentConfig",
    "Episodes",
    "EvaluationConfig",
    "FsdpConfig",
    "Gae",
    "Gather",
    "GroupSampling",
    "KtoLoss",
    "LocalEngine",
    "LoraConfig",
    "Loss",
    "Mean",
    "MegatronConfig",
    "Mesh",
    "MeshConfig",
    "MeshStopped",
    "MeshrlError",
    "Metrics",
    "ModelConfig",
    "ModelError",
    "NewModel",
    "OptimizerConfig",
    "PairSampling",
    "Policy",
    "PolicyConfig",
    "PreferenceLoss",
    "ProcessLoss",
    "Ragged",
    "Rank",
    "RankDied",
    "RankFailed",
    "Reference",
    "ReferenceConfig",
    "ReinforceLoss",
    "ReplicasDisagree",
    "Replicate",
    "Resources",
    "ReverseKl",
    "Reward",
    "RewardConfig",
    "RewardModel",
    "RewardModelConfig",
    "RewardTrainingConfig",
    "RoleConfig",
    "Rollouts",
    "Run",
    "RunConfig",
    "Same",
    "Sampler",
    "SamplerConfig",
    "Sampling",
    "SequenceLoss",
    "Shard",
    "Source",
    "Sum",
    "Task",
    "TaskConfig",
    "TeacherConfig",
    "Together",
    "ValueLoss",
    "VllmConfig",
    "Weights",
    "answer_pairs",
    "at",
    "batch_advantages",
    "best_and_worst",
    "check_sources",
    "check_teacher",
    "current_rank",
    "each",
    "effective_sample_size",
    "endpoint",
    "evaluate",
    "evaluate_during",
    "explained_variance",
    "gae",
    "greedy_baseline",
    "group_advantages",
    "has_signal",
    "kl_columns",
    "kl_metrics",
    "labelled",
    "labelled_steps",
    "least_margins",
    "leave_one_out",
    "log_ratios",
    "minibatches",
    "mismatched_kl",
    "optimal_advantages",
    "overlong_penalty",
    "pair_margins",
    "pair_metrics",
    "penalised_rewards",
    "publish",
    "ranks",
    "rejected_answers",
    "rescaled_advantages",
    "respawn",
    "rewards_to_go",
    "rollout",
    "rollouts",
    "score_metrics",
    "step_metrics",
    "stop",
    "whiten",
    "with_labels",
    "with_margins",
    "with_scores",
]
