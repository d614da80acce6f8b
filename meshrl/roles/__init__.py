"""The roles that backends implement: Policy, Critic, Reference, Sampler, Reward, RewardModel, and their tables.

Each role is an abstract actor with the contract. A backend overrides its endpoints with plain types, and is found by
name in the registry. The tables name the backend, the mesh and the model.
"""

from meshrl.roles.base import (
    Critic as Critic,
    Policy as Policy,
    Reference as Reference,
    ResumingSampler as ResumingSampler,
    Reward as Reward,
    RewardModel as RewardModel,
    Sampler as Sampler,
    Stateful as Stateful,
)
from meshrl.roles.config import (
    MOST_COMPLETIONS as MOST_COMPLETIONS,
    CriticConfig as CriticConfig,
    GroupSampling as GroupSampling,
    JoinedSampling as JoinedSampling,
    LoraConfig as LoraConfig,
    ModelConfig as ModelConfig,
    NewModel as NewModel,
    NewVision as NewVision,
    OptimizerConfig as OptimizerConfig,
    Packing as Packing,
    PairSampling as PairSampling,
    PassConfig as PassConfig,
    PolicyConfig as PolicyConfig,
    ReferenceConfig as ReferenceConfig,
    RewardModelConfig as RewardModelConfig,
    RewardTrainingConfig as RewardTrainingConfig,
    RoleConfig as RoleConfig,
    SamplerConfig as SamplerConfig,
    Sampling as Sampling,
    Shape as Shape,
    Step as Step,
    TeacherConfig as TeacherConfig,
    check_axes as check_axes,
    chosen_options as chosen_options,
    name_of_adapter as name_of_adapter,
    options_of as options_of,
    with_options as with_options,
)
from meshrl.roles.estimates import (
    Flops as Flops,
    MemoryEstimate as MemoryEstimate,
    MemoryTerm as MemoryTerm,
    Workload as Workload,
    check_teacher as check_teacher,
    count_tokens as count_tokens,
    fair_plan as fair_plan,
    flops_of as flops_of,
    memory_of as memory_of,
    planner_of as planner_of,
    token_reader as token_reader,
)
from meshrl.roles.generate_calls import (
    Completion as Completion,
    GenerateCall as GenerateCall,
    GenerateCalls as GenerateCalls,
    SteppingSampler as SteppingSampler,
    completed as completed,
    places_of as places_of,
)
from meshrl.roles.registry import (
    BackendOptions as BackendOptions,
    Models as Models,
    axes_of as axes_of,
    backends as backends,
    backends_with as backends_with,
    class_for as class_for,
    function_of as function_of,
    implementation as implementation,
    import_path as import_path,
    masks_of as masks_of,
    models_of as models_of,
    packages_of as packages_of,
    takes_images as takes_images,
)
from meshrl.roles.server import Server as Server, ServerAddress as ServerAddress, ServerConfig as ServerConfig
from meshrl.roles.sums import SUMMED_BYTES as SUMMED_BYTES, Sums as Sums
