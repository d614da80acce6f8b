# What this backend uses of megatron-core, as it uses it: the library's own annotations are not always true.
# Where a parameter or a field is left out here, Megatron's default stands.

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, TypeVar

import torch
from packaging.version import Version
from torch import Tensor, nn
from torch.distributed import ProcessGroup

_Item = TypeVar("_Item")
_Add: TypeAlias = Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]

def quiet() -> AbstractContextManager[None]: ...
def fresh_scratch() -> AbstractContextManager[Mapping[object, Tensor]]: ...
def get_te_version() -> Version | None: ...  # None or 0.0.0: not installed

# The configuration, and the groups of ranks.

@dataclass(kw_only=True)
class TransformerConfig:
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int = ...  # this one and the next two: None becomes a number when the object is made
    kv_channels: int = ...
    ffn_hidden_size: int = ...
    normalization: Literal["LayerNorm", "RMSNorm"] = ...
    layernorm_epsilon: float = ...
    activation_func: Callable[[Tensor], Tensor] = ...
    gated_linear_unit: bool = ...
    add_bias_linear: bool = ...
    add_qkv_bias: bool = ...
    qk_layernorm: bool = ...
    hidden_dropout: float = ...
    attention_dropout: float = ...
    masked_softmax_fusion: bool = ...
    bias_activation_fusion: bool = ...
    bias_dropout_fusion: bool = ...
    gradient_accumulation_fusion: bool = ...
    perform_initialization: bool = ...
    params_dtype: torch.dtype = ...
    pipeline_dtype: torch.dtype | None = ...
    bf16: bool = ...
    transformer_impl: Literal["local", "transformer_engine"] = ...
    tensor_model_parallel_size: int = ...
    pipeline_model_parallel_size: int = ...
    virtual_pipeline_model_parallel_size: int | None = ...
    sequence_parallel: bool = ...
    variable_seq_lengths: bool = ...
    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"] = ...
    num_moe_experts: int | None = ...
    moe_ffn_hidden_size: int | None = ...
    moe_shared_expert_intermediate_size: int | None = ...
    moe_router_topk: int = ...
    moe_router_pre_softmax: bool = ...
    moe_router_load_balancing_type: Literal["none", "aux_loss"] = ...
    expert_model_parallel_size: int = ...
    expert_tensor_parallel_size: int | None = ...
    overlap_p2p_comm: bool = ...
    batch_p2p_comm: bool = ...
    calculate_per_token_loss: bool = ...
    recompute_granularity: Literal["full", "selective"] | None = ...
    recompute_method: Literal["uniform", "block"] | None = ...
    recompute_num_layers: int | None = ...

@dataclass(kw_only=True)
class ProcessGroupCollection:
    tp: ProcessGroup
    pp: ProcessGroup
    cp: ProcessGroup
    dp: ProcessGroup
    mp: ProcessGroup
    dp_cp: ProcessGroup
    tp_cp: ProcessGroup
    tp_dp_cp: ProcessGroup
    embd: ProcessGroup
    pos_embd: ProcessGroup
    intra_dp_cp: ProcessGroup
    intra_dist_opt: ProcessGroup
    inter_dist_opt: ProcessGroup | None
    ep: ProcessGroup
    expt_tp: ProcessGroup
    tp_ep: ProcessGroup
    tp_ep_pp: ProcessGroup
    expt_dp: ProcessGroup
    intra_expt_dp: ProcessGroup

# Layers, which the ranks along tp divide.

class ColumnParallelLinear(nn.Module):
    tp_group: ProcessGroup
    weight: nn.Parameter  # not in the head of a tied model, where it is None
    bias: nn.Parameter | None
    def __call__(self, input_: Tensor) -> tuple[Tensor, Tensor | None]: ...

class RowParallelLinear(nn.Module):
    weight: nn.Parameter
    def __call__(self, input_: Tensor) -> tuple[Tensor, Tensor | None]: ...

class TEColumnParallelLinear(nn.Module): ...
class TERowParallelLinear(nn.Module): ...
class TENorm(nn.Module): ...  # a function that makes Transformer Engine's

class VocabParallelEmbedding(nn.Module):
    weight: nn.Parameter

class MLP(nn.Module):
    linear_fc2: RowParallelLinear
    def __init__(
        self, config: TransformerConfig, submodules: MLPSubmodules, *, ffn_hidden_size: int, tp_group: ProcessGroup
    ) -> None: ...

class SequentialMLP(nn.Module): ...
class SharedExpertMLP(nn.Module): ...
class MoELayer(nn.Module): ...

class TransformerLayer(nn.Module):
    layer_number: int  # in the whole model, from 1

class SelfAttention(nn.Module):
    core_attention: nn.Module
    linear_proj: RowParallelLinear
    q_layernorm: nn.Module | None
    k_layernorm: nn.Module | None
    hidden_size_per_attention_head: int
    num_attention_heads_per_partition: int
    num_query_groups_per_partition: int

def set_tensor_model_parallel_attributes(tensor: Tensor, is_parallel: bool, dim: int, stride: int) -> None: ...
def copy_to_tensor_model_parallel_region(input_: Tensor, group: ProcessGroup) -> Tensor: ...
def gather_from_sequence_parallel_region(
    input_: Tensor, tensor_parallel_output_grad: bool, group: ProcessGroup
) -> Tensor: ...
def get_bias_dropout_add(training: bool, fused: bool) -> _Add: ...

# What a model is made of.

@dataclass
class PackedSeqParams:
    qkv_format: str | None = ...
    cu_seqlens_q: Tensor | None = ...
    cu_seqlens_kv: Tensor | None = ...
    cu_seqlens_q_padded: Tensor | None = ...
    cu_seqlens_kv_padded: Tensor | None = ...
    max_seqlen_q: int | None = ...
    max_seqlen_kv: int | None = ...
    local_cp_size: int | None = ...
    cp_group: ProcessGroup | None = ...

@dataclass
class ModuleSpec:
    module: type[nn.Module]
    params: Mapping[str, object] = ...
    submodules: SelfAttentionSubmodules | MLPSubmodules | MoESubmodules | TransformerLayerSubmodules | None = ...

@dataclass(kw_only=True)
class SelfAttentionSubmodules:
    linear_qkv: type[nn.Module]
    core_attention: Callable[..., nn.Module]
    linear_proj: type[nn.Module]
    q_layernorm: type[nn.Module] | None = ...
    k_layernorm: type[nn.Module] | None = ...

@dataclass(kw_only=True)
class MLPSubmodules:
    linear_fc1: type[nn.Module]
    linear_fc2: type[nn.Module]

@dataclass(kw_only=True)
class MoESubmodules:
    experts: ModuleSpec
    router: Callable[..., nn.Module]
    shared_experts: ModuleSpec  # of a model that has them

@dataclass(kw_only=True)
class TransformerLayerSubmodules:
    input_layernorm: type[nn.Module]
    self_attention: ModuleSpec
    self_attn_bda: Callable[[bool, bool], _Add]
    pre_mlp_layernorm: type[nn.Module]
    mlp: ModuleSpec
    mlp_bda: Callable[[bool, bool], _Add]

@dataclass
class TransformerBlockSubmodules:
    layer_specs: list[ModuleSpec]
    layer_norm: type[nn.Module]

class _Embedding(nn.Module):
    def __call__(self, input_ids: Tensor, position_ids: Tensor) -> Tensor: ...

class _Block(nn.Module):
    layers: Sequence[TransformerLayer]
    def __call__(
        self, *, hidden_states: Tensor | None, attention_mask: Tensor | None, packed_seq_params: PackedSeqParams
    ) -> Tensor: ...

class GPTModel(nn.Module):
    config: TransformerConfig
    pre_process: bool
    post_process: bool
    embedding: _Embedding  # of the first stage
    decoder: _Block
    output_layer: ColumnParallelLinear  # of the last stage
    def __init__(
        self,
        *,
        config: TransformerConfig,
        transformer_layer_spec: TransformerBlockSubmodules,
        vocab_size: int,
        max_sequence_length: int,
        pre_process: bool,
        post_process: bool,
        share_embeddings_and_output_weights: bool,
        position_embedding_type: Literal["none", "rope", "learned_absolute"],
        pg_collection: ProcessGroupCollection,
        vp_stage: int | None,
    ) -> None: ...
    def set_input_tensor(self, input_tensor: Tensor) -> None: ...
    def shared_embedding_or_output_weight(self) -> nn.Parameter: ...

# Schedules.

class P2PCommunicator:
    def __init__(self, pp_group: ProcessGroup, config: TransformerConfig) -> None: ...

class _Schedule(Protocol):
    def __call__(
        self,
        *,
        forward_step_func: Callable[[Iterator[_Item], nn.Module], tuple[Tensor, Callable[..., object]]],
        data_iterator: Iterator[_Item] | list[Iterator[_Item]],
        model: nn.Module | list[nn.Module],
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        forward_only: bool,
        collect_non_loss_data: bool,
        p2p_communicator: P2PCommunicator | None,
        pg_collection: ProcessGroupCollection,
    ) -> list[object]: ...  # what is told of each micro-batch, on the last stage; elsewhere nothing

def get_forward_backward_func(pp_size: int, vp_size: int | None) -> _Schedule: ...

# Gradients and the optimizer.

@dataclass(kw_only=True)
class DistributedDataParallelConfig:
    grad_reduce_in_fp32: bool
    use_distributed_optimizer: bool

class _Buffer:  # parameters of one dtype, one after the other, and their gradients
    param_dtype: torch.dtype
    numel: int  # with what fills it up to a size that divides
    data_parallel_group: ProcessGroup

class DistributedDataParallel(nn.Module):
    buffers: Sequence[_Buffer]  # type: ignore[assignment]  # of a module they are a method
    expert_parallel_buffers: Sequence[_Buffer]
    def __init__(
        self,
        config: TransformerConfig,
        ddp_config: DistributedDataParallelConfig,
        module: nn.Module,
        *,
        pg_collection: ProcessGroupCollection,
    ) -> None: ...
    def zero_grad_buffer(self) -> None: ...
    def scale_gradients(self, scaling_factor: float) -> None: ...

def finalize_model_grads(
    model: Sequence[nn.Module], num_tokens: Tensor | None, pg_collection: ProcessGroupCollection | None
) -> None: ...

@dataclass(kw_only=True)
class OptimizerConfig:
    optimizer: Literal["adam", "sgd"]
    lr: float
    weight_decay: float
    adam_beta1: float
    adam_beta2: float
    adam_eps: float
    clip_grad: float
    bf16: bool
    params_dtype: torch.dtype
    use_distributed_optimizer: bool

class _Range:
    start: int
    end: int

class _DistributedOptimizer:  # of each parameter a rank has a range of its elements
    optimizer: torch.optim.Optimizer
    model_fp32_groups: Sequence[Sequence[nn.Parameter]]
    model_float16_groups: Sequence[Sequence[nn.Parameter]]
    shard_fp32_groups: Sequence[Sequence[nn.Parameter]]
    shard_fp32_from_float16_groups: Sequence[Sequence[nn.Parameter]]
    def _get_model_param_range_map(self, param: nn.Parameter) -> Mapping[str, _Range]: ...

class _ChainedOptimizer:
    chained_optimizers: Sequence[_DistributedOptimizer]
    @property
    def param_groups(self) -> Sequence[dict[str, object]]: ...
    def prepare_grads(self) -> bool: ...
    def get_grad_norm(self) -> float: ...
    def step_with_ready_grads(self) -> bool: ...

def get_megatron_optimizer(
    config: OptimizerConfig,
    model_chunks: Sequence[nn.Module],
    *,
    use_gloo_process_groups: bool,
    pg_collection: ProcessGroupCollection,
) -> _ChainedOptimizer: ...
def clip_grad_by_total_norm_fp32(parameters: Sequence[Tensor], max_norm: float, total_norm: float) -> None: ...
