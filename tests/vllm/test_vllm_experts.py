"""Mixtures of experts in vLLM: a policy holds the experts of a layer as one tensor, and files and vLLM each alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from meshrl import Batch, PolicyConfig, SamplerConfig, Sampling, Weights, rollout, with_options
from meshrl.errors import ModelError
from meshrl.mesh import Rank, rank_context
from meshrl_hf.text import character_tokenizer
from meshrl_torch.policy import TorchPolicy
from meshrl_vllm.options import VllmConfig
from meshrl_vllm.sampler import VllmSampler
from tests.senders import sending

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]

SHAPE: dict[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "moe_intermediate_size": 32}
HEADS: dict[str, Any] = {"head_dim": 32}
MODELS = [
    Qwen3MoeConfig(**SHAPE, **EXPERTS, **HEADS, tie_word_embeddings=True),
    Qwen2MoeConfig(**SHAPE, **EXPERTS, shared_expert_intermediate_size=64),
    MixtralConfig(**SHAPE, num_local_experts=4),
]
PROMPTS = Batch.of(prompt=["abc>", "hgfe>", "abc>", "d>"])
TOKENIZER = character_tokenizer("abcdefgh>", 256)


def saved(config: PretrainedConfig, seed: int, folder: Path) -> PreTrainedModel:
    """A network far from its initialisation, and in a folder."""
    torch.manual_seed(seed)
    made: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    made.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return made


def greedy(made: PreTrainedModel) -> list[list[int]]:
    """What transformers generates."""
    tokens: list[list[int]] = []
    for text in PROMPTS.objects("prompt"):
        ids = torch.tensor([TOKENIZER.encode(str(text))])
        out = made.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)  # type: ignore[operator]
        tokens.append(out[0].tolist())
    return tokens


async def drawn(sampler: VllmSampler) -> list[list[int]]:
    batch = await rollout(sampler, PROMPTS, Sampling(max_tokens=20, temperature=0, ignore_eos=True))
    return [np.asarray(row).tolist() for row in batch.tokens]


@pytest.mark.parametrize("config", MODELS, ids=lambda config: config.model_type)
async def test_experts_of_a_policy_are_taken(config: PretrainedConfig, tmp_path: Path, python: str | None) -> None:
    rank_context.set(Rank(threads=1))
    networks = [saved(config, seed, tmp_path / str(seed)) for seed in range(2)]
    expected = [greedy(network) for network in networks]
    assert expected[0] != expected[1]
    weights = [await TorchPolicy(PolicyConfig(model=str(tmp_path / str(seed)))).weights() for seed in range(2)]
    options = VllmConfig(python=python, kv_cache_mib=32)
    sampler = VllmSampler(with_options(SamplerConfig(backend="vllm", model=str(tmp_path / "0"), slots=16), options))
    assert await drawn(sampler) == expected[0]
    for version in (1, 2, 3):
        await sampler.load(weights[version % 2].with_version(version))
        assert await drawn(sampler) == expected[version % 2]
    with sending(2, 1 << 14) as senders:
        for version in (4, 5):
            given = weights[version % 2]
            tensors = {name: torch.from_numpy(array.copy()) for name, array in given.tensors.items()}
            await sampler.load(senders.offer(tensors, version, given.probe))
            assert await drawn(sampler) == expected[version % 2]
    lacking = dict(weights[0].tensors)
    lacking.pop("model.layers.1.mlp.experts.down_proj")
    with pytest.raises(ModelError, match=r"`model.layers.1.mlp.experts.down_proj` is missing there"):
        await sampler.load(Weights(6, lacking))
    assert await drawn(sampler) == expected[1]
    sampler.close()
