"""meshrl: reinforcement learning of language models on typed actor meshes.

Each name is imported with its room when it is first used, so ranks and scripts load only what they need.
"""

from typing import TYPE_CHECKING

from meshrl import deprecated

if TYPE_CHECKING:
    from meshrl.agents import Agent as Agent
    from meshrl.agents import AgentConfig as AgentConfig
    from meshrl.agents import Agents as Agents
    from meshrl.agents import Gateway as Gateway
    from meshrl.agents import GatewayConfig as GatewayConfig
    from meshrl.agents import conversations as conversations
    from meshrl.agents import read_chat as read_chat
    from meshrl.config import Config as Config
    from meshrl.data import Batch as Batch
    from meshrl.data import Metrics as Metrics
    from meshrl.data import Ragged as Ragged
    from meshrl.data import Source as Source
    from meshrl.engines.local import LocalEngine as LocalEngine
    from meshrl.environments import Environment as Environment
    from meshrl.environments import EnvironmentConfig as EnvironmentConfig
    from meshrl.environments import Episodes as Episodes
    from meshrl.errors import BackendError as BackendError
    from meshrl.errors import CallTimeout as CallTimeout
    from meshrl.errors import ConfigError as ConfigError
    from meshrl.errors import ContractError as ContractError
    from meshrl.errors import DataError as DataError
    from meshrl.errors import DataLost as DataLost
    from meshrl.errors import EngineDied as EngineDied
    from meshrl.errors import MeshrlError as MeshrlError
    from meshrl.errors import MeshStopped as MeshStopped
    from meshrl.errors import ModelError as ModelError
    from meshrl.errors import RankDied as RankDied
    from meshrl.errors import RankFailed as RankFailed
    from meshrl.errors import ReplicasDisagree as ReplicasDisagree
    from meshrl.evaluation import evaluate as evaluate
    from meshrl.evaluation import evaluate_during as evaluate_during
    from meshrl.evaluation import held_out as held_out
    from meshrl.losses import BradleyTerryLoss as BradleyTerryLoss
    from meshrl.losses import CispoLoss as CispoLoss
    from meshrl.losses import ClippedLoss as ClippedLoss
    from meshrl.losses import ConstantLoss as ConstantLoss
    from meshrl.losses import Correction as Correction
    from meshrl.losses import CrossEntropy as CrossEntropy
    from meshrl.losses import KtoLoss as KtoLoss
    from meshrl.losses import Loss as Loss
    from meshrl.losses import PreferenceLoss as PreferenceLoss
    from meshrl.losses import ProcessLoss as ProcessLoss
    from meshrl.losses import ReinforceLoss as ReinforceLoss
    from meshrl.losses import ReverseKl as ReverseKl
    from meshrl.losses import SequenceLoss as SequenceLoss
    from meshrl.losses import ValueLoss as ValueLoss
    from meshrl.losses import check_sources as check_sources
    from meshrl.losses import effective_sample_size as effective_sample_size
    from meshrl.losses import explained_variance as explained_variance
    from meshrl.mesh import CP as CP
    from meshrl.mesh import DP as DP
    from meshrl.mesh import EP as EP
    from meshrl.mesh import EVERY as EVERY
    from meshrl.mesh import PP as PP
    from meshrl.mesh import TP as TP
    from meshrl.mesh import Actor as Actor
    from meshrl.mesh import CollectiveActor as CollectiveActor
    from meshrl.mesh import Gather as Gather
    from meshrl.mesh import Mean as Mean
    from meshrl.mesh import Mesh as Mesh
    from meshrl.mesh import Rank as Rank
    from meshrl.mesh import Replicate as Replicate
    from meshrl.mesh import Resources as Resources
    from meshrl.mesh import Same as Same
    from meshrl.mesh import Shard as Shard
    from meshrl.mesh import Sum as Sum
    from meshrl.mesh import at as at
    from meshrl.mesh import current_rank as current_rank
    from meshrl.mesh import each as each
    from meshrl.mesh import endpoint as endpoint
    from meshrl.mesh import ranks as ranks
    from meshrl.mesh import respawn as respawn
    from meshrl.mesh import stop as stop
    from meshrl.objectives import Gae as Gae
    from meshrl.objectives import batch_advantages as batch_advantages
    from meshrl.objectives import best_and_worst as best_and_worst
    from meshrl.objectives import gae as gae
    from meshrl.objectives import group_advantages as group_advantages
    from meshrl.objectives import kl_columns as kl_columns
    from meshrl.objectives import kl_metrics as kl_metrics
    from meshrl.objectives import leave_one_out as leave_one_out
    from meshrl.objectives import log_ratios as log_ratios
    from meshrl.objectives import minibatches as minibatches
    from meshrl.objectives import optimal_advantages as optimal_advantages
    from meshrl.objectives import pair_margins as pair_margins
    from meshrl.objectives import pair_metrics as pair_metrics
    from meshrl.objectives import penalised_rewards as penalised_rewards
    from meshrl.objectives import preference_columns as preference_columns
    from meshrl.objectives import reference_point as reference_point
    from meshrl.objectives import rescaled_advantages as rescaled_advantages
    from meshrl.objectives import rewards_to_go as rewards_to_go
    from meshrl.objectives import score_columns as score_columns
    from meshrl.objectives import score_metrics as score_metrics
    from meshrl.objectives import step_score_metrics as step_score_metrics
    from meshrl.objectives import turn_advantages as turn_advantages
    from meshrl.objectives import whiten as whiten
    from meshrl.objectives import with_labels as with_labels
    from meshrl.rewards import RewardConfig as RewardConfig
    from meshrl.rewards import from_trl as from_trl
    from meshrl.rewards import overlong_penalty as overlong_penalty
    from meshrl.roles import BackendOptions as BackendOptions
    from meshrl.roles import Critic as Critic
    from meshrl.roles import CriticConfig as CriticConfig
    from meshrl.roles import GroupSampling as GroupSampling
    from meshrl.roles import LoraConfig as LoraConfig
    from meshrl.roles import ModelConfig as ModelConfig
    from meshrl.roles import NewModel as NewModel
    from meshrl.roles import OptimizerConfig as OptimizerConfig
    from meshrl.roles import PairSampling as PairSampling
    from meshrl.roles import PassConfig as PassConfig
    from meshrl.roles import Policy as Policy
    from meshrl.roles import PolicyConfig as PolicyConfig
    from meshrl.roles import Reference as Reference
    from meshrl.roles import ReferenceConfig as ReferenceConfig
    from meshrl.roles import ResumingSampler as ResumingSampler
    from meshrl.roles import Reward as Reward
    from meshrl.roles import RewardModel as RewardModel
    from meshrl.roles import RewardModelConfig as RewardModelConfig
    from meshrl.roles import RewardTrainingConfig as RewardTrainingConfig
    from meshrl.roles import RoleConfig as RoleConfig
    from meshrl.roles import Sampler as Sampler
    from meshrl.roles import SamplerConfig as SamplerConfig
    from meshrl.roles import Sampling as Sampling
    from meshrl.roles import Stateful as Stateful
    from meshrl.roles import TeacherConfig as TeacherConfig
    from meshrl.roles import check_teacher as check_teacher
    from meshrl.roles import options_of as options_of
    from meshrl.roles import with_options as with_options
    from meshrl.rollout import Rollouts as Rollouts
    from meshrl.rollout import greedy_baseline as greedy_baseline
    from meshrl.rollout import has_signal as has_signal
    from meshrl.rollout import publish as publish
    from meshrl.rollout import rollout as rollout
    from meshrl.rollout import rollouts as rollouts
    from meshrl.run import AlgorithmConfig as AlgorithmConfig
    from meshrl.run import EvaluationConfig as EvaluationConfig
    from meshrl.run import MeshConfig as MeshConfig
    from meshrl.run import RolloutConfig as RolloutConfig
    from meshrl.run import Run as Run
    from meshrl.run import RunConfig as RunConfig
    from meshrl.run import Trained as Trained
    from meshrl.run.train import train as train
    from meshrl.tasks import Task as Task
    from meshrl.tasks import TaskConfig as TaskConfig
    from meshrl.tasks import answer_pairs as answer_pairs
    from meshrl.tasks import labelled as labelled
    from meshrl.tasks import labelled_steps as labelled_steps
    from meshrl.tasks import least_margins as least_margins
    from meshrl.tasks import mismatched as mismatched
    from meshrl.tasks import rejected_answers as rejected_answers
    from meshrl.trackers import TrackedRun as TrackedRun
    from meshrl.trackers import Tracker as Tracker
    from meshrl.weights import Weights as Weights

    # Old names, which `deprecated` finds.
    from meshrl_fsdp.options import FsdpConfig as FsdpConfig
    from meshrl_megatron.options import MegatronConfig as MegatronConfig
    from meshrl_vllm.options import VllmConfig as VllmConfig
else:
    import sys
    from collections.abc import Callable
    from importlib import import_module
    from types import ModuleType

    _NAMES = {
        "agents": "Agent AgentConfig Agents Gateway GatewayConfig conversations read_chat",
        "config": "Config",
        "data": "Batch Metrics Ragged Source",
        "engines.local": "LocalEngine",
        "environments": "Environment EnvironmentConfig Episodes",
        "errors": (
            "BackendError CallTimeout ConfigError ContractError DataError DataLost EngineDied MeshrlError "
            "MeshStopped ModelError RankDied RankFailed ReplicasDisagree"
        ),
        "evaluation": "evaluate evaluate_during held_out",
        "losses": (
            "BradleyTerryLoss CispoLoss ClippedLoss ConstantLoss Correction CrossEntropy KtoLoss Loss "
            "PreferenceLoss ProcessLoss ReinforceLoss ReverseKl SequenceLoss ValueLoss check_sources "
            "effective_sample_size explained_variance"
        ),
        "mesh": (
            "CP DP EP EVERY PP TP Actor CollectiveActor Gather Mean Mesh Rank Replicate Resources Same Shard Sum "
            "at current_rank each endpoint ranks respawn stop"
        ),
        "objectives": (
            "Gae batch_advantages best_and_worst gae group_advantages kl_columns kl_metrics leave_one_out "
            "log_ratios minibatches optimal_advantages pair_margins pair_metrics penalised_rewards "
            "preference_columns reference_point rescaled_advantages rewards_to_go score_columns score_metrics "
            "step_score_metrics turn_advantages whiten with_labels"
        ),
        "rewards": "RewardConfig from_trl overlong_penalty",
        "roles": (
            "BackendOptions Critic CriticConfig GroupSampling LoraConfig ModelConfig NewModel OptimizerConfig "
            "PairSampling PassConfig Policy PolicyConfig Reference ReferenceConfig ResumingSampler Reward RewardModel "
            "RewardModelConfig RewardTrainingConfig RoleConfig Sampler SamplerConfig Sampling Stateful TeacherConfig "
            "check_teacher options_of with_options"
        ),
        "rollout": "Rollouts greedy_baseline has_signal publish rollout rollouts",
        "run": "AlgorithmConfig EvaluationConfig MeshConfig RolloutConfig Run RunConfig Trained train",
        "tasks": "Task TaskConfig answer_pairs labelled labelled_steps least_margins mismatched rejected_answers",
        "trackers": "TrackedRun Tracker",
        "weights": "Weights",
    }
    """The names of each public module, the same as above."""
    _DOORS = {name: f"meshrl.{door}" for door, names in _NAMES.items() for name in names.split()}
    _ROOMS = {door.partition(".")[0] for door in _NAMES}

    __all__ = list(_DOORS)

    def _load(name: str) -> object:
        """Load a public name, or a room."""
        if name in _DOORS:
            value = globals()[name] = getattr(import_module(_DOORS[name]), name)
            return value
        if name in _ROOMS:
            return import_module(f"meshrl.{name}")
        raise AttributeError(f"module 'meshrl' has no attribute {name!r}")

    __getattr__ = deprecated.old_names("meshrl", _load)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})

    class _House(ModuleType):
        """This package, which receives each room that is loaded."""

        def __setattr__(self, name: str, value: object) -> None:
            if isinstance(value, ModuleType):
                deprecated.add_old_names(value)
            if not isinstance(value, ModuleType) or name not in _DOORS:  # `rollout` is a function first
                super().__setattr__(name, value)

        def __reduce__(self) -> tuple[Callable[[str], ModuleType], tuple[str]]:
            """Travel as an import, so that code which names `meshrl` can be sent to a rank."""
            return import_module, ("meshrl",)

    sys.modules["meshrl"].__class__ = _House
    deprecated.install()
