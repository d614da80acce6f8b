"""The shape of a decoder, from its Hugging Face configuration, and the places of its parameters in files.

Separate tensors of Hugging Face are stacked in one parameter here: queries, keys and values, and gate and up. Each rank
of the axis tp holds a part, and the vocabulary is padded. All of it is described as rectangles, so nothing has to be
whole to be read or written.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PretrainedConfig

from meshrl.algo import Predicts
from meshrl.errors import ConfigError, ModelError
from meshrl.roles import ModelConfig
from meshrl_megatron.core import TransformerConfig
from meshrl_megatron.options import MegatronConfig
from meshrl_torch.checkpoint.boxes import Box
from meshrl_torch.model.heads import predicts_of
from meshrl_torch.model.loading import config_of, packing_of

_KNOWN: Final[Mapping[str, tuple[bool, bool]]] = {
    "llama": (False, False),
    "qwen2": (True, False),
    "qwen3": (False, True),
    "qwen3_moe": (False, True),
}
"""By `model_type`: whether queries, keys and values have a bias, and whether queries and keys are normalised."""
_ROPES: Final = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose frequencies do not depend on the longest row of a pass."""


_LAYER: Final = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT: Final = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")


@dataclass(frozen=True)
class Decoder:
    """The shape of a decoder of the Llama kind, as in its Hugging Face configuration."""

    layers: int
    hidden: int
    heads: int
    """Number of query heads."""
    groups: int
    """Number of key and value heads. Each serves heads / groups query heads."""
    head_dim: int
    ffn: int
    """Size of the feed-forward layers, or of each expert."""
    vocabulary: int
    """Rows of the embedding in files, without padding."""
    tied: bool
    """True if the last layer is the embedding."""
    qkv_bias: bool
    qk_norm: bool
    eps: float
    experts: int
    """Number of experts of each layer. 0 in a model without experts."""
    chosen: int
    """Experts of each token. 0 in a model without experts."""
    weighs_all: bool
    """True if the weights of chosen experts are shares among all experts. False if they are normalised to sum to 1."""

    def padded(self, tp_size: int) -> int:
        """Return the rows of the embedding on all ranks along tp: the least multiple that holds the vocabulary."""
        return -(-self.vocabulary // tp_size) * tp_size

    @classmethod
    def of(cls, config: PretrainedConfig, predicts: Predicts) -> "Decoder":
        """Read a model's configuration. ModelError for an unknown architecture."""
        kind = str(config.model_type)
        if kind not in _KNOWN:
            raise ModelError(
                f"the backend 'megatron' supports models of the types {', '.join(_KNOWN)}, but this one is {kind!r}: "
                'take backend = "torch" or "fsdp"'
            )
        bias, norm = _KNOWN[kind]
        mixed = kind == "qwen3_moe"
        wrong = {
            "hidden_act": getattr(config, "hidden_act", "silu") != "silu",
            "attention_bias": bool(getattr(config, "attention_bias", False)),
            "mlp_bias": bool(getattr(config, "mlp_bias", False)),
            "layer_types": any(each != "full_attention" for each in getattr(config, "layer_types", None) or ()),
            **(_strange_experts(config) if mixed else {}),
        }
        unknown = [f"{name} = {getattr(config, name)!r}" for name, is_wrong in wrong.items() if is_wrong]
        rope = cast("Mapping[str, object]", getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
        if rope not in _ROPES:
            unknown.append(f"rope_type = {rope!r}")
        if unknown:
            raise ModelError(
                f"the backend 'megatron' cannot compute this {kind} model, which has {', '.join(unknown)}: take "
                'backend = "torch" or "fsdp"'
            )
        heads, hidden = int(config.num_attention_heads), int(config.hidden_size)
        return cls(
            layers=int(config.num_hidden_layers),
            hidden=hidden,
            heads=heads,
            groups=int(config.num_key_value_heads),
            head_dim=int(getattr(config, "head_dim", None) or hidden // heads),
            ffn=int(config.moe_intermediate_size if mixed else config.intermediate_size),
            vocabulary=int(config.vocab_size),
            tied=bool(config.tie_word_embeddings) and predicts == "logprobs",
            qkv_bias=bias,
            qk_norm=norm,
            eps=float(config.rms_norm_eps),
            experts=int(config.num_experts) if mixed else 0,
            chosen=int(config.num_experts_per_tok) if mixed else 0,
            weighs_all=mixed and not config.norm_topk_prob,
        )

    def check(self, sizes: Mapping[str, int], layout: MegatronConfig) -> None:
        """Raise ConfigError if the model cannot be divided over axes of these sizes in this way."""
        tp, pp, stages = sizes["tp"], sizes["pp"], layout.virtual_stages
        parts = [("attention heads", self.heads), ("key-value heads", self.groups)]
        for what, count in parts if self.experts else [*parts, ("ffn dims", self.ffn)]:
            if count % tp:
                raise ConfigError(f"the model has {count} {what}, which the mesh's tp = {tp} does not divide")
        if layout.experts > 1 and not self.experts:
            raise ConfigError(f"megatron.experts = {layout.experts}, but the model has no experts to divide: remove it")
        if self.experts % (layout.experts * tp):
            raise ConfigError(
                f"the model has {self.experts} experts in each layer, which do not divide among {layout.experts * tp} "
                f"ranks (megatron.experts = {layout.experts}, tp = {tp})"
            )
        if self.experts and tp > 1 and not layout.sequence_parallel:
            raise ConfigError(
                f"experts are divided among ranks along tp (here {tp}) by the tokens that each has: leave out "
                "megatron.sequence_parallel = false, or tp"
            )
        if self.layers % (pp * stages):
            raise ConfigError(
                f"the model has {self.layers} layers, which do not divide into {pp * stages} equal stages (pp = {pp}, "
                f"megatron.virtual_stages = {stages})"
            )
        if stages > 1 and pp == 1:
            raise ConfigError(f"megatron.virtual_stages = {stages} needs a mesh with an axis pp of 2 or more")

    def configuration(
        self, sizes: Mapping[str, int], dtype: torch.dtype, layout: MegatronConfig, *, recompute: bool
    ) -> TransformerConfig:
        """Return Megatron's configuration."""
        virtual_stages = layout.virtual_stages
        return TransformerConfig(
            num_layers=self.layers,
            hidden_size=self.hidden,
            num_attention_heads=self.heads,
            num_query_groups=self.groups,
            kv_channels=self.head_dim,
            ffn_hidden_size=self.ffn,
            normalization="RMSNorm",
            layernorm_epsilon=self.eps,
            activation_func=functional.silu,
            gated_linear_unit=True,
            add_bias_linear=False,
            add_qkv_bias=self.qkv_bias,
            qk_layernorm=self.qk_norm,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            masked_softmax_fusion=False,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            gradient_accumulation_fusion=False,
            perform_initialization=False,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            bf16=dtype == torch.bfloat16,
            transformer_impl=layout.transformer_impl,
            tensor_model_parallel_size=sizes["tp"],
            pipeline_model_parallel_size=sizes["pp"],
            virtual_pipeline_model_parallel_size=virtual_stages if virtual_stages > 1 else None,
            sequence_parallel=layout.sequence_parallel and sizes["tp"] > 1,
            variable_seq_lengths=True,
            # With two ranks, each is the other's next and last, and messages are only told apart one by one.
            overlap_p2p_comm=virtual_stages > 1,
            batch_p2p_comm=virtual_stages == 1,
            moe_token_dispatcher_type="alltoall",
            calculate_per_token_loss=True,
            # Compute experts like transformers: none is dropped, and nothing balances them.
            num_moe_experts=self.experts or None,
            moe_ffn_hidden_size=self.ffn if self.experts else None,
            moe_router_topk=self.chosen,
            moe_router_pre_softmax=self.weighs_all,
            moe_router_load_balancing_type="none",
            expert_model_parallel_size=layout.experts * sizes["tp"] if self.experts else 1,
            expert_tensor_parallel_size=1 if self.experts else None,
            cuda_graph_scope=[],
            recompute_granularity="full" if recompute else None,
            recompute_method="uniform" if recompute else None,
            recompute_num_layers=1 if recompute else None,
        )


def reads(config: ModelConfig) -> str:
    """Return "packed". ModelError for an unknown architecture, ConfigError if the table asks for padded rows."""
    if packing_of(config) == "padded":
        raise ConfigError(
            'packing = "padded": the backend \'megatron\' packs all rows: remove it, or take backend = "fsdp"'
        )
    Decoder.of(config_of(config), predicts_of(config))
    return "packed"


def _strange_experts(config: PretrainedConfig) -> dict[str, bool]:
    """Return the parts of a mixture's configuration that cannot be computed."""
    return {
        "mlp_only_layers": bool(config.mlp_only_layers),
        "decoder_sparse_step": config.decoder_sparse_step != 1,
        "sliding_window": config.sliding_window is not None,
        "num_experts_per_tok": config.norm_topk_prob and config.num_experts_per_tok == 1,
    }


@dataclass(frozen=True)
class Place:
    """The place of a rank in its model."""

    tp: int
    """Its number on the axis tp."""
    tp_size: int
    first_layer: int
    """The number, in the whole model, of its stage's first layer."""
    first_expert: int = 0
    """The number, in the whole model, of its first expert of each layer."""


def boxes_of(name: str, shape: Decoder, place: Place, tensor: Tensor) -> list[Box]:
    """Return the rectangles of Hugging Face tensors in a stage's parameter, by its name there, as views of `tensor`.

    `tensor`: the parameter, or one of its shape. Padding is in no rectangle.

    Heads, groups and ffn must be divisible by `tp_size`. A parameter that ranks share is whole on each. An expert is
    whole on its rank. ModelError for a parameter that no Llama-shaped model has.
    """
    layer = _LAYER.fullmatch(name)
    expert = _EXPERT.fullmatch(layer[2]) if layer else None
    if expert:
        make = _OF_AN_EXPERT.get(expert[2])
        place = replace(place, first_expert=place.first_expert + int(expert[1]))
    else:
        make = _OF_A_LAYER.get(layer[2]) if layer else _OF_THE_ENDS.get(name)
    if make is None:
        raise ModelError(
            f"the backend 'megatron' knows no Hugging Face tensor for the parameter `{name}`: it reads and writes "
            "Llama, Qwen2, Qwen3 and Qwen3-MoE decoders"
        )
    prefix = f"model.layers.{place.first_layer + int(layer[1])}." if layer else ""
    return [replace(each, name=prefix + each.name) for each in make(shape, place, tensor)]


_Make: TypeAlias = Callable[[Decoder, Place, Tensor], list[Box]]


def _part(name: str, size: Callable[[Decoder], tuple[int, ...]], dim: int | None = None) -> _Make:
    """A tensor of this size that is divided along `dim`, or whole on all ranks."""

    def make(shape: Decoder, place: Place, tensor: Tensor) -> list[Box]:
        whole = size(shape)
        starts = [place.tp * length // place.tp_size if index == dim else 0 for index, length in enumerate(whole)]
        return [Box(name, whole, tuple(starts), tensor)]

    return make


def _stacked(*parts: tuple[str, Callable[[Decoder], int]]) -> _Make:
    """The rank's rows of some tensors, one after another. `parts`: the name and the number of rows of each."""

    def make(shape: Decoder, place: Place, tensor: Tensor) -> list[Box]:
        boxes: list[Box] = []
        start, tail = 0, tuple(tensor.shape[1:])
        for name, rows in parts:
            whole, own = rows(shape), rows(shape) // place.tp_size
            part = tensor.narrow(0, start, own)
            boxes.append(Box(name, (whole, *tail), (place.tp * own, *(0 for _ in tail)), part))
            start += own
        return boxes

    return make


def _vocabulary(name: str, shape: Decoder, place: Place, tensor: Tensor) -> list[Box]:
    """[padded / tp, hidden]: the last ranks may hold less of the vocabulary, or none."""
    rows = shape.padded(place.tp_size) // place.tp_size
    first = place.tp * rows
    known = min(rows, shape.vocabulary - first)
    size = (shape.vocabulary, shape.hidden)
    return [Box(name, size, (first, 0), tensor.narrow(0, 0, known))] if known > 0 else []


def _output(shape: Decoder, place: Place, tensor: Tensor) -> list[Box]:
    return _vocabulary("model.embed_tokens.weight" if shape.tied else "lm_head.weight", shape, place, tensor)


def _expert(name: str, size: Callable[[Decoder], tuple[int, int]]) -> _Make:
    """One expert's matrix, in a tensor of all experts'."""
    return lambda shape, place, tensor: [
        Box(name, (shape.experts, *size(shape)), (place.first_expert, 0, 0), tensor[None])
    ]


def _qkv(kind: str) -> _Make:
    """The rank's queries, its keys, its values."""
    return _stacked(
        (f"self_attn.q_proj.{kind}", lambda shape: shape.heads * shape.head_dim),
        (f"self_attn.k_proj.{kind}", lambda shape: shape.groups * shape.head_dim),
        (f"self_attn.v_proj.{kind}", lambda shape: shape.groups * shape.head_dim),
    )


_OF_A_LAYER: Final[Mapping[str, _Make]] = {
    "input_layernorm.weight": _part("input_layernorm.weight", lambda shape: (shape.hidden,)),
    "self_attention.linear_qkv.weight": _qkv("weight"),
    "self_attention.linear_qkv.bias": _qkv("bias"),
    "self_attention.q_layernorm.weight": _part("self_attn.q_norm.weight", lambda shape: (shape.head_dim,)),
    "self_attention.k_layernorm.weight": _part("self_attn.k_norm.weight", lambda shape: (shape.head_dim,)),
    "self_attention.linear_proj.weight": _part(
        "self_attn.o_proj.weight", lambda shape: (shape.hidden, shape.heads * shape.head_dim), 1
    ),
    "pre_mlp_layernorm.weight": _part("post_attention_layernorm.weight", lambda shape: (shape.hidden,)),
    "mlp.linear_fc1.weight": _stacked(
        ("mlp.gate_proj.weight", lambda shape: shape.ffn), ("mlp.up_proj.weight", lambda shape: shape.ffn)
    ),
    "mlp.linear_fc2.weight": _part("mlp.down_proj.weight", lambda shape: (shape.hidden, shape.ffn), 1),
    "mlp.router.weight": _part("mlp.gate.weight", lambda shape: (shape.experts, shape.hidden)),
}
_OF_AN_EXPERT: Final[Mapping[str, _Make]] = {
    "linear_fc1.weight": _expert("mlp.experts.gate_up_proj", lambda shape: (2 * shape.ffn, shape.hidden)),
    "linear_fc2.weight": _expert("mlp.experts.down_proj", lambda shape: (shape.hidden, shape.ffn)),
}
_OF_THE_ENDS: Final[Mapping[str, _Make]] = {
    "embedding.word_embeddings.weight": partial(_vocabulary, "model.embed_tokens.weight"),
    "decoder.final_layernorm.weight": _part("model.norm.weight", lambda shape: (shape.hidden,)),
    "output_layer.weight": _output,
    "value_head.weight": _part("value_head.weight", lambda shape: (1, shape.hidden)),
    "value_head.bias": _part("value_head.bias", lambda _: (1,)),
    "score.weight": _part("score.weight", lambda shape: (1, shape.hidden)),
}
