"""The shape of a decoder, from its Hugging Face configuration, and the places of its parameters in files.

Separate tensors of Hugging Face are stacked in one parameter here: queries, keys and values, and gate and up. Each rank
of the axis tp holds a part, and the vocabulary is padded. All of it is described as rectangles, so nothing has to be
whole to be read or written.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import log
from typing import Any, Final, Literal, TypeAlias, cast

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


@dataclass(frozen=True)
class _Family:
    """What a type of model has that its configuration does not say."""

    qkv_bias: bool | None = False
    """None: `attention_bias` says it, which is of the output too in other families."""
    qk_norm: bool = False
    windows: bool = False
    """True if `sliding_window` is of every layer, whatever `layer_types` says."""
    latent: bool = False
    router: Literal["mixtral", "deepseek_v2", "deepseek_v3"] = "mixtral"
    """The family whose router it has, if it has one."""


_FAMILIES: Final[Mapping[str, _Family]] = {
    "llama": _Family(),
    "mistral": _Family(windows=True),
    "mixtral": _Family(windows=True),
    "qwen2": _Family(qkv_bias=True),
    "qwen3": _Family(qk_norm=True),
    "qwen3_moe": _Family(qk_norm=True, windows=True),
    "deepseek_v2": _Family(latent=True, router="deepseek_v2"),
    "deepseek_v3": _Family(latent=True, router="deepseek_v3"),
    "glm4_moe": _Family(qkv_bias=None, router="deepseek_v3"),
}
"""By `model_type`."""
_ROPES: Final = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose frequencies do not depend on the longest row of a pass."""


_LAYER: Final = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT: Final = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")


@dataclass(frozen=True)
class Latent:
    """The sizes of an attention with keys and values from a narrow vector of each token (MLA, arXiv:2405.04434)."""

    query_rank: int | None
    """Size of the vector that queries come from. None: they come from the states."""
    rank: int
    """Size of the vector that keys and values come from."""
    still: int
    """Dims of a head that are not rotated."""
    turned: int
    """Dims of a head that are. All heads have the same keys there."""
    interleaved: bool
    """True if neighbours are rotated together. False: halves, as in Llama."""


@dataclass(frozen=True)
class Routing:
    """How a layer chooses each token's experts, by their scores."""

    experts: int = 0
    """Number of experts. 0 in a model without experts."""
    chosen: int = 0
    """Experts of each token."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """Of logits. With "sigmoid", each expert has a bias, which counts in the choice alone."""
    wide: bool = False
    """True if the logits are computed in float32."""
    normalised: bool = True
    """True if the weights of a token's experts sum to 1, before `factor`. False: they are the scores."""
    factor: float = 1.0
    groups: int = 1
    """Number of groups of experts."""
    open: int = 1
    """Groups that a token's experts are from: those whose `best` experts have the highest sum of scores."""
    best: int = 1


@dataclass(frozen=True)
class Decoder:
    """The shape of a decoder, as in its Hugging Face configuration."""

    layers: int
    hidden: int
    heads: int
    """Number of query heads."""
    groups: int
    """Number of key and value heads. Each serves heads / groups query heads."""
    head_dim: int
    """Dims of a head's queries and keys."""
    value_dim: int
    scale: float
    """What attention multiplies products of queries and keys with."""
    windows: Sequence[int | None]
    """How many keys a query of each layer sees, up to its own. None: all."""
    ffn: int
    """Size of the feed-forward layers that are no experts."""
    vocabulary: int
    """Rows of the embedding in files, without padding."""
    tied: bool
    """True if the last layer is the embedding."""
    qkv_bias: bool
    qk_norm: bool
    eps: float
    latent: Latent | None
    routing: Routing
    expert_ffn: int
    shared_ffn: int
    """Size of the experts that see each token. 0 if there are none."""
    first_routed: int
    """Layers before the first one with experts, if any has."""

    @property
    def experts(self) -> int:
        """Number of experts of each layer that has them. 0 in a model without experts."""
        return self.routing.experts

    @property
    def ffn_of_a_token(self) -> int:
        """Size of the feed-forward layers that a token passes in a layer, on average over the layers."""
        dense = min(self.first_routed, self.layers) if self.experts else self.layers
        routed = self.expert_ffn * self.routing.chosen + self.shared_ffn
        return (dense * self.ffn + (self.layers - dense) * routed) // self.layers

    def padded(self, tp_size: int) -> int:
        """Return the rows of the embedding on all ranks along tp: the least multiple that holds the vocabulary."""
        return -(-self.vocabulary // tp_size) * tp_size

    @classmethod
    def of(cls, config: PretrainedConfig, predicts: Predicts) -> "Decoder":
        """Read a model's configuration. ModelError for an unknown architecture."""
        kind = str(config.model_type)
        if kind not in _FAMILIES:
            raise ModelError(
                f"the backend 'megatron' supports models of the types {', '.join(_FAMILIES)}, but this one is "
                f'{kind!r}: take backend = "torch" or "fsdp"'
            )
        if unknown := _unknown(config):
            raise ModelError(
                f"the backend 'megatron' cannot compute this {kind} model, which has {', '.join(unknown)}: take "
                'backend = "torch" or "fsdp"'
            )
        family, routing, latent = _FAMILIES[kind], _routing(config), _latent(config)
        heads, hidden, layers = (
            int(each) for each in (config.num_attention_heads, config.hidden_size, config.num_hidden_layers)
        )
        head_dim = int(getattr(config, "head_dim", None) or hidden // heads)
        if latent:
            head_dim = latent.still + latent.turned
        expert_ffn = int(getattr(config, "moe_intermediate_size", config.intermediate_size)) if routing.experts else 0
        return cls(
            layers=layers,
            hidden=hidden,
            heads=heads,
            groups=int(config.num_key_value_heads),
            head_dim=head_dim,
            value_dim=int(config.v_head_dim) if latent else head_dim,
            scale=head_dim**-0.5 * (_stretched(config) if latent else 1.0),
            windows=_windows(config),
            ffn=int(config.intermediate_size),
            vocabulary=int(config.vocab_size),
            tied=bool(config.tie_word_embeddings) and predicts == "logprobs",
            qkv_bias=bool(config.attention_bias) if family.qkv_bias is None else family.qkv_bias,
            qk_norm=family.qk_norm or bool(getattr(config, "use_qk_norm", False)),
            eps=float(config.rms_norm_eps),
            latent=latent,
            routing=routing,
            expert_ffn=expert_ffn,
            shared_ffn=expert_ffn * int(getattr(config, "n_shared_experts", None) or 0),
            first_routed=int(getattr(config, "first_k_dense_replace", None) or 0),
        )

    def is_routed(self, layer: int) -> bool:
        """True if a layer, counted from 0, has experts."""
        return self.experts > 0 and layer >= self.first_routed

    def check(self, sizes: Mapping[str, int], layout: MegatronConfig) -> None:
        """Raise ConfigError if the model cannot be divided over axes of these sizes in this way."""
        tp, pp, stages = sizes["tp"], sizes["pp"], layout.virtual_stages
        parts = [
            ("attention heads", self.heads),
            ("key-value heads", self.groups),
            ("shared ffn dims", self.shared_ffn),
        ]
        for what, count in parts if self.is_routed(0) else [*parts, ("ffn dims", self.ffn)]:
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
            moe_ffn_hidden_size=self.expert_ffn if self.experts else None,
            moe_shared_expert_intermediate_size=self.shared_ffn or None,
            moe_router_topk=self.routing.chosen,
            moe_router_pre_softmax=True,  # of Megatron's own router, which refuses one expert without it
            moe_router_load_balancing_type="none",
            expert_model_parallel_size=layout.experts * sizes["tp"] if self.experts else 1,
            expert_tensor_parallel_size=1 if self.experts else None,
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


def _unknown(config: PretrainedConfig) -> list[str]:
    """Return the parts of a configuration that cannot be computed, with their values."""
    family = _FAMILIES[str(config.model_type)]
    kinds = {*(getattr(config, "layer_types", None) or ())} - {"full_attention", "sliding_attention"}
    greedy = {None, "greedy", "group_limited_greedy"}
    wrong = {
        "hidden_act": getattr(config, "hidden_act", "silu") != "silu",
        "attention_bias": bool(getattr(config, "attention_bias", False)) and family.qkv_bias is not None,
        "mlp_bias": bool(getattr(config, "mlp_bias", False)),
        "layer_types": bool(kinds) and not family.windows,
        "mlp_only_layers": bool(getattr(config, "mlp_only_layers", None)),
        "decoder_sparse_step": getattr(config, "decoder_sparse_step", 1) != 1,
        "router_jitter_noise": bool(getattr(config, "router_jitter_noise", 0.0)),
        "topk_method": family.router == "deepseek_v2" and getattr(config, "topk_method", None) not in greedy,
        "num_key_value_heads": family.latent and config.num_key_value_heads != config.num_attention_heads,
    }
    unknown = [f"{name} = {getattr(config, name)!r}" for name, is_wrong in wrong.items() if is_wrong]
    if (rope := _rope(config).get("rope_type", "default")) not in _ROPES:
        unknown.append(f"rope_type = {rope!r}")
    return unknown


def _rope(config: PretrainedConfig) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", getattr(config, "rope_parameters", None) or {})


def _windows(config: PretrainedConfig) -> Sequence[int | None]:
    """Return each layer's window."""
    window, count = getattr(config, "sliding_window", None), int(config.num_hidden_layers)
    if _FAMILIES[str(config.model_type)].windows:
        return (window,) * count
    kinds = getattr(config, "layer_types", None) or ("full_attention",) * count
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _latent(config: PretrainedConfig) -> Latent | None:
    if not _FAMILIES[str(config.model_type)].latent:
        return None
    return Latent(
        query_rank=config.q_lora_rank,
        rank=int(config.kv_lora_rank),
        still=int(config.qk_nope_head_dim),
        turned=int(config.qk_rope_head_dim),
        interleaved=bool(getattr(config, "rope_interleave", True)),
    )


def _stretched(config: PretrainedConfig) -> float:
    """Return what YaRN multiplies the scores of latent attention with (arXiv:2309.00071)."""
    rope = _rope(config)
    stretch = float(rope.get("factor", 1.0)) if rope.get("rope_type", "default") != "default" else 1.0
    return (1.0 + 0.1 * float(rope.get("mscale_all_dim") or 0.0) * log(max(stretch, 1.0))) ** 2


def _routing(config: PretrainedConfig) -> Routing:
    counts = (getattr(config, name, None) for name in ("num_local_experts", "num_experts"))
    if not (experts := next(filter(None, counts), 0)):
        return Routing()
    router = _FAMILIES[str(config.model_type)].router
    is_greedy = router == "deepseek_v2" and getattr(config, "topk_method", None) == "greedy"
    is_grouped = bool(getattr(config, "n_group", None)) and not is_greedy
    return Routing(
        experts=int(experts),
        chosen=int(config.num_experts_per_tok),
        scores="sigmoid" if router == "deepseek_v3" else "softmax",
        wide=router != "mixtral",
        normalised=router != "deepseek_v2" and bool(getattr(config, "norm_topk_prob", True)),
        factor=float(getattr(config, "routed_scaling_factor", 1.0)),
        groups=int(config.n_group) if is_grouped else 1,
        open=int(config.topk_group) if is_grouped else 1,
        best=2 if router == "deepseek_v3" else 1,
    )


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
    whole on its rank. ModelError for a parameter that no known decoder has.
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
            f"decoders of the types {', '.join(_FAMILIES)}"
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


def _feed_forward(prefix: str, size: Callable[[Decoder], int]) -> Mapping[str, _Make]:
    """The layers of a gated feed-forward network: gate and up, then down."""
    name = f"mlp.{prefix}"
    return {
        f"{name}linear_fc1.weight": _stacked((f"{name}gate_proj.weight", size), (f"{name}up_proj.weight", size)),
        f"{name}linear_fc2.weight": _part(f"{name}down_proj.weight", lambda shape: (shape.hidden, size(shape)), 1),
    }


def _narrow(name: str, size: Callable[[Decoder, Latent], tuple[int, ...]], dim: int | None = None) -> _Make:
    """A tensor of latent attention."""
    return _part(f"self_attn.{name}.weight", lambda shape: size(shape, cast("Latent", shape.latent)), dim)


_LATENT: Final[Mapping[str, _Make]] = {
    "self_attention.linear_q_proj.weight": _narrow(
        "q_proj", lambda shape, _: (shape.heads * shape.head_dim, shape.hidden), 0
    ),
    "self_attention.q_down": _narrow("q_a_proj", lambda shape, sizes: (sizes.query_rank or 0, shape.hidden)),
    "self_attention.q_down_norm.weight": _narrow("q_a_layernorm", lambda _, sizes: (sizes.query_rank or 0,)),
    "self_attention.linear_q_up_proj.weight": _narrow(
        "q_b_proj", lambda shape, sizes: (shape.heads * shape.head_dim, sizes.query_rank or 0), 0
    ),
    "self_attention.kv_down": _narrow(
        "kv_a_proj_with_mqa", lambda shape, sizes: (sizes.rank + sizes.turned, shape.hidden)
    ),
    "self_attention.kv_down_norm.weight": _narrow("kv_a_layernorm", lambda _, sizes: (sizes.rank,)),
    "self_attention.linear_kv_up_proj.weight": _narrow(
        "kv_b_proj", lambda shape, sizes: (shape.heads * (sizes.still + shape.value_dim), sizes.rank), 0
    ),
}
_OF_A_LAYER: Final[Mapping[str, _Make]] = {
    "input_layernorm.weight": _part("input_layernorm.weight", lambda shape: (shape.hidden,)),
    "self_attention.linear_qkv.weight": _qkv("weight"),
    "self_attention.linear_qkv.bias": _qkv("bias"),
    "self_attention.q_layernorm.weight": _part("self_attn.q_norm.weight", lambda shape: (shape.head_dim,)),
    "self_attention.k_layernorm.weight": _part("self_attn.k_norm.weight", lambda shape: (shape.head_dim,)),
    **_LATENT,
    "self_attention.linear_proj.weight": _part(
        "self_attn.o_proj.weight", lambda shape: (shape.hidden, shape.heads * shape.value_dim), 1
    ),
    "pre_mlp_layernorm.weight": _part("post_attention_layernorm.weight", lambda shape: (shape.hidden,)),
    **_feed_forward("", lambda shape: shape.ffn),
    **_feed_forward("shared_experts.", lambda shape: shape.shared_ffn),
    "mlp.router.weight": _part("mlp.gate.weight", lambda shape: (shape.experts, shape.hidden)),
    "mlp.router.expert_bias": _part("mlp.gate.e_score_correction_bias", lambda shape: (shape.experts,)),
}
_OF_AN_EXPERT: Final[Mapping[str, _Make]] = {
    "linear_fc1.weight": _expert("mlp.experts.gate_up_proj", lambda shape: (2 * shape.expert_ffn, shape.hidden)),
    "linear_fc2.weight": _expert("mlp.experts.down_proj", lambda shape: (shape.hidden, shape.expert_ffn)),
}
_OF_THE_ENDS: Final[Mapping[str, _Make]] = {
    "embedding.word_embeddings.weight": partial(_vocabulary, "model.embed_tokens.weight"),
    "decoder.final_layernorm.weight": _part("model.norm.weight", lambda shape: (shape.hidden,)),
    "output_layer.weight": _output,
    "value_head.weight": _part("value_head.weight", lambda shape: (1, shape.hidden)),
    "value_head.bias": _part("value_head.bias", lambda _: (1,)),
    "score.weight": _part("score.weight", lambda shape: (1, shape.hidden)),
}
