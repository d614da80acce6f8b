"""Small models most of whose layers are recurrent, for the part `hybrid` of bench/train.py."""

from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, NemotronHConfig, PretrainedConfig, Qwen3_5TextConfig

from meshrl_torch.model.text import character_tokenizer

MODELS: Final = ("gated delta", "mamba 2")


def write_model(name: str, characters: str, longest: int, folder: str) -> None:
    """Write a model of hidden size 128 with random weights, and a tokenizer of these characters."""
    tokenizer = character_tokenizer(characters, longest)
    shape: dict[str, Any] = {
        "vocab_size": tokenizer.vocab_size, "hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4,
        "num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": longest,
        "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "tie_word_embeddings": False,
    }  # fmt: skip
    config: PretrainedConfig = Qwen3_5TextConfig(
        **shape, layer_types=["linear_attention"] * 3 + ["full_attention"], num_hidden_layers=4,
        linear_num_key_heads=4, linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=32,
    )  # fmt: skip
    if name == "mamba 2":
        shape |= {"hybrid_override_pattern": "M-M-M-*-", "num_hidden_layers": 8, "ssm_state_size": 32, "n_groups": 1}
        config = NemotronHConfig(**shape, mamba_num_heads=4, mamba_head_dim=64)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
