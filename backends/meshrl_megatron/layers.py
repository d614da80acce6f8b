"""Our own layers for Megatron's blocks: attention over packed sequences, and a norm that knows of split sequences."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from meshrl_hf.attention import Packed
from meshrl_megatron.core import (
    MLP,
    ColumnParallelLinear,
    MLPSubmodules,
    ModuleSpec,
    MoELayer,
    MoESubmodules,
    PackedSeqParams,
    ProcessGroupCollection,
    RowParallelLinear,
    SelfAttention,
    SelfAttentionSubmodules,
    SequentialMLP,
    TopKRouter,
    TransformerConfig,
    TransformerLayer,
    TransformerLayerSubmodules,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    get_bias_dropout_add,
)

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass
class Packing(PackedSeqParams):
    """What Megatron hands down to each layer's attention of the tokens that are computed."""

    attend: Packed | None = None
    cos: Tensor | None = None
    """Of the rotary embedding, [1, tokens, head dims]."""
    sin: Tensor | None = None


class RmsNorm(nn.Module):
    """x / rms(x) * weight, as transformers computes it: in float32, scaled in the dtype of the states."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        # Each rank along tp has seen other tokens: Megatron then sums the gradient.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self._eps = eps

    def forward(self, states: Tensor) -> Tensor:
        """[..., hidden] to the same."""
        wide = states.float()
        normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._eps)
        return self.weight * normal.to(states.dtype)


class VarlenAttention(nn.Module):
    """Causal attention inside each segment, to keys and values of all ranks along `cp`."""

    def __init__(self, layer_number: int, pg_collection: ProcessGroupCollection, **_: object) -> None:
        super().__init__()
        self._layer = layer_number
        self._ranks = pg_collection.cp

    def forward(self, query: Tensor, key: Tensor, value: Tensor, packing: Packing) -> Tensor:
        """[tokens, 1, heads * dims] from [tokens, 1, heads, dims]."""
        if self._ranks.size() > 1:
            key, value = (self._gathered(states) for states in (key, value))
        # [tokens, 1, heads, dims] to [1, heads, tokens, dims]
        q, k, v = (states.permute(1, 2, 0, 3) for states in (query, key, value))
        output = cast("Packed", packing.attend)(self._layer, q, k, v, q.shape[-1] ** -0.5, None)
        return output[0].flatten(1)[:, None]

    def _gathered(self, states: Tensor) -> Tensor:
        return gather_from_sequence_parallel_region(
            states.contiguous(), tensor_parallel_output_grad=True, group=self._ranks
        )


class PackedAttention(SelfAttention):
    """Megatron's projections around attention over packed sequences, with the positions that the sequences have."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, packed_seq_params: Packing, **_: object
    ) -> tuple[Tensor, Tensor | None]:
        """The output [tokens, 1, hidden] and its bias, from states [tokens, 1, hidden]."""
        query, key, value = self.get_query_key_value_tensors(hidden_states)
        query, key = (_rotated(states, packed_seq_params) for states in (query, key))
        mixed = self.core_attention(query, key, value, packed_seq_params)
        return self.linear_proj(mixed)


class BiasedProjection(ColumnParallelLinear):
    """A linear layer that adds its bias as it multiplies, as torch's own does: Megatron's rounds the product before."""

    def _forward_impl(
        self,
        input: Tensor,  # noqa: A002 -- Megatron calls it so
        weight: Tensor,
        *,
        bias: Tensor,
        sequence_parallel: bool,
        **_: object,
    ) -> Tensor:
        if sequence_parallel:
            whole = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=self.tp_group)
        else:
            whole = copy_to_tensor_model_parallel_region(input, group=self.tp_group)
        return functional.linear(whole, weight, bias)


def _rotated(states: Tensor, packing: Packing) -> Tensor:
    """RoPE (arXiv:2104.09864) on [tokens, 1, heads, dims], with halves paired as in Llama's weights."""
    cos, sin = (cast("Tensor", each)[0][:, None, None] for each in (packing.cos, packing.sin))
    first, second = states.chunk(2, -1)
    return states * cos + torch.cat([-second, first], -1) * sin


class Router(TopKRouter):
    """Megatron's choice of each token's experts, with its weights on the device where they are used."""

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self.to("cuda" if torch.cuda.is_available() else "cpu")

    def gating(self, input: Tensor) -> Tensor:  # noqa: A002 -- Megatron's name
        """Each expert's logit [tokens, 1, experts]. Megatron's own fails without Transformer Engine."""
        return functional.linear(input, self.weight)

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Nothing: there is none, and Megatron's own would be compiled to find that out."""


def _mlp(config: TransformerConfig) -> ModuleSpec:
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    if not config.num_moe_experts:
        return ModuleSpec(module=MLP, params={"ffn_hidden_size": config.ffn_hidden_size}, submodules=linears)
    experts = ModuleSpec(module=SequentialMLP, submodules=linears)
    return ModuleSpec(module=MoELayer, submodules=MoESubmodules(experts=experts, router=Router))


def layer_spec(config: TransformerConfig) -> ModuleSpec:
    """A decoder's layer of these."""
    norm = RmsNorm if config.qk_layernorm else None
    attention = SelfAttentionSubmodules(
        linear_qkv=BiasedProjection if config.add_qkv_bias else ColumnParallelLinear,
        core_attention=VarlenAttention,
        linear_proj=RowParallelLinear,
        q_layernorm=norm,
        k_layernorm=norm,
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RmsNorm,
            self_attention=ModuleSpec(module=PackedAttention, submodules=attention),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RmsNorm,
            mlp=_mlp(config),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def assembled(own: Tensor, where: Tensor, whole: int, group: dist.ProcessGroup) -> Tensor:
    """The values of all targets, float32[whole], from what each rank along `cp` has of them.

    `own` float32[n] stands at `where` int64[n] there. All ranks of the group call at the same time, and each must be
    given the same gradient of the result.
    """
    apply = cast("Callable[[Tensor, Tensor, int, dist.ProcessGroup], Tensor]", _Assembled.apply)
    return apply(own, where, whole, group)


class _Assembled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, where: Tensor, whole: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(where)
        values = own.new_zeros(whole).index_copy_(0, where, own)
        dist.all_reduce(values, group=group)
        return values

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # Each rank has made the same loss of all values: its own part of the gradient is whole.
        (where,) = ctx.saved_tensors
        return gradients[0].index_select(0, where), None, None, None
