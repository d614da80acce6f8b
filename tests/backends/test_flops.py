"""The floating-point operations that a model's configuration tells are those of its forward pass."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from meshrl.roles import CriticConfig, PolicyConfig, RewardModelConfig
from meshrl_hf.flops import flops_of

SIZES: dict[str, Any] = {"vocab_size": 53, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
DENSE: dict[str, Any] = {**SIZES, "intermediate_size": 96, "num_hidden_layers": 3}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
MIXED: dict[str, Any] = {**SIZES, **EXPERTS, "num_hidden_layers": 2}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
SHAPES = [
    transformers.LlamaConfig(**DENSE),
    transformers.Qwen3MoeConfig(**{**MIXED, "head_dim": 24}),
    transformers.Qwen2MoeConfig(**MIXED, shared_expert_intermediate_size=56),
    transformers.Gemma3TextConfig(**DENSE, head_dim=16, sliding_window=7, layer_types=KINDS),
    transformers.MistralConfig(**DENSE, sliding_window=7),  # all its layers have the window
]
ROUTER = 2 * 64 * 4 * 2
"""Operations of the routers of a mixture for a token, which are left out because they are few."""


def counted(shape: transformers.PretrainedConfig, length: int) -> int:
    """Operations of a pass over one row, with attention from each token to all of the row."""
    model = transformers.AutoModelForCausalLM.from_config(
        shape, attn_implementation="eager", experts_implementation="eager"
    )
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.zeros(1, length, dtype=torch.int64), use_cache=False)
    return int(counter.get_total_flops())


def test_they_are_those_of_a_pass(tmp_path: Path) -> None:
    more = {"qwen3_moe": ROUTER, "qwen2_moe": ROUTER + 2 * 64 * 2}
    near = {"mistral": 1.0, "gemma3_text": KINDS.count("sliding_attention") / len(KINDS)}
    for shape in SHAPES:
        shape.save_pretrained(tmp_path)
        flops = flops_of(PolicyConfig(model=str(tmp_path)))
        short, long = counted(shape, 20), counted(shape, 40)
        assert (flops.per_pair + flops.per_near_pair) * 20**2 == (long - 2 * short) / 2, shape.model_type
        alone = (4 * short - long) / 40
        told = flops.per_token + more.get(shape.model_type, 0)
        assert told == pytest.approx(alone, rel=1e-3)  # the angles of positions too
        share = near.get(shape.model_type, 0.0)
        assert flops.per_near_pair == pytest.approx(share * (flops.per_pair + flops.per_near_pair))
        assert flops.window == (7 if share else 0)
        without_head = flops.per_token - 2 * 64 * 53
        for config in (CriticConfig(model=str(tmp_path)), RewardModelConfig(model=str(tmp_path))):
            assert flops_of(config).per_token == without_head
