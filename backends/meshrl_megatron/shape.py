"""What a Hugging Face configuration says of a decoder, as Megatron takes it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, cast

import torch
from torch.nn import functional
from transformers import PretrainedConfig

from meshrl.errors import ConfigError, ModelError
from meshrl_megatron.core import TransformerConfig
from meshrl_megatron.naming import Shape

_KNOWN: Final[Mapping[str, tuple[bool, bool]]] = {
    "llama": (False, False),
    "qwen2": (True, False),
    "qwen3": (False, True),
}
"""By `model_type`: whether queries, keys and values have a bias, and whether queries and keys are normalised."""
_ROPES: Final = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose frequencies do not hang on the longest row of a pass."""


@dataclass(frozen=True)
class Decoder(Shape):
    """A decoder of the Llama kind."""

    layers: int
    qkv_bias: bool
    qk_norm: bool
    eps: float

    @classmethod
    def of(cls, config: PretrainedConfig, valued: bool) -> "Decoder":
        """What a model's configuration says. `valued`: it has a value head in place of its own.

        ModelError for an architecture that this backend does not know.
        """
        kind = str(config.model_type)
        if kind not in _KNOWN:
            raise ModelError(
                f"the backend 'megatron' knows models of the types {', '.join(_KNOWN)}, and this one is {kind!r}: take "
                'backend = "torch" or "fsdp"'
            )
        bias, norm = _KNOWN[kind]
        wrong = {
            "hidden_act": getattr(config, "hidden_act", "silu") != "silu",
            "attention_bias": bool(getattr(config, "attention_bias", False)),
            "mlp_bias": bool(getattr(config, "mlp_bias", False)),
            "layer_types": any(each != "full_attention" for each in getattr(config, "layer_types", None) or ()),
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
            ffn=int(config.intermediate_size),
            vocabulary=int(config.vocab_size),
            tied=bool(config.tie_word_embeddings) and not valued,
            qkv_bias=bias,
            qk_norm=norm,
            eps=float(config.rms_norm_eps),
        )

    def check(self, sizes: Mapping[str, int], stages: int) -> None:
        """ConfigError where the model cannot be divided over axes of these sizes, with so many stages a rank."""
        tp, pp = sizes["tp"], sizes["pp"]
        for what, count in (("attention heads", self.heads), ("key-value heads", self.groups), ("ffn dims", self.ffn)):
            if count % tp:
                raise ConfigError(f"the model has {count} {what}, which the mesh's tp = {tp} does not divide")
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
        *,
        virtual_stages: int,
        sequence_parallel: bool,
        recompute: bool,
    ) -> TransformerConfig:
        """What Megatron is told."""
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
            tensor_model_parallel_size=sizes["tp"],
            pipeline_model_parallel_size=sizes["pp"],
            virtual_pipeline_model_parallel_size=virtual_stages if virtual_stages > 1 else None,
            sequence_parallel=sequence_parallel and sizes["tp"] > 1,
            variable_seq_lengths=True,
            # Of two ranks each is the other's next and its last: their messages are told apart one by one alone.
            overlap_p2p_comm=virtual_stages > 1,
            batch_p2p_comm=virtual_stages == 1,
            moe_token_dispatcher_type="alltoall",
            calculate_per_token_loss=True,
            cuda_graph_scope=[],
            recompute_granularity="full" if recompute else None,
            recompute_method="uniform" if recompute else None,
            recompute_num_layers=1 if recompute else None,
        )
