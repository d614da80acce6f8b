"""The weights of a policy that Megatron-Core trains, in vLLM: gathered over tensor-parallel ranks and stages."""

from pathlib import Path

import numpy as np
import pytest

from meshrl import Mesh, NewModel, PolicyConfig, ReferenceConfig, Resources, Sampling, rollout
from meshrl.engines.processes import ProcessEngine
from meshrl.testing.conformance.material import LOSS, by_hand
from meshrl.testing.conformance.material import Model as Material
from meshrl_megatron.roles import MegatronPolicy
from meshrl_torch.train.one_rank import TorchPolicy, TorchReference
from meshrl_vllm.sampler import VllmSampler
from tests.inference.networks import PROMPTS, config_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

NEW = NewModel(characters="abcdefgh>", hidden_size=64, ffn_size=96, layers=2, heads=2, max_tokens=256)


@pytest.mark.parametrize(
    "axes", [{"dp": 1, "tp": 2}, pytest.param({"dp": 1, "pp": 2}, marks=pytest.mark.wide)], ids=str
)
async def test_vllm_draws_from_the_weights_of_a_policy_in_any_layout(
    tmp_path: Path, python: str | None, axes: dict[str, int]
) -> None:
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
