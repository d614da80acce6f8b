"""Layers for Megatron's blocks: attention over packed sequences, and a norm for split sequences."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from packaging.version import Version
from torch import Tensor, nn
from torch.nn import functional

from meshrl.errors import ConfigError
from meshrl_megatron import core
from meshrl_megatron.options import TransformerImpl
from meshrl_torch.model.attention import Packed, Scores


@dataclass
class Packing(core.PackedSeqParams):
    """Megatron's data about the computed tokens for each layer's attention."""

    attend: Packed | None = None
    cos: Tensor | None = None
    """Cosines of the rotary embedding, [1, tokens, head dims]."""
    sin: Tensor | None = None


class RmsNorm(nn.Module):
    """x / rms(x) * weight, as in transformers: computed in float32, scaled in the dtype of the states."""

    def __init__(self, config: core.TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        # Ranks along tp see different tokens, so Megatron sums the gradient.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self._eps = eps

    def forward(self, states: Tensor) -> Tensor:
        """Normalise [..., hidden]. Returns the same shape."""
        wide = states.float()
        normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._eps)
        return self.weight * normal.to(states.dtype)


class VarlenAttention(nn.Module):
    """Causal attention inside each segment, to keys and values of all ranks along `cp`."""

    def __init__(self, layer_number: int, pg_collection: core.ProcessGroupCollection, **_: object) -> None:
        super().__init__()
        self._layer = layer_number
        self._ranks = pg_collection.cp

    def forward(self, query: Tensor, key: Tensor, value: Tensor, packing: Packing) -> Tensor:
        """Return [tokens, 1, heads * dims] from [tokens, 1, heads, dims]."""
        if self._ranks.size() > 1:
            key, value = (self._gathered(states) for states in (key, value))
        # [tokens, 1, heads, dims] to [1, heads, tokens, dims]
        q, k, v = (states.permute(1, 2, 0, 3) for states in (query, key, value))
        output = cast("Packed", packing.attend)(self._layer, q, k, v, Scores(q.shape[-1] ** -0.5))
        return output[0].flatten(1)[:, None]

    def _gathered(self, states: Tensor) -> Tensor:
        return core.gather_from_sequence_parallel_region(
            states.contiguous(), tensor_parallel_output_grad=True, group=self._ranks
        )


class FusedLinear(core.ColumnParallelLinear):
    """Linear layers with the same input. Their weights are stacked in one parameter."""


def _outputs(linear: core.ColumnParallelLinear, states: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """Return the [tokens, 1, size] of each layer that is stacked in `linear`, of the rank's rows.

    In a `FusedLinear` on one rank, each layer is a separate product, with a separate result. These are the operations
    of transformers, and so its bits. Otherwise it is one product, which may overlap with communication.
    """
    if not isinstance(linear, FusedLinear) or linear.tp_group.size() > 1:
        fused, _ = linear(states)
        return torch.split(fused, list(sizes), -1)
    weights = linear.weight.split(list(sizes))
    biases = (None,) * len(sizes) if linear.bias is None else linear.bias.split(list(sizes))
    return [functional.linear(states, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


class PackedAttention(core.SelfAttention):
    """Megatron's projections around attention over packed sequences, with the sequences' positions.

    The rows of the fused projection are all queries of this rank, then all keys, then all values.
    """

    linear_qkv: core.ColumnParallelLinear

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, packed_seq_params: Packing, **_: object
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output [tokens, 1, hidden] and its bias, from states [tokens, 1, hidden]."""
        query, key, value = self._projected(hidden_states)
        query, key = (_rotated(states, packed_seq_params) for states in (query, key))
        mixed = self.core_attention(query, key, value, packed_seq_params)
        return self.linear_proj(mixed)

    def _projected(self, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, [tokens, 1, heads, dims]. The first two are normalised if configured."""
        dims = self.hidden_size_per_attention_head
        heads, groups = self.num_attention_heads_per_partition, self.num_query_groups_per_partition
        outputs = _outputs(self.linear_qkv, states, [count * dims for count in (heads, groups, groups)])
        query, key, value = (each.unflatten(-1, (-1, dims)) for each in outputs)
        if self.q_layernorm is None or self.k_layernorm is None:
            return query, key, value
        return self.q_layernorm(query), self.k_layernorm(key), value


class GatedMlp(core.MLP):
    """down(silu(gate(x)) * up(x)), arXiv:2002.05202."""

    linear_fc1: core.ColumnParallelLinear

    def forward(self, hidden_states: Tensor, **_: object) -> tuple[Tensor, Tensor | None]:
        """Return the output [tokens, 1, hidden] and its bias, from states [tokens, 1, hidden]."""
        rows = len(self.linear_fc1.weight) // 2
        gate, up = _outputs(self.linear_fc1, hidden_states, (rows, rows))
        return self.linear_fc2(functional.silu(gate) * up)


def _rotated(states: Tensor, packing: Packing) -> Tensor:
    """Apply RoPE (arXiv:2104.09864) to [tokens, 1, heads, dims], with halves paired as in Llama's weights."""
    cos, sin = (cast("Tensor", each)[0][:, None, None] for each in (packing.cos, packing.sin))
    first, second = states.chunk(2, -1)
    return states * cos + torch.cat([-second, first], -1) * sin


class Router(core.TopKRouter):
    """Megatron's choice of each token's experts, with weights on the device that uses them."""

    def __init__(self, config: core.TransformerConfig, pg_collection: core.ProcessGroupCollection) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self.weight.data = self.weight.data.to("cuda" if torch.cuda.is_available() else "cpu")

    def gating(self, input: Tensor) -> Tensor:  # noqa: A002 -- Megatron's name
        """Return each expert's logit [tokens, 1, experts]. Megatron's version fails without Transformer Engine."""
        return functional.linear(input, self.weight)

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Do nothing: there is no bias, and Megatron's version would be compiled to find that out."""


@dataclass(frozen=True)
class _Gated:
    """Builds a GatedMlp. It is not a ModuleSpec, to which Megatron would add arguments of its MLP."""

    params: Mapping[str, object]
    submodules: core.MLPSubmodules
    module: type[GatedMlp] = GatedMlp


@dataclass(frozen=True)
class Modules:
    """The modules of a layer whose operations can be chosen."""

    norm: type[nn.Module]
    fused: type[nn.Module]
    """Linear layers with the same input, divided by their outputs."""
    column: type[nn.Module]
    """An expert's first linear layer."""
    row: type[nn.Module]
    """A linear layer that is divided by its inputs."""


LOCAL: Final = Modules(RmsNorm, FusedLinear, core.ColumnParallelLinear, core.RowParallelLinear)
_ENGINE: Final = Modules(
    core.TENorm, core.TEColumnParallelLinear, core.TEColumnParallelLinear, core.TERowParallelLinear
)
_RELEASES: Final = Version("2.9"), Version("2.12")
"""The first release of Transformer Engine that this Megatron-Core takes, and the first that it does not."""


def modules_of(impl: TransformerImpl) -> Modules:
    """Return the modules that `transformer_impl` names.

    ConfigError if Transformer Engine is asked for and is not installed, or in a release that does not fit.
    """
    if impl == "local":
        return LOCAL
    release, (first, end) = core.get_te_version(), _RELEASES
    if release is None or not first <= release < end:
        raise ConfigError(
            f'megatron.transformer_impl = "transformer_engine" needs Transformer Engine from {first} to before {end}, '
            f"but {'none' if release is None else release} is installed here: pip install "
            f"'transformer-engine[core_cu13,pytorch]>={first},<{end}', or set it to \"local\""
        )
    return _ENGINE


def _mlp(config: core.TransformerConfig, tp: dist.ProcessGroup, modules: Modules) -> core.ModuleSpec | _Gated:
    if not config.num_moe_experts:
        linears = core.MLPSubmodules(linear_fc1=modules.fused, linear_fc2=modules.row)
        return _Gated({"ffn_hidden_size": config.ffn_hidden_size, "tp_group": tp}, linears)
    linears = core.MLPSubmodules(linear_fc1=modules.column, linear_fc2=modules.row)
    experts = core.ModuleSpec(module=core.SequentialMLP, submodules=linears)
    return core.ModuleSpec(module=core.MoELayer, submodules=core.MoESubmodules(experts=experts, router=Router))


def layer_spec(config: core.TransformerConfig, tp: dist.ProcessGroup) -> core.ModuleSpec:
    """Return the specification of a decoder layer, whose matrices are divided over the ranks of `tp`."""
    modules = modules_of(config.transformer_impl)
    norm = modules.norm if config.qk_layernorm else None
    attention = core.SelfAttentionSubmodules(
        linear_qkv=modules.fused,
        core_attention=VarlenAttention,
        linear_proj=modules.row,
        q_layernorm=norm,
        k_layernorm=norm,
    )
    return core.ModuleSpec(
        module=core.TransformerLayer,
        submodules=core.TransformerLayerSubmodules(
            input_layernorm=modules.norm,
            self_attention=core.ModuleSpec(module=PackedAttention, submodules=attention),
            self_attn_bda=core.get_bias_dropout_add,
            pre_mlp_layernorm=modules.norm,
            mlp=_mlp(config, tp, modules),
            mlp_bda=core.get_bias_dropout_add,
        ),
    )


def assembled(own: Tensor, where: Tensor, whole: int, group: dist.ProcessGroup) -> Tensor:
    """Combine the values of all targets, float32[whole], from the parts of the ranks along `cp`.

    `own`, float32[n], belongs at `where`, int64[n]. All ranks of the group call it together, and each must receive the
    same gradient of the result.
    """
    apply = cast("Callable[[Tensor, Tensor, int, dist.ProcessGroup], Tensor]", _Assembled.apply)
    return apply(own, where, whole, group)


class _Assembled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, where: Tensor, whole: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(where)
        values = own.new_zeros(whole, *own.shape[1:]).index_copy_(0, where, own)
        dist.all_reduce(values, group=group)
        return values

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # Each rank computed the same loss of all values, so its part of the gradient is complete.
        (where,) = ctx.saved_tensors
        return gradients[0].index_select(0, where), None, None, None
