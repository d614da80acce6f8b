"""Families of models on the backend `megatron`: on one rank and on several they are what transformers computes."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Glm4MoeConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
)

import meshrl as rl
from meshrl_megatron.roles import MegatronPolicy
from meshrl_torch.train.one_rank import TorchPolicy
from tests.backends import material
from tests.backends.material import RANKS, ModelOf, by_row, near

pytestmark = [*RANKS, pytest.mark.megatron]

SIZES: Mapping[str, Any] = {
    **material.SHAPE, "num_hidden_layers": 4, "tie_word_embeddings": False, "initializer_range": 0.15,
}  # fmt: skip
EXPERTS: Mapping[str, Any] = {
    **SIZES, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5,
}  # fmt: skip
LATENT: Mapping[str, Any] = {
    **EXPERTS, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6,
}  # fmt: skip
PUBLISHED: dict[str, Any] = {**LATENT, "topk_method": "noaux_tc"}
GLM: Mapping[str, Any] = {**EXPERTS, "head_dim": 8}
YARN: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 12, "mscale": 1.0,
    "mscale_all_dim": 0.7,
}  # fmt: skip
SPLIT: Mapping[str, int] = {"dp": 1, "pp": 2, "tp": 2}
FAMILIES: Mapping[str, tuple[PretrainedConfig, Mapping[str, int], int]] = {
    "qwen2, windows": (Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=4, max_window_layers=2), SPLIT, 1),
    "mistral": (MistralConfig(**SIZES, sliding_window=4), {"dp": 1, "cp": 2, "tp": 2}, 1),
    "mixtral": (MixtralConfig(**SIZES, num_local_experts=4), {"dp": 2, "tp": 2}, 2),
    "deepseek_v2": (
        DeepseekV2Config(**LATENT, q_lora_rank=None, topk_method="group_limited_greedy"),
        {"dp": 2, "cp": 2}, 2,
    ),
    "deepseek_v2, greedy": (DeepseekV2Config(**LATENT, q_lora_rank=None, topk_method="greedy"), SPLIT, 1),
    "deepseek_v3": (DeepseekV3Config(**LATENT, q_lora_rank=12, rope_parameters=YARN), SPLIT, 1),
    "deepseek_v3, halves": (DeepseekV3Config(**PUBLISHED, q_lora_rank=12, rope_interleave=False), SPLIT, 1),
    "glm4_moe": (
        Glm4MoeConfig(**GLM, use_qk_norm=True, attention_bias=True), SPLIT, 1,
    ),
}  # fmt: skip
"""A model, and four ranks that it is divided over, as many neighbours along dp sharing its experts."""
FEW: Sequence[str] = ["deepseek_v3"]


def rollouts(seed: int) -> rl.Batch:
    return material.rollouts(rows=9, seed=seed)


def written(folder: str) -> str:
    """The same folder, in which routers choose by more than their scores."""
    file = Path(folder, "model.safetensors")
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith("e_score_correction_bias")]:
        tensors[name] = torch.linspace(-0.3, 0.3, len(tensors[name]))
    save_file(tensors, file, {"format": "pt"})
    return folder


async def check(policy: rl.Policy, folder: str, batch: rl.Batch) -> None:
    """Its log-probs are those of a folder, by transformers."""
    network = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        expected = torch.cat(by_row(network, batch)).numpy()
    found = material.floats((await (await policy.logprobs(batch)).load()).ragged("logprobs").values)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


async def keep(policy: rl.Policy, plain: rl.Policy, folder: str, saved: Path) -> None:
    await check(policy, folder, rollouts(1))
    told = [(await each.update(rollouts(2), rl.ClippedLoss())).means() for each in (policy, plain)]
    assert told[0] == pytest.approx(told[1], rel=1e-5, abs=1e-5)
    near(await (await policy.weights()).load(), await (await plain.weights()).load(), 1e-5)
    await policy.save(str(saved))
    await check(policy, str(saved), rollouts(3))


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.wide] * (kind in (*FEW, "deepseek_v2, greedy"))) for kind in FAMILIES],
)
async def test_one_rank(model_of: ModelOf, tmp_path: Path, kind: str) -> None:
    folder = written(model_of(FAMILIES[kind][0], noise=0.02))
    config = rl.PolicyConfig.model_validate({"model": folder, "optimizer": material.SGD, "micro_batch_tokens": 32})
    policy, again, plain = MegatronPolicy(config), MegatronPolicy(config), TorchPolicy(config)
    await keep(policy, plain, folder, tmp_path / "saved")
    await policy.checkpoint(str(tmp_path / "state"))
    await again.restore(str(tmp_path / "state"))
    near(await (await again.weights()).load(), await (await policy.weights()).load(), 0)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.wide] * (kind not in FEW)) for kind in FAMILIES]
)
async def test_four_ranks(
    warm: Callable[[int], Awaitable[rl.Mesh]], model_of: ModelOf, tmp_path: Path, kind: str
) -> None:
    shape, axes, experts = FAMILIES[kind]
    folder = written(model_of(shape, noise=0.02))
    table = {"model": folder, "optimizer": material.SGD, "micro_batch_tokens": 32}
    options = {"megatron": {"experts": experts}} if experts > 1 else {}
    config = rl.PolicyConfig.model_validate({**table, **options})
    policy = await (await warm(4)).shape(**axes).spawn(MegatronPolicy, config)
    await keep(policy, TorchPolicy(rl.PolicyConfig.model_validate(table)), folder, tmp_path / "saved")
    await rl.stop(policy)
