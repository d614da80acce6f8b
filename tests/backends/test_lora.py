"""Adapters: they alone are trained, and what is given on is the model with them."""

from pathlib import Path

import numpy as np
import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM

from meshrl import Batch, ClippedLoss, LoraConfig, PolicyConfig, SamplerConfig, Sampling, rollout
from meshrl.config import validate
from meshrl.errors import ConfigError, ModelError
from meshrl.run import AlgorithmConfig
from meshrl_fsdp.policy import FsdpPolicy
from meshrl_torch.policy import TorchPolicy
from meshrl_torch.sampler import TorchSampler
from tests.backends.material import floats, rollouts

LORA = LoraConfig(rank=4, alpha=8)
Backend = type[TorchPolicy | FsdpPolicy]
EACH = pytest.mark.parametrize("backend", [TorchPolicy, FsdpPolicy])


def config(model: str, lora: LoraConfig | None = LORA) -> PolicyConfig:
    return PolicyConfig.model_validate({"model": model, "lora": lora, "optimizer": {"lr": 1e-2}})


async def trained(backend: Backend, small: str, lora: LoraConfig = LORA) -> TorchPolicy | FsdpPolicy:
    made = backend(config(small, lora))
    for _ in range(3):
        await made.update(rollouts(), ClippedLoss())
    return made


@EACH
async def test_new_adapters_change_nothing(backend: Backend, small: str) -> None:
    plain, adapted = backend(config(small, None)), backend(config(small))
    assert await plain.logprobs(rollouts()) == await adapted.logprobs(rollouts())
    assert await plain.weights() == await adapted.weights()


@EACH
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks for it
async def test_what_is_saved_opens_in_peft_is_what_samplers_are_given_and_can_be_continued(
    backend: Backend, small: str, tmp_path: Path
) -> None:
    policy = await trained(backend, small)
    await policy.save(str(tmp_path / "adapters"))
    opened = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(small), str(tmp_path / "adapters"))
    merged = opened.merge_and_unload().state_dict()
    weights = await policy.weights()
    assert "model.layers.0.mlp.up_proj.weight" in weights.tensors
    for name, array in weights.tensors.items():
        np.testing.assert_allclose(floats(array), merged[name].numpy(), atol=1e-6)
    assert weights != (await backend(config(small)).weights()).with_version(weights.version)
    other = await (await trained(TorchPolicy, small)).weights()
    assert weights.tensors.keys() == other.tensors.keys()
    for name, array in weights.tensors.items():
        np.testing.assert_allclose(floats(array), floats(other.tensors[name]), atol=2e-5)
    await policy.checkpoint(str(tmp_path / "state"))
    again = backend(config(small))
    await again.restore(str(tmp_path / "state"))
    told = [(await each.update(rollouts(), ClippedLoss())).means() for each in (policy, again)]
    assert told[0] == told[1]
    assert await policy.weights() == await again.weights()


@EACH
async def test_adapters_alone_give_the_same_rollouts(backend: Backend, small: str) -> None:
    beside = LORA.model_copy(update={"sync": "adapters"})
    prompts, sampling = Batch.of(prompt=["abc>", "de>"] * 4), Sampling(max_tokens=8)
    drawn: list[Batch] = []
    sizes: list[int] = []
    for lora, own in ((LORA, None), (beside, beside)):
        weights = await (await trained(backend, small, lora)).weights()
        sampler = TorchSampler(SamplerConfig(model=small, lora=own, seed=3))
        await sampler.load(weights)
        drawn.append(await rollout(sampler, prompts, sampling))
        sizes.append(weights.nbytes)
    assert drawn[0].objects("completion") == drawn[1].objects("completion")
    assert sizes[1] < sizes[0] / 2
    with pytest.raises(ModelError, match="another model"):
        await TorchSampler(SamplerConfig(model=small)).load(weights)


@EACH
def test_layers_that_are_not_there(backend: Backend, small: str) -> None:
    with pytest.raises(ConfigError, match=r"lora.targets = \['nope'\]"):
        backend(config(small, LoraConfig(targets=("nope",))))


def test_an_algorithm_gives_its_sampler_what_it_needs() -> None:
    class Own(AlgorithmConfig):
        policy: PolicyConfig
        sampler: SamplerConfig

    for sync, filled in (("merged", None), ("adapters", LoraConfig(rank=4, sync="adapters"))):
        table = {"policy": {"model": "folder", "lora": {"rank": 4, "sync": sync}}}
        assert validate(Own, table, "test").sampler.lora == filled
