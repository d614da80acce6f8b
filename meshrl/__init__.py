"""meshrl: reinforcement learning of language models on typed actor meshes."""

from meshrl.actor import Actor, Rank, current_rank, endpoint
from meshrl.advantages import group_advantages, leave_one_out
from meshrl.config import Config
from meshrl.data import Batch
from meshrl.engine import Resources
from meshrl.engines.local import LocalEngine
from meshrl.errors import (
    BackendError,
    ConfigError,
    ContractError,
    DataError,
    MeshrlError,
    MeshStopped,
    ModelError,
    RankDied,
    RankFailed,
    ReplicasDisagree,
)
from meshrl.handle import at, each, ranks, respawn, stop
from meshrl.losses.likelihood import CrossEntropy
from meshrl.losses.loss import Loss
from meshrl.losses.surrogate import ClippedLoss
from meshrl.mesh import Mesh
from meshrl.metrics import Metrics
from meshrl.ragged import Ragged
from meshrl.rewards import RewardConfig
from meshrl.roles import (
    AlgorithmConfig,
    ModelConfig,
    NewModel,
    OptimizerConfig,
    Policy,
    PolicyConfig,
    Reference,
    ReferenceConfig,
    Reward,
    RoleConfig,
    Sampler,
    SamplerConfig,
    Sampling,
)
from meshrl.rollout import evaluate, has_signal, publish, rollout
from meshrl.run import MeshConfig, Run, RunConfig
from meshrl.sharding import CP, DP, EP, PP, TP, Gather, Mean, Replicate, Same, Shard, Sum
from meshrl.stream import Rollouts, rollouts
from meshrl.tasks import Task, TaskConfig
from meshrl.weights import Weights

__all__ = [
    "CP",
    "DP",
    "EP",
    "PP",
    "TP",
    "Actor",
    "AlgorithmConfig",
    "BackendError",
    "Batch",
    "ClippedLoss",
    "Config",
    "ConfigError",
    "ContractError",
    "CrossEntropy",
    "DataError",
    "Gather",
    "LocalEngine",
    "Loss",
    "Mean",
    "Mesh",
    "MeshConfig",
    "MeshStopped",
    "MeshrlError",
    "Metrics",
    "ModelConfig",
    "ModelError",
    "NewModel",
    "OptimizerConfig",
    "Policy",
    "PolicyConfig",
    "Ragged",
    "Rank",
    "RankDied",
    "RankFailed",
    "Reference",
    "ReferenceConfig",
    "ReplicasDisagree",
    "Replicate",
    "Resources",
    "Reward",
    "RewardConfig",
    "RoleConfig",
    "Rollouts",
    "Run",
    "RunConfig",
    "Same",
    "Sampler",
    "SamplerConfig",
    "Sampling",
    "Shard",
    "Sum",
    "Task",
    "TaskConfig",
    "Weights",
    "at",
    "current_rank",
    "each",
    "endpoint",
    "evaluate",
    "group_advantages",
    "has_signal",
    "leave_one_out",
    "publish",
    "ranks",
    "respawn",
    "rollout",
    "rollouts",
    "stop",
]
