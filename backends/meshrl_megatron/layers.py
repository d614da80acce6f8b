"""Layers for Megatron's blocks: attention over packed sequences, and a norm for split sequences."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from packaging.version import Version
from torch import Tensor, nn
from torch.nn import functional

from meshrl.errors import ConfigError
from meshrl_megatron import core
from meshrl_megatron.options import TransformerImpl
from meshrl_megatron.shape import Decoder, Latent, Routing
from meshrl_torch.model.attention import Packed
from meshrl_torch.model.scores import Scores


@dataclass
class Packing(core.PackedSeqParams):
    """Megatron's data about the computed tokens for each layer's attention."""

    attend: Packed | None = None
    cos: Tensor | None = None
    """Cosines of the rotary embedding, [1, tokens, head dims]."""
    sin: Tensor | None = None


def _whole(config: core.TransformerConfig, *size: int) -> nn.Parameter:
    """A parameter that is whole on each rank along tp. These see different tokens, so Megatron sums its gradient."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parameter = nn.Parameter(torch.ones(size, dtype=config.params_dtype, device=device))
    parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return parameter


class RmsNorm(nn.Module):
    """x / rms(x) * weight, as in transformers: computed in float32, scaled in the dtype of the states."""

    def __init__(self, config: core.TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = _whole(config, hidden_size)
        self._eps = eps

    def forward(self, states: Tensor) -> Tensor:
        """Normalise [..., hidden]. Returns the same shape."""
        wide = states.float()
        normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._eps)
        return self.weight * normal.to(states.dtype)


class VarlenAttention(nn.Module):
    """Causal attention inside each segment, to keys and values of all ranks along `cp`."""

    def __init__(
        self, shape: Decoder, layer_number: int, pg_collection: core.ProcessGroupCollection, **_: object
    ) -> None:
        super().__init__()
        self._layer, self._scores = layer_number, Scores(shape.scale, shape.windows[layer_number - 1])
        self._ranks = pg_collection.cp

    def forward(self, query: Tensor, key: Tensor, value: Tensor, packing: Packing) -> Tensor:
        """Return [tokens, 1, heads * dims] from [tokens, 1, heads, dims]."""
        if self._ranks.size() > 1:
            key, value = (self._gathered(states) for states in (key, value))
        # [tokens, 1, heads, dims] to [1, heads, tokens, dims]
        q, k, v = (states.permute(1, 2, 0, 3) for states in (query, key, value))
        output = cast("Packed", packing.attend)(self._layer, q, k, v, self._scores)
        return output[0].flatten(1)[:, None]

    def _gathered(self, states: Tensor) -> Tensor:
        return core.gather_from_sequence_parallel_region(
            states.contiguous(), tensor_parallel_output_grad=True, group=self._ranks
        )


_NARROW_EPS: Final = 1e-6
"""Of the norms in latent attention, in DeepSeek's models whatever their configuration says."""
_TINY: Final = 1e-20


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

    def __init__(
        self, config: core.TransformerConfig, submodules: core.MLPSubmodules, tp_group: dist.ProcessGroup, **_: object
    ) -> None:
        """`_`: what Megatron tells its own MLP, which differs between its releases."""
        super().__init__(config, submodules, ffn_hidden_size=config.ffn_hidden_size, tp_group=tp_group)

    def forward(self, hidden_states: Tensor, **_: object) -> tuple[Tensor, Tensor | None]:
        """Return the output [tokens, 1, hidden] and its bias, from states [tokens, 1, hidden]."""
        rows = len(self.linear_fc1.weight) // 2
        gate, up = _outputs(self.linear_fc1, hidden_states, (rows, rows))
        return self.linear_fc2(functional.silu(gate) * up)


def _rotated(states: Tensor, packing: Packing, *, interleaved: bool = False) -> Tensor:
    """Apply RoPE (arXiv:2104.09864) to the first dims of [tokens, 1, heads, dims], as many as there are cosines.

    Halves are paired, as in Llama's weights. `interleaved`: neighbours are, and the result has halves.
    """
    cos, sin = (cast("Tensor", each)[0][:, None, None] for each in (packing.cos, packing.sin))
    turned, still = states.split((cos.shape[-1], states.shape[-1] - cos.shape[-1]), -1)
    first, second = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    halves = torch.cat([first, second], -1) if interleaved else turned
    turned = (halves * cos + torch.cat([-second, first], -1) * sin).to(states.dtype)  # complex turns are float32
    return torch.cat([turned, still], -1) if still.shape[-1] else turned


class LatentAttention(nn.Module):
    """Attention with keys and values from a narrow vector of each token (MLA, arXiv:2405.04434).

    The narrow vectors are computed whole on each rank along tp, for the rank's tokens.
    """

    def __init__(
        self,
        shape: Decoder,
        modules: "Modules",
        config: core.TransformerConfig,
        layer_number: int,
        pg_collection: core.ProcessGroupCollection,
        **_: object,
    ) -> None:
        super().__init__()
        sizes = cast("Latent", shape.latent)
        self._sizes, self._head, self._value, self._tp = sizes, shape.head_dim, shape.value_dim, pg_collection.tp
        self._sequence_parallel = config.sequence_parallel

        def make(module: type[nn.Module], inputs: int, outputs: int, **how: bool) -> nn.Module:
            return module(
                inputs, outputs, config=config, init_method=None, bias=False, is_expert=False, tp_group=self._tp, **how
            )

        column = {"gather_output": False, "skip_bias_add": False}
        if sizes.query_rank is None:
            self.linear_q_proj = make(modules.column, shape.hidden, shape.heads * shape.head_dim, **column)
        else:
            self.q_down = _whole(config, sizes.query_rank, shape.hidden)
            self.q_down_norm = modules.norm(config=config, hidden_size=sizes.query_rank, eps=_NARROW_EPS)
            self.linear_q_up_proj = make(modules.column, sizes.query_rank, shape.heads * shape.head_dim, **column)
        self.kv_down = _whole(config, sizes.rank + sizes.turned, shape.hidden)
        self.kv_down_norm = modules.norm(config=config, hidden_size=sizes.rank, eps=_NARROW_EPS)
        width = shape.heads * (sizes.still + shape.value_dim)
        self.linear_kv_up_proj = make(modules.column, sizes.rank, width, **column)
        self.core_attention = VarlenAttention(shape, layer_number, pg_collection)
        inputs = shape.heads * shape.value_dim
        self.linear_proj = make(modules.row, inputs, shape.hidden, input_is_parallel=True, skip_bias_add=True)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, packed_seq_params: Packing, **_: object
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output [tokens, 1, hidden] and no bias, from states [tokens, 1, hidden]."""
        sizes = self._sizes
        narrow, turned = functional.linear(hidden_states, self.kv_down).split((sizes.rank, sizes.turned), -1)
        wide, _ = self.linear_kv_up_proj(self.kv_down_norm(narrow))
        still, value = wide.unflatten(-1, (-1, sizes.still + self._value)).split((sizes.still, self._value), -1)
        if self._sequence_parallel:
            turned = core.gather_from_sequence_parallel_region(turned, tensor_parallel_output_grad=True, group=self._tp)
        else:
            turned = core.copy_to_tensor_model_parallel_region(turned, group=self._tp)
        turned = _rotated(turned[:, :, None], packed_seq_params, interleaved=sizes.interleaved)
        key = torch.cat([still, turned.expand(-1, -1, still.shape[2], -1)], -1)
        mixed = self.core_attention(self._query(hidden_states, packed_seq_params), key, value, packed_seq_params)
        return cast("tuple[Tensor, Tensor | None]", self.linear_proj(mixed))

    def _query(self, states: Tensor, packing: Packing) -> Tensor:
        sizes = self._sizes
        if sizes.query_rank is None:
            wide, _ = self.linear_q_proj(states)
        else:
            wide, _ = self.linear_q_up_proj(self.q_down_norm(functional.linear(states, self.q_down)))
        still, turned = wide.unflatten(-1, (-1, self._head)).split((sizes.still, sizes.turned), -1)
        return torch.cat([still, _rotated(turned, packing, interleaved=sizes.interleaved)], -1)


class Router(nn.Module):
    """Chooses each token's experts. It computes like transformers; Megatron's needs Transformer Engine or CUDA."""

    def __init__(self, routing: Routing, config: core.TransformerConfig, **_: object) -> None:
        super().__init__()
        self._routing = routing
        self.weight = _whole(config, routing.experts, config.hidden_size)
        if routing.scores == "sigmoid":
            bias = torch.zeros(routing.experts, device=self.weight.device)
            self.expert_bias = nn.Parameter(bias, requires_grad=False)

    def set_layer_number(self, number: int) -> None:
        """Megatron tells it, and it does not matter."""

    def forward(self, hidden_states: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return each expert's weight for each token, and True where it is chosen, [tokens, experts]."""
        routing, states = self._routing, hidden_states.flatten(0, -2)
        dtype = torch.float32 if routing.wide else states.dtype
        logits = functional.linear(states.to(dtype), self.weight.to(dtype)).float()
        scores = logits.sigmoid() if routing.scores == "sigmoid" else logits.softmax(-1)
        with torch.no_grad():
            places = self._open(scores).topk(routing.chosen, -1).indices
            chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, places, True)
        weights = scores.gather(1, places)
        if routing.normalised:
            weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
        weights = (weights * routing.factor).to(dtype)
        return torch.zeros_like(scores, dtype=dtype).scatter(1, places, weights), chosen

    def _open(self, scores: Tensor) -> Tensor:
        """Return what experts are chosen by: -inf in groups that are not open to a token."""
        routing = self._routing
        if routing.scores == "sigmoid":
            scores = scores + self.expert_bias
        if routing.groups == 1:
            return scores
        groups: Tensor = scores.unflatten(1, (routing.groups, -1))
        best = groups.topk(routing.best, -1).values.sum(-1)
        closed = torch.ones_like(best, dtype=torch.bool).scatter(1, best.topk(routing.open, -1).indices, False)
        return groups.masked_fill(closed[..., None], -torch.inf).flatten(1)


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
_NO_RELEASE: Final = Version("0.0.0")
"""What Megatron-Core says in newer releases if Transformer Engine is not installed. Older ones say None."""


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
            f"but {'none' if release in (None, _NO_RELEASE) else release} is installed here: pip install "
            f"'transformer-engine[core_cu13,pytorch]>={first},<{end}', or set it to \"local\""
        )
    return _ENGINE


def _mlp(tp: dist.ProcessGroup, modules: Modules) -> core.ModuleSpec:
    linears = core.MLPSubmodules(linear_fc1=modules.fused, linear_fc2=modules.row)
    return core.ModuleSpec(module=GatedMlp, params={"tp_group": tp}, submodules=linears)


def _mixture(shape: Decoder, modules: Modules) -> core.ModuleSpec:
    linears = core.MLPSubmodules(linear_fc1=modules.column, linear_fc2=modules.row)
    made = core.MoESubmodules(
        experts=core.ModuleSpec(module=core.SequentialMLP, submodules=linears),
        router=partial(Router, shape.routing),
        shared_experts=core.ModuleSpec(module=core.SharedExpertMLP, submodules=linears),
    )
    return core.ModuleSpec(module=core.MoELayer, submodules=made)


def _attention(shape: Decoder, modules: Modules) -> core.ModuleSpec:
    if shape.latent:
        return core.ModuleSpec(module=LatentAttention, params={"shape": shape, "modules": modules})
    norm = modules.norm if shape.qk_norm else None
    made = core.SelfAttentionSubmodules(
        linear_qkv=modules.fused,
        core_attention=partial(VarlenAttention, shape),
        linear_proj=modules.row,
        q_layernorm=norm,
        k_layernorm=norm,
    )
    return core.ModuleSpec(module=PackedAttention, submodules=made)


def layer_spec(config: core.TransformerConfig, shape: Decoder, layer: int, tp: dist.ProcessGroup) -> core.ModuleSpec:
    """Return the specification of a decoder layer, whose matrices are divided over the ranks of `tp`.

    `layer`: its number in the whole model, from 0.
    """
    modules = modules_of(config.transformer_impl)
    return core.ModuleSpec(
        module=core.TransformerLayer,
        submodules=core.TransformerLayerSubmodules(
            input_layernorm=modules.norm,
            self_attention=_attention(shape, modules),
            self_attn_bda=core.get_bias_dropout_add,
            pre_mlp_layernorm=modules.norm,
            mlp=_mixture(shape, modules) if shape.is_routed(layer) else _mlp(tp, modules),
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
