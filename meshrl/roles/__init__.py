"""The roles that backends implement: Policy, Critic, Reference, Sampler, Reward, RewardModel, and their tables.

Each role is an abstract actor with the contract. A backend overrides its endpoints with plain types, and is found by
name in the registry. The tables name the backend, the mesh and the model.
"""

from meshrl.roles.base import Critic, Policy, Reference, ResumingSampler, Reward, RewardModel, Sampler, Stateful
from meshrl.roles.config import (
    CriticConfig,
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
    Shape,
    TeacherConfig,
    check_axes,
    chosen_options,
    options_of,
    with_options,
)
from meshrl.roles.generate_calls import GenerateCall, GenerateCalls, places_of
from meshrl.roles.memory import Memory, Term, Work, memory_of
from meshrl.roles.registry import (
    BackendOptions,
    Models,
    axes_of,
    backends,
    backends_with,
    class_for,
    function_of,
    implementation,
    models_of,
    packages_of,
    place_of,
)
from meshrl.roles.sampling import MOST_COMPLETIONS, GroupSampling, JoinedSampling, PairSampling, Sampling
from meshrl.roles.server import Address, Server, ServerConfig
from meshrl.roles.stepping import Completion, SteppingSampler, completed
from meshrl.roles.tokens import check_teacher, count_tokens

__all__ = [
    "MOST_COMPLETIONS",
    "Address",
    "BackendOptions",
    "Completion",
    "Critic",
    "CriticConfig",
    "GenerateCall",
    "GenerateCalls",
    "GroupSampling",
    "JoinedSampling",
    "LoraConfig",
    "Memory",
    "ModelConfig",
    "Models",
    "NewModel",
    "OptimizerConfig",
    "PairSampling",
    "Policy",
    "PolicyConfig",
    "Reference",
    "ReferenceConfig",
    "ResumingSampler",
    "Reward",
    "RewardModel",
    "RewardModelConfig",
    "RewardTrainingConfig",
    "RoleConfig",
    "Sampler",
    "SamplerConfig",
    "Sampling",
    "Server",
    "ServerConfig",
    "Shape",
    "Stateful",
    "SteppingSampler",
    "TeacherConfig",
    "Term",
    "Work",
    "axes_of",
    "backends",
    "backends_with",
    "check_axes",
    "check_teacher",
    "chosen_options",
    "class_for",
    "completed",
    "count_tokens",
    "function_of",
    "implementation",
    "memory_of",
    "models_of",
    "options_of",
    "packages_of",
    "place_of",
    "places_of",
    "with_options",
]
