"""The shape of a decoder, from its Hugging Face configuration, for Megatron."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, cast

import torch
from torch.nn import functional
from transformers import PretrainedConfig

from meshrl.errors import ConfigError, ModelError
from meshrl_megatron.core import TransformerConfig
from meshrl_megatron.naming import Shape
from meshrl_megatron.options import MegatronConfig

_KNOWN: Final[Mapping[str, tuple[bool, bool]]] = {
    "llama": (False, False),
    "qwen2": (True, False),
    "qwen3": (False, True),
    "qwen3_moe": (False, True),
}
"""By `model_type`: whether queries, keys and values have a bias, and whether queries and keys are normalised."""
_ROPES: Final = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose frequencies do not depend on the longest row of a pass."""


@dataclass(frozen=True)
class Decoder(Shape):
    """A decoder of the Llama kind."""

    layers: int
    qkv_bias: bool
    qk_norm: bool
    eps: float
    chosen: int = field(default=0, kw_only=True)
    """Experts of each token. 0 in a model without experts."""
    weighs_all: bool = field(default=False, kw_only=True)
    """True if the weights of chosen experts are shares among all experts. False if they are normalised to sum to 1."""

    @classmethod
    def of(cls, config: PretrainedConfig, valued: bool) -> "Decoder":
        """Read a model's configuration. `valued`: a head of one number replaces its own.

        ModelError for an unknown architecture.
        """
        kind = str(config.model_type)
        if kind not in _KNOWN:
            raise ModelError(
                f"the backend 'megatron' supports models of the types {', '.join(_KNOWN)}, but this one is {kind!r}: "
                "take "
                'backend = "torch" or "fsdp"'
            )
        bias, norm = _KNOWN[kind]
        wrong = {
            "hidden_act": getattr(config, "hidden_act", "silu") != "silu",
            "attention_bias": bool(getattr(config, "attention_bias", False)),
            "mlp_bias": bool(getattr(config, "mlp_bias", False)),
            "layer_types": any(each != "full_attention" for each in getattr(config, "layer_types", None) or ()),
            **(_strange_experts(config) if kind == "qwen3_moe" else {}),
        }
        told = [f"{name} = {getattr(config, name)!r}" for name, is_wrong in wrong.items() if is_wrong]
        rope = cast("Mapping[str, object]", getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
        if rope not in _ROPES:
            told.append(f"rope_type = {rope!r}")
        if told:
            raise ModelError(
                f"the backend 'megatron' cannot compute this {kind} model, which has {', '.join(told)}: take "
                'backend = "torch" or "fsdp"'
            )
        heads, hidden = int(config.num_attention_heads), int(config.hidden_size)
        return cls(
            layers=int(config.num_hidden_layers),
            hidden=hidden,
            heads=heads,
            groups=int(config.num_key_value_heads),
            head_dim=int(getattr(config, "head_dim", None) or hidden // heads),
            ffn=int(config.moe_intermediate_size if kind == "qwen3_moe" else config.intermediate_size),
            vocabulary=int(config.vocab_size),
            tied=bool(config.tie_word_embeddings) and not valued,
            qkv_bias=bias,
            qk_norm=norm,
            eps=float(config.rms_norm_eps),
            experts=int(config.num_experts) if kind == "qwen3_moe" else 0,
            chosen=int(config.num_experts_per_tok) if kind == "qwen3_moe" else 0,
            weighs_all=kind == "qwen3_moe" and not config.norm_topk_prob,
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
        self,
        sizes: Mapping[str, int],
        dtype: torch.dtype,
        layout: MegatronConfig,
        *,
        recompute: bool,
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


def _strange_experts(config: PretrainedConfig) -> dict[str, bool]:
    """Return the parts of a mixture's configuration that cannot be computed."""
    return {
        "mlp_only_layers": bool(config.mlp_only_layers),
        "decoder_sparse_step": config.decoder_sparse_step != 1,
        "sliding_window": config.sliding_window is not None,
        "num_experts_per_tok": config.norm_topk_prob and config.num_experts_per_tok == 1,
    }
