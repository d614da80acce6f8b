"""Weights of mixtures in vLLM: a policy has the experts of a layer as one tensor, and files and vLLM each alone."""

from pathlib import Path
from typing import Any

import pytest
from transformers import MixtralConfig, PretrainedConfig, Qwen2MoeConfig, Qwen3MoeConfig

from meshrl import Weights
from meshrl.errors import ModelError
from meshrl.mesh import Rank, rank_context
from meshrl_vllm.sampler import VllmSampler
from tests.inference.conftest import Backend
from tests.inference.networks import SHAPE, completions, greedy, offer, two
from tests.senders import sending

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 32}
HEADS: dict[str, Any] = {"head_dim": 32}
MODELS = [
    Qwen3MoeConfig(**SHAPE, **EXPERTS, **HEADS, tie_word_embeddings=True),
    Qwen2MoeConfig(**SHAPE, **EXPERTS, shared_expert_intermediate_size=64),
    MixtralConfig(**SHAPE, num_experts_per_tok=2, num_local_experts=4),
]


@pytest.mark.parametrize(
    "config",
    [MODELS[0], *(pytest.param(each, marks=pytest.mark.wide) for each in MODELS[1:])],
    ids=[each.model_type for each in MODELS],
)
async def test_experts_of_a_policy_are_taken(config: PretrainedConfig, tmp_path: Path) -> None:
    rank_context.set(Rank(threads=1))
    networks, weights = await two(config, tmp_path)
    expected = [greedy(network) for network in networks]
    assert expected[0] != expected[1]
    sampler = VllmSampler(Backend("vllm").config(model=str(tmp_path / "0"), slots=16))
    assert await completions(sampler) == expected[0]
    for version in (1, 2, 3):
        await sampler.load(weights[version % 2].with_version(version))
        assert await completions(sampler) == expected[version % 2]
    with sending(2, 1 << 14) as senders:
        for version in (4, 5):
            await sampler.load(offer(senders, weights[version % 2], version))
            assert await completions(sampler) == expected[version % 2]
    lacking = dict(weights[0].tensors)
    lacking.pop("model.layers.1.mlp.experts.down_proj")
    with pytest.raises(ModelError, match=r"`model.layers.1.mlp.experts.down_proj` is missing there"):
        await sampler.load(Weights(6, lacking))
    assert await completions(sampler) == expected[1]
    sampler.close()
