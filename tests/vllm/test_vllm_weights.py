"""The weights of policies in vLLM: those that Megatron-Core divides over ranks and stages, and mixtures of experts.

A policy holds the experts of a layer as one tensor, and files and vLLM each alone.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import MixtralConfig, PretrainedConfig, Qwen2MoeConfig, Qwen3MoeConfig

from meshrl import Mesh, NewModel, PolicyConfig, ReferenceConfig, Resources, Sampling, Weights, rollout
from meshrl.engines.processes import ProcessEngine
from meshrl.errors import ModelError
from meshrl.mesh import Rank, rank_context
from meshrl.testing.conformance.material import LOSS, by_hand
from meshrl.testing.conformance.material import ModelFolders as Material
from meshrl_megatron.roles import MegatronPolicy
from meshrl_torch.train.one_rank import TorchPolicy, TorchReference
from meshrl_vllm.sampler import VllmSampler
from tests.inference.networks import PROMPTS, SHAPE, completions, config_of, greedy, offer, two
from tests.senders import sending

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

NEW = NewModel(characters="abcdefgh>", hidden_size=64, ffn_size=96, layers=2, heads=2, max_tokens=256)


@pytest.mark.parametrize(
    "axes", [{"dp": 1, "tp": 2}, pytest.param({"dp": 1, "pp": 2}, marks=pytest.mark.wide)], ids=str
)
async def test_vllm_draws_from_weights_of_any_layout(tmp_path: Path, python: str | None, axes: dict[str, int]) -> None:
    await TorchPolicy(PolicyConfig(model=NEW)).save(str(tmp_path / "old"))
    engine = ProcessEngine()
    mesh = await Mesh.reserve(engine, 2, Resources(cpus=0))
    options = {"model": str(tmp_path / "old"), "optimizer": {"lr": 0.02, "max_grad_norm": None}}
    policy = await mesh.shape(**axes).spawn(MegatronPolicy, PolicyConfig.model_validate(options))
    beside = await Mesh.reserve(engine, 1, Resources(cpus=0))
    sampler = await beside.spawn(VllmSampler, config_of(tmp_path / "old", python))

    batch = await policy.logprobs(by_hand(Material("", "", 11, 40), [(12, 9), (20, 15), (7, 4), (16, 8)]))
    await policy.update(batch, LOSS)
    weights = await policy.weights()
    placed = await sampler.load(weights)
    assert float(placed.row("difference").max()) < 1e-4, "the policy and the engine say the same of the same tokens"
    drawn = await rollout(sampler, PROMPTS, Sampling(max_tokens=20, ignore_eos=True, seed=1))

    await policy.save(str(tmp_path / "new"))
    judge = TorchReference(ReferenceConfig(model=str(tmp_path / "new")))
    learned = np.asarray(drawn.loss_mask.values, np.bool_)
    said = (await judge.logprobs(drawn)).ragged("reference_logprobs").values[learned]
    assert drawn.ragged("sampler_logprobs").values[learned] == pytest.approx(said, abs=1e-4)
    fresh = TorchPolicy(PolicyConfig(model=str(tmp_path / "new")))
    assert (await fresh.weights()).fingerprint() == (await weights.load()).fingerprint()
    await engine.close()


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
async def test_experts_of_a_policy_are_taken(config: PretrainedConfig, tmp_path: Path, python: str | None) -> None:
    rank_context.set(Rank(threads=1))
    networks, weights = await two(config, tmp_path)
    expected = [greedy(network) for network in networks]
    assert expected[0] != expected[1]
    sampler = VllmSampler(config_of(tmp_path / "0", python))
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
