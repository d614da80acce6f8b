"""The floating-point operations of a decoder's forward pass, and the bytes of its cache, from its configuration."""

from typing import cast

import torch
from transformers import PretrainedConfig

from meshrl.roles import Flops, ModelConfig, PolicyConfig, ReferenceConfig
from meshrl_torch.model.loading import config_of


def flops_of(config: ModelConfig) -> Flops:
    """Count the operations of a role's model for a token and for a pair of tokens.

    Reads only config.json of a folder. ModelError if that fails. Feed-forward layers count as gated ones, and the
    routers of experts are left out.
    """
    shape = config_of(config).get_text_config()
    hidden, heads = int(shape.hidden_size), int(shape.num_attention_heads)
    groups = int(getattr(shape, "num_key_value_heads", None) or heads)
    dims = int(getattr(shape, "head_dim", None) or hidden // heads)
    token, pair = layer_flops(hidden, heads, groups, dims, _ffn(shape))
    layers, kinds = int(shape.num_hidden_layers), cast("list[str] | None", getattr(shape, "layer_types", None))
    every = layers if getattr(shape, "sliding_window", None) else 0
    near = every if kinds is None else kinds.count("sliding_attention")  # layers with a sliding window
    head = 2 * hidden * int(shape.vocab_size) if isinstance(config, PolicyConfig | ReferenceConfig) else 0
    window = int(getattr(shape, "sliding_window", None) or 0) if near else 0
    return Flops(layers * token + head, (layers - near) * pair, near * pair, window)


def layer_flops(hidden: int, heads: int, groups: int, head_dim: int, ffn: int) -> tuple[float, float]:
    """Count the operations of a layer for each token, in matrices, and for each pair of tokens, in attention.

    `groups`: key-value heads. `ffn`: the inner size of the gated feed-forward layers that a token passes.
    """
    inner = heads * head_dim
    matrices = hidden * (2 * inner + 2 * groups * head_dim + 3 * ffn)
    return 2.0 * matrices, 4.0 * inner


def _ffn(shape: PretrainedConfig) -> int:
    """Return the inner size of all feed-forward layers that a token passes in one layer of the model."""
    chosen = int(getattr(shape, "num_experts_per_tok", None) or 0)
    if not chosen:
        return int(getattr(shape, "intermediate_size", None) or 4 * shape.hidden_size)
    expert = int(getattr(shape, "moe_intermediate_size", None) or shape.intermediate_size)
    shared = int(getattr(shape, "shared_expert_intermediate_size", None) or 0)
    return (chosen + int(getattr(shape, "n_shared_experts", None) or 0)) * expert + shared


def cache_per_token(shape: PretrainedConfig, dtype: str, tp: int = 1) -> int:
    """Bytes of a token's keys and values in all layers, on one rank along tp. `shape`: the text model's."""
    heads = int(getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads)
    dims = int(getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads)
    itemsize = cast("torch.dtype", getattr(torch, dtype)).itemsize
    return 2 * int(shape.num_hidden_layers) * max(1, heads // tp) * dims * itemsize
