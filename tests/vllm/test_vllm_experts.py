"""Mixtures of experts in vLLM: a policy holds the experts of a layer as one tensor, and files and vLLM each alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MixtralConfig, PretrainedConfig, PreTrainedModel, Qwen2MoeConfig, Qwen3MoeConfig

from meshrl import PolicyConfig, Weights
from meshrl.errors import ModelError
from meshrl.mesh import Rank, rank_context
from meshrl_torch.policy import TorchPolicy
from meshrl_vllm.sampler import VllmSampler
from tests.senders import sending
from tests.vllm.networks import PROMPTS, SHAPE, TOKENIZER, config_of, drawn, saved

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 32}
HEADS: dict[str, Any] = {"head_dim": 32}
MODELS = [
    Qwen3MoeConfig(**SHAPE, **EXPERTS, **HEADS, tie_word_embeddings=True),
    Qwen2MoeConfig(**SHAPE, **EXPERTS, shared_expert_intermediate_size=64),
    MixtralConfig(**SHAPE, num_experts_per_tok=2, num_local_experts=4),
]


def greedy(made: PreTrainedModel) -> list[list[int]]:
    """What transformers generates."""
    tokens: list[list[int]] = []
    for text in PROMPTS.objects("prompt"):
        ids = torch.tensor([TOKENIZER.encode(str(text))])
        out = made.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)  # type: ignore[operator]
        tokens.append(out[0].tolist())
    return tokens


async def tokens_of(sampler: VllmSampler) -> list[list[int]]:
    return [row.tolist() for row in (await drawn(sampler)).tokens]


@pytest.mark.parametrize(
    "config",
    [MODELS[0], *(pytest.param(each, marks=pytest.mark.wide) for each in MODELS[1:])],
    ids=[each.model_type for each in MODELS],
)
async def test_experts_of_a_policy_are_taken(config: PretrainedConfig, tmp_path: Path, python: str | None) -> None:
    rank_context.set(Rank(threads=1))
    networks = [saved(config, seed, tmp_path / str(seed)) for seed in range(2)]
    expected = [greedy(network) for network in networks]
    assert expected[0] != expected[1]
    weights = [await TorchPolicy(PolicyConfig(model=str(tmp_path / str(seed)))).weights() for seed in range(2)]
    sampler = VllmSampler(config_of(tmp_path / "0", python))
    assert await tokens_of(sampler) == expected[0]
    for version in (1, 2, 3):
        await sampler.load(weights[version % 2].with_version(version))
        assert await tokens_of(sampler) == expected[version % 2]
    with sending(2, 1 << 14) as senders:
        for version in (4, 5):
            given = weights[version % 2]
            tensors = {name: torch.from_numpy(array.copy()) for name, array in given.tensors.items()}
            await sampler.load(senders.offer(tensors, version, given.probe))
            assert await tokens_of(sampler) == expected[version % 2]
    lacking = dict(weights[0].tensors)
    lacking.pop("model.layers.1.mlp.experts.down_proj")
    with pytest.raises(ModelError, match=r"`model.layers.1.mlp.experts.down_proj` is missing there"):
        await sampler.load(Weights(6, lacking))
    assert await tokens_of(sampler) == expected[1]
    sampler.close()
