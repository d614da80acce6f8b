"""Adapters are peft's: folders load as peft computes them unmerged, and each target trains, or is refused by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from meshrl import Batch, PolicyConfig, Ragged
from meshrl.algo import CrossEntropy
from meshrl.errors import ConfigError, ModelError
from meshrl.roles import LoraConfig, OptimizerConfig, SamplerConfig
from meshrl_torch.sample.sampler import TorchSampler
from meshrl_torch.train.one_rank import TorchPolicy
from tests.backends.material import GPT2, MODEL, SHAPE, by_row, changed

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # what peft tells its callers
SHAPES: dict[str, Any] = {
    "apart": LlamaConfig(**SHAPE),
    "tied": LlamaConfig(**changed(SHAPE, tie_word_embeddings=True)),
    "gpt2": GPT2Config(**changed(GPT2, n_inner=32)),  # square matrices do not tell that they are transposed
}
ROWS = [np.random.default_rng(row).integers(2, 11, 12) for row in range(3)]
BATCH = Batch.of(tokens=Ragged.of(ROWS, np.int32), loss_mask=Ragged.of([np.arange(12) >= 2] * 3, np.bool_))
FOREIGN: dict[str, tuple[str, dict[str, Any]]] = {
    "head": ("apart", {"target_modules": ["lm_head"]}),
    "tied head and embeddings": ("tied", {"target_modules": ["embed_tokens", "lm_head"]}),
    "tied and kept tied": ("tied", {"target_modules": ["embed_tokens"], "ensure_weight_tying": True}),
    "saved embeddings": ("tied", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}),
    "all linear": (
        "tied",
        {"target_modules": "all-linear", "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"up_proj": 3}},
    ),
    "expression": ("apart", {"target_modules": r".*\.1\..*(k|up)_proj", "use_rslora": True}),
    "dora": ("apart", {"target_modules": ["q_proj", "down_proj"], "use_dora": True}),
    "gpt2": ("gpt2", {"target_modules": ["c_proj", "wte"]}),
}


def logprobs_of(network: Any) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        return torch.cat(by_row(network.eval(), BATCH)).numpy()


async def found(policy: TorchPolicy) -> np.ndarray[Any, Any]:
    return (await policy.logprobs(BATCH)).ragged("logprobs").values


def foreign(base: str, folder: Path, tokens: int = 0, **keys: Any) -> np.ndarray[Any, Any]:
    """Write an adapter folder without a tokenizer, as peft does, and return what peft computes unmerged."""
    network = AutoModelForCausalLM.from_pretrained(base)
    if tokens:
        network.resize_token_embeddings(tokens)
    torch.manual_seed(0)
    adapted = get_peft_model(network, PeftConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **keys))
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(str(folder))
    return logprobs_of(adapted.base_model.model)


async def loads_as(folder: Path, wanted: np.ndarray[Any, Any]) -> None:
    np.testing.assert_allclose(await found(TorchPolicy(PolicyConfig(model=str(folder)))), wanted, atol=1e-5)


@pytest.mark.parametrize("name", FOREIGN)
async def test_a_folder_loads_as_peft_computes_it_unmerged(
    model: Callable[[str], str], tmp_path: Path, name: str
) -> None:
    base, keys = FOREIGN[name]
    wanted = foreign(model(base), tmp_path, **keys)
    await loads_as(tmp_path, wanted)
    assert np.abs(wanted - logprobs_of(AutoModelForCausalLM.from_pretrained(model(base)))).max() > 0.01


async def test_new_tokens_come_with_the_adapters_or_are_missed(model: Callable[[str], str], tmp_path: Path) -> None:
    both = ["embed_tokens", "lm_head"]
    await loads_as(tmp_path, foreign(model("apart"), tmp_path, 13, target_modules=["q_proj"], modules_to_save=both))


async def test_a_folder_that_was_written_again_is_read_again(model: Callable[[str], str], tmp_path: Path) -> None:
    for target in ("q_proj", "lm_head"):
        await loads_as(tmp_path, foreign(model("apart"), tmp_path, target_modules=[target]))


async def test_adapters_are_merged_again_after_any_change_of_a_file(
    random_model: Callable[..., str], tmp_path: Path
) -> None:
    base, adapters = random_model(SHAPES["apart"], tmp_path / "base"), tmp_path / "adapters"
    foreign(base, adapters, target_modules=["q_proj"])
    for file in (Path(base) / "model.safetensors", *[adapters / "adapter_model.safetensors"] * 3):
        network = AutoModelForCausalLM.from_pretrained(base)
        await loads_as(adapters, logprobs_of(PeftModel.from_pretrained(network, str(adapters)).base_model.model))
        content = save({name: each * 0.5 for name, each in load_file(file).items()}, {"format": "pt"})
        with file.open("r+b") as opened:  # the same file, of the same size
            opened.write(content)


def of_another_base(folder: Path, base: str, instead: str) -> Path:
    """Adapters of `base` whose file names another model."""
    foreign(base, folder, target_modules=["q_proj"])
    config = folder / "adapter_config.json"
    config.write_text(config.read_text("utf-8").replace(f'"{base}"', instead), "utf-8")
    return folder


def test_what_cannot_be_merged_is_refused_by_name(model: Callable[[str], str], tmp_path: Path) -> None:
    network = AutoModelForCausalLM.from_pretrained(model("apart"))
    tensors = {name: each for name, each in network.state_dict().items() if "up_proj" not in name}
    network.save_pretrained(tmp_path / "part", state_dict=tensors)
    tuned = get_peft_model(network, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    tuned.save_pretrained(str(tmp_path / "prompt"))
    for folder, said in (
        (tmp_path / "prompt", "PROMPT_TUNING changes a model's input"),
        (of_another_base(tmp_path / "none", model("apart"), "null"), "names no base model: write base_model_name"),
        (
            of_another_base(tmp_path / "of a part", model("apart"), f'"{tmp_path}/part"'),
            r"the base model \S+part lacks 2 tensors \(model.layers.0.mlp.up_proj.weight",
        ),
    ):
        with pytest.raises(ModelError, match=said):
            TorchPolicy(PolicyConfig(model=str(folder)))


TRAINED = [
    ("apart", ("lm_head",), "merged"), ("apart", ("q_proj", "embed_tokens"), "merged"),
    ("apart", "all-linear", "merged"), ("apart", r".*\.0\..*q_proj|lm_head", "merged"),
    ("tied", ("lm_head", "v_proj"), "adapters"), ("tied", ("embed_tokens",), "adapters"),
    ("gpt2", (), "merged"), ("gpt2", ("c_proj",), "adapters"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "targets", "sync"), TRAINED)
async def test_targets_train_are_published_and_saved_as_peft_reads_them(
    model: Callable[[str], str], tmp_path: Path, name: str, targets: Any, sync: Any
) -> None:
    lora = LoraConfig(targets=targets, rank=4, alpha=8, sync=sync)
    policy = TorchPolicy(PolicyConfig(model=model(name), lora=lora, optimizer=OptimizerConfig(lr=0.05)))
    sampler = TorchSampler(SamplerConfig(model=model(name), lora=lora if sync == "adapters" else None))
    before = await found(policy)
    for _ in range(2):
        await policy.update(BATCH, CrossEntropy())
    after = await found(policy)
    assert np.abs(after - before).max() > 0.01
    difference = await sampler.load(await policy.weights())
    assert "difference" not in difference or difference.row("difference").max(initial=0) < 1e-5
    await policy.save(str(tmp_path / "saved"))
    peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model(name)), str(tmp_path / "saved"))
    np.testing.assert_allclose(after, logprobs_of(peft.base_model.model), atol=1e-5)


@pytest.mark.parametrize(
    ("name", "targets", "told"),
    [
        ("tied", ("q_proj", "lm_head"), "lm_head shares its weight with model.embed_tokens"),
        ("gpt2", "transformer.wte", "transformer.wte shares its weight with lm_head"),
        ("apart", ("q_proj", "w_pack"), "'w_pack' is the name of no layer.*k_proj, lm_head"),
        ("apart", ("mlp",), "'mlp' is a LlamaMLP, which takes no adapters"),
    ],
)
def test_targets_that_cannot_be_trained_are_refused_by_name(
    model: Callable[[str], str], name: str, targets: Any, told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        TorchPolicy(PolicyConfig(model=model(name), lora=LoraConfig(targets=targets)))


@pytest.mark.parametrize("first", ["adapters", "new"])
async def test_adapters_of_a_model_that_has_no_name_bring_their_base(
    model: Callable[[str], str], tmp_path: Path, first: str
) -> None:
    foreign(model("apart"), tmp_path / "first", target_modules=["q_proj"])
    start: Any = str(tmp_path / "first") if first == "adapters" else MODEL
    policy = TorchPolicy(PolicyConfig(model=start, lora=LoraConfig(rank=2), optimizer=OptimizerConfig(lr=0.05)))
    await policy.update(BATCH, CrossEntropy())
    await policy.save(str(tmp_path / "second"))
    base = tmp_path / "second" / "base"
    assert PeftConfig.from_pretrained(str(tmp_path / "second")).base_model_name_or_path == str(base)
    peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(tmp_path / "second"))
    np.testing.assert_allclose(await found(policy), logprobs_of(peft.base_model.model), atol=1e-5)
