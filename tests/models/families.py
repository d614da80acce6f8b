"""Tiny models with random weights, one of each `model_type` that transformers has for causal language models."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from meshrl_torch.model.text import character_tokenizer

TOKENS: Final = 64
TOKENIZER: Final = character_tokenizer("abcdefghijklmnopqrstuvwxyz", TOKENS)

_MOST: Final = 20_000_000
"""Most parameters of a tiny model."""
_BASE: Final[Mapping[str, Any]] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": TOKENS, "eos_token_id": 1, "pad_token_id": 0,
    "bos_token_id": 1, "tie_word_embeddings": False, "dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip
_EXPERTS: Final[Mapping[str, Any]] = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "topk_group": 1,
    "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "n_shared_experts": 1, "n_group": 1,
    "first_k_dense_replace": 1, "moe_num_experts": 4, "moe_k": 2,
}  # fmt: skip
_LATENT: Final[Mapping[str, Any]] = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4, "index_topk": 8, "index_n_heads": 16, "index_head_dim": 16,
}  # fmt: skip
_DELTA: Final[Mapping[str, Any]] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 2, "linear_head_dim": 8, "linear_num_heads": 4,
}  # fmt: skip
_STATE: Final[Mapping[str, Any]] = {
    "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1, "mamba_n_heads": 4,
    "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2, "state_size": 8,
    "num_heads": 4, "mamba_d_ssm": 64, "chunk_size": 8, "mamba_chunk_size": 8,
}  # fmt: skip
_VISION: Final[Mapping[str, Any]] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "depth": 1, "num_attention_heads": 4,
    "num_heads": 4, "head_dim": 8, "out_hidden_size": 32, "image_size": 28, "patch_size": 14, "vision_output_dim": 32,
}  # fmt: skip
"""What models of images have beside that of text."""
_MIXED: Final = ["linear_attention", "full_attention"] * 2
_OWN: Final[Mapping[str, Mapping[str, Any]]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "codegen": {"rotary_dim": 4},
    "deepseek_v2": {"head_dim": None},
    "falcon": {"head_dim": None},
    "gemma2": {"attn_logit_softcapping": 0.5},
    "gemma4_text": {"vocab_size_per_layer_input": 64},
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": _MIXED},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "llama4_text": {"attention_chunk_size": 4},
    "longcat_flash": {"head_dim": 8},
    "mamba": {"num_heads": None, "intermediate_size": 64},
    "mamba2": {"head_dim": 16},
    "minicpm3": {**_LATENT},
    "zamba2": {"num_hidden_layers": 54, "head_dim": None},
}
"""What a type needs beside the common sizes. None: its default."""


def types() -> list[str]:
    """Every `model_type` of a causal language model that is a text model by itself."""
    return sorted(name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name in CONFIG_MAPPING)


def config_of(model_type: str) -> PretrainedConfig:
    """Make a small configuration. It raises whatever transformers raises for sizes that it does not accept."""
    kind = CONFIG_MAPPING[model_type]
    if "text_config" in getattr(kind, "sub_configs", {}):
        text = config_of(kind().text_config.model_type)
        parts: dict[str, Any] = {"text_config": text.to_dict(), "vision_config": dict(_VISION), "audio_config": None}
        return kind(**parts)
    sizes = {**_BASE, **_EXPERTS}
    if model_type.startswith(("deepseek", "glm_moe_dsa", "glm4_moe_lite", "longcat", "kimi")):
        sizes |= {**_LATENT, "head_dim": None}
    if model_type.startswith(("qwen3_next", "qwen3_5", "kimi_linear", "olmo_hybrid")):
        sizes |= _DELTA
    if model_type in {"nemotron_h", "granitemoehybrid", "falcon_h1", "bamba", "zamba2", "mamba2", "jamba", "mamba"}:
        sizes |= _STATE
    if isinstance(getattr(kind(), "sliding_window", None), int):
        sizes["sliding_window"] = 4  # shorter than rows
    sizes |= _OWN.get(model_type, {})
    return kind(**{key: value for key, value in sizes.items() if value is not None})


def tiny(model_type: str) -> PreTrainedModel:
    """Make a model. It raises whatever transformers raises for sizes that it does not accept."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = config_of(model_type)
        with torch.device("meta"):
            count = sum(each.numel() for each in AutoModelForCausalLM.from_config(config).parameters())
        if count > _MOST:
            raise ValueError(f"{count} parameters: its sizes have other names")
        network = cast("PreTrainedModel", AutoModelForCausalLM.from_config(config))
    if network.config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ValueError(f"transformers saves it as {network.config.model_type} and cannot load that")
    # Larger values than a new model's, so that windows, caps and sinks make a difference.
    for parameter in network.parameters():
        if parameter.dim() > 1:
            parameter.data *= 2
    return network


def folder_of(model_type: str, folder: Path) -> str:
    """Write a model with a tokenizer, and return its folder."""
    tiny(model_type).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return str(folder)
