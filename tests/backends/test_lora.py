"""Adapters: they alone are trained, and what is given on is the model with them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from peft import PeftModel
from transformers import AutoModelForCausalLM

from meshrl import Batch, ClippedLoss, LoraConfig, NewModel, PolicyConfig, Ragged, SamplerConfig, Sampling, rollout
from meshrl.config import validate
from meshrl.errors import ConfigError, ModelError
from meshrl.run import AlgorithmConfig
from meshrl_fsdp.policy import FsdpPolicy
from meshrl_torch.policy import TorchPolicy
from meshrl_torch.sampler import TorchSampler

MODEL = NewModel(characters="abcdefgh>", hidden_size=16, ffn_size=24, layers=2, heads=2, max_tokens=48)
LORA = LoraConfig(rank=4, alpha=8)
Backend = type[TorchPolicy] | type[FsdpPolicy]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model's folder."""
    return str(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(autouse=True)
async def _written(base: str) -> None:
    if not Path(base).exists():
        await TorchPolicy(PolicyConfig(model=MODEL)).save(base)


@pytest.fixture(params=[TorchPolicy, FsdpPolicy])
def backend(request: pytest.FixtureRequest) -> Backend:
    made: Backend = request.param
    return made


def config(base: str, lora: LoraConfig | None = LORA) -> PolicyConfig:
    return PolicyConfig.model_validate({"model": base, "lora": lora, "optimizer": {"lr": 1e-2}})


def floats(array: np.ndarray[Any, Any]) -> NDArray[np.float32]:
    return np.asarray(array, np.float32)


def rollouts(rows: int = 6) -> Batch:
    rng = np.random.default_rng(0)
    tokens = Ragged.of([rng.integers(2, 11, 7) for _ in range(rows)], np.int32)
    return Batch.of(
        tokens=tokens,
        loss_mask=Ragged(np.tile(np.arange(7) >= 3, rows), tokens.offsets),
        sampler_logprobs=Ragged(np.full(7 * rows, -2.0, np.float32), tokens.offsets),
        advantages=rng.normal(size=rows).astype(np.float32),
    )


async def trained(backend: Backend, base: str, lora: LoraConfig = LORA) -> TorchPolicy | FsdpPolicy:
    made = backend(config(base, lora))
    for _ in range(3):
        await made.update(rollouts(), ClippedLoss())
    return made


async def test_new_adapters_change_nothing(backend: Backend, base: str) -> None:
    plain, adapted = backend(config(base, None)), backend(config(base))
    assert await plain.logprobs(rollouts()) == await adapted.logprobs(rollouts())
    assert await plain.weights() == await adapted.weights()


async def test_both_backends_train_the_same_adapters(base: str) -> None:
    one = await (await trained(TorchPolicy, base)).weights()
    other = await (await trained(FsdpPolicy, base)).weights()
    assert one.tensors.keys() == other.tensors.keys()
    for name, array in one.tensors.items():
        np.testing.assert_allclose(floats(array), floats(other.tensors[name]), atol=1e-5)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks for it
async def test_what_is_saved_opens_in_peft_and_is_what_samplers_are_given(
    backend: Backend, base: str, tmp_path: Path
) -> None:
    policy = await trained(backend, base)
    await policy.save(str(tmp_path / "adapters"))
    opened = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(tmp_path / "adapters"))
    merged = opened.merge_and_unload().state_dict()
    weights = await policy.weights()
    assert "model.layers.0.mlp.up_proj.weight" in weights.tensors
    for name, array in weights.tensors.items():
        np.testing.assert_allclose(floats(array), merged[name].numpy(), atol=1e-6)
    assert weights != (await backend(config(base)).weights()).with_version(weights.version)


async def test_adapters_alone_give_the_same_rollouts(backend: Backend, base: str) -> None:
    beside = LORA.model_copy(update={"sync": "adapters"})
    prompts, sampling = Batch.of(prompt=["abc>", "de>"] * 4), Sampling(max_tokens=8)
    drawn: list[Batch] = []
    sizes: list[int] = []
    for lora, own in ((LORA, None), (beside, beside)):
        weights = await (await trained(backend, base, lora)).weights()
        sampler = TorchSampler(SamplerConfig(model=base, lora=own, seed=3))
        await sampler.load(weights)
        drawn.append(await rollout(sampler, prompts, sampling))
        sizes.append(weights.nbytes)
    assert drawn[0].objects("completion") == drawn[1].objects("completion")
    assert sizes[1] < sizes[0] / 2


async def test_a_sampler_without_adapters_refuses_them(base: str) -> None:
    weights = await (await trained(TorchPolicy, base, LORA.model_copy(update={"sync": "adapters"}))).weights()
    with pytest.raises(ModelError, match="another model"):
        await TorchSampler(SamplerConfig(model=base)).load(weights)


async def test_training_goes_on_from_a_checkpoint(backend: Backend, base: str, tmp_path: Path) -> None:
    policy = await trained(backend, base)
    await policy.checkpoint(str(tmp_path / "state"))
    again = backend(config(base))
    await again.restore(str(tmp_path / "state"))
    told = [(await each.update(rollouts(), ClippedLoss())).means() for each in (policy, again)]
    assert told[0] == told[1]
    assert await policy.weights() == await again.weights()


def test_layers_that_are_not_there(backend: Backend, base: str) -> None:
    with pytest.raises(ConfigError, match=r"lora.targets = \['nope'\]"):
        backend(config(base, LoraConfig(targets=("nope",))))


@pytest.mark.parametrize(("sync", "filled"), [("merged", None), ("adapters", LoraConfig(rank=4, sync="adapters"))])
def test_an_algorithm_gives_its_sampler_what_it_needs(sync: str, filled: LoraConfig | None) -> None:
    class Own(AlgorithmConfig):
        policy: PolicyConfig
        sampler: SamplerConfig

    table = {"policy": {"model": "folder", "lora": {"rank": 4, "sync": sync}}}
    assert validate(Own, table, "test").sampler.lora == filled
