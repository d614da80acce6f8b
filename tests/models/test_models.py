"""Each kind of model against transformers' eager attention: trainer, sampler, saved folder, and a step of GRPO."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from meshrl import (
    Batch,
    ClippedLoss,
    CrossEntropy,
    PolicyConfig,
    Ragged,
    ReferenceConfig,
    RewardTrainingConfig,
    SamplerConfig,
    Sampling,
)
from meshrl.errors import ConfigError, ModelError
from meshrl_megatron.roles import MegatronPolicy, MegatronReference
from meshrl_torch.model.layout import PaddedRows
from meshrl_torch.model.loading import load
from meshrl_torch.model.packing import learned
from meshrl_torch.model.scoring import predicted
from meshrl_torch.sample.sampler import TorchSampler
from meshrl_torch.train.fsdp.roles import FsdpPolicy, FsdpReference, FsdpRewardModel
from meshrl_torch.train.one_rank import TorchPolicy, TorchReference
from tests.models.families import TOKENIZER, folder_of, tiny
from tests.models.table import line, lines

CORE = (
    "llama", "deepseek_v3", "gpt_oss", "gemma2", "llama4_text", "qwen3_5_text", "nemotron_h", "lfm2", "minimax",
    "deepseek_v32",
)  # fmt: skip
"""One of each mixer: softmax attention, MLA, sinks, soft caps, chunks with counted positions, gated delta nets, state
spaces, short convolutions, lightning attention, sparse attention."""
ROWS = [[2, 3, 4, 5, 6, 7, 8, 9, 10], [2, 3, 4, 9, 9], [11, 12], [2, 3, 4, 5, 8, *range(2, 22)]]


def alone(folder: str) -> PreTrainedModel:
    network = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    return cast("PreTrainedModel", network.train(False))


def told(network: PreTrainedModel, row: Sequence[int]) -> Tensor:
    logits: Tensor = network(input_ids=torch.tensor([[*row]]), use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor([*row[1:]])[:, None])[:, 0]


def check_told(network: PreTrainedModel, rows: Batch, name: str) -> None:
    column = rows.ragged(name)
    for row, found, mask in zip(rows.tokens, column, rows.loss_mask, strict=True):
        wanted = np.append(0, told(network, row.tolist()).detach().numpy())
        learns = np.asarray(mask, np.bool_)
        np.testing.assert_allclose(np.asarray(found, np.float32)[learns], wanted[learns], atol=1e-5)


def batch() -> Batch:
    masks = [[place >= min(2, len(row) - 1) for place in range(len(row))] for row in ROWS]
    return Batch.of(tokens=Ragged.of(ROWS, np.int32), loss_mask=Ragged.of(masks, np.bool_))


def told_padded() -> dict[str, bool]:
    """Return the types that the page does not refuse, and whether it says that their rows are padded."""
    return {name: "| padded |" in row for name, row in lines().items() if "| refused |" not in row}


OTHERS = [pytest.param(each, marks=pytest.mark.wide) for each in sorted(told_padded().keys() - {*CORE})]


@pytest.mark.parametrize(
    "model_type", [*CORE[:3], *(pytest.param(each, marks=pytest.mark.wide) for each in CORE[3:]), *OTHERS]
)
def test_the_page_says_how_rows_are_read(model_type: str) -> None:
    assert line(model_type) == lines()[model_type]


@pytest.mark.parametrize("model_type", [*CORE, *OTHERS])
async def test_a_model_computes_what_transformers_computes_alone(model_type: str, tmp_path: Path) -> None:
    folder = folder_of(model_type, tmp_path / "model")
    reference, rows = alone(folder), batch()
    policy = TorchPolicy(PolicyConfig(model=folder, micro_batch_tokens=40))
    sampler = TorchSampler(SamplerConfig(model=folder, slots=5))

    check_told(reference, await policy.logprobs(rows), "logprobs")

    model = load(PolicyConfig(model=folder))
    assert isinstance(model.layout, PaddedRows) == told_padded()[model_type]
    mask = rows.loss_mask
    for micro in model.layout.split(rows.tokens, learned(rows.tokens, mask), mask, 40):
        predicted(model, rows, micro)[:, 0].sum().backward()
    learned_of = [told(reference, row)[torch.tensor(own[1:])] for row, own in zip(ROWS, mask, strict=True)]
    torch.cat(learned_of).sum().backward()
    gradients = {name: each.grad for name, each in reference.named_parameters()}
    for name, each in model.network.named_parameters():
        wanted = gradients[name]
        if wanted is not None:
            assert each.grad is not None, name
            torch.testing.assert_close(each.grad, wanted, rtol=1e-4, atol=1e-4 * max(1.0, float(wanted.abs().max())))

    prompts = Batch.of(prompt=["abc", "a", "hello", "zz", "abcdefghijk"])
    drawn = Batch.concat([part async for part in sampler.generate(prompts, Sampling(n=2, max_tokens=7))])
    check_told(reference, drawn, "sampler_logprobs")

    advantages = np.resize(np.array([1, -1], np.float32), len(drawn))
    metrics = await policy.update(drawn.assign(advantages=advantages), ClippedLoss())
    assert metrics["grad_norm"] > 0
    places = await sampler.load(await policy.weights())
    assert float(places.row("difference").max()) < 1e-5
    await policy.save(str(tmp_path / "saved"))
    check_told(alone(str(tmp_path / "saved")), await policy.logprobs(rows), "logprobs")


@pytest.mark.parametrize("packing", ["auto", "packed", "padded"])
async def test_a_table_says_how_rows_are_read(packing: str, tmp_path: Path) -> None:
    llama, other = (folder_of(each, tmp_path / each) for each in ("llama", "deepseek_v32"))
    table = {"packing": packing, "micro_batch_tokens": 40}
    for kind in (TorchPolicy, FsdpPolicy):
        check_told(
            alone(llama),
            await kind(PolicyConfig.model_validate({**table, "model": llama})).logprobs(batch()),
            "logprobs",
        )
    if packing == "padded":
        with pytest.raises(ConfigError, match="packs all rows"):
            MegatronPolicy(PolicyConfig.model_validate({**table, "model": llama}))
    if packing == "packed":
        with pytest.raises(ModelError, match=re.escape('packing = "auto"')):
            TorchPolicy(PolicyConfig.model_validate({**table, "model": other}))


@pytest.mark.parametrize("packing", ["packed", "padded"])
async def test_fsdp_computes_what_one_rank_computes(packing: str, tmp_path: Path) -> None:
    table = {"model": folder_of("qwen3_5_text", tmp_path), "micro_batch_tokens": 40, "packing": packing}
    policies = [kind(PolicyConfig.model_validate(table)) for kind in (TorchPolicy, FsdpPolicy)]
    rows = batch()
    steps = [await each.update(rows, CrossEntropy()) for each in policies]
    assert steps[0]["grad_norm"] == pytest.approx(steps[1]["grad_norm"], rel=1e-4)
    FsdpRewardModel(RewardTrainingConfig.model_validate(table))  # which proves what it reads


@pytest.mark.parametrize("model_type", ["bloom", "inkling2_text"])
async def test_a_leak_as_small_as_rounding_in_bfloat16_is_found(model_type: str, tmp_path: Path) -> None:
    folder = folder_of(model_type, tmp_path)
    for dtype in ("float32", "bfloat16"):
        assert load(PolicyConfig.model_validate({"model": folder, "dtype": dtype})).layout.name == "padded"


@pytest.mark.parametrize(
    "model_type",
    ["deepseek_v3", "gpt_oss"]
    + [pytest.param(each, marks=pytest.mark.wide) for each in ("hunyuan_v1_moe", "mixtral", "qwen3_moe")],
)
async def test_experts_are_followed_whatever_weighs_them(model_type: str, tmp_path: Path) -> None:
    folder = folder_of(model_type, tmp_path)
    sampler = TorchSampler(SamplerConfig(model=folder, slots=3, record_experts=True))
    prompts = Batch.of(prompt=["abc", "a", "hello"])
    drawn = Batch.concat([part async for part in sampler.generate(prompts, Sampling(n=2, max_tokens=9))])
    told_experts = drawn.ragged("experts")
    numbers = np.asarray(told_experts.values, np.int16)
    others = np.where(numbers < 0, -1, (numbers + 1) % 4).astype(np.int16)
    for kind in (TorchPolicy, FsdpPolicy):
        policy = kind(PolicyConfig(model=folder, micro_batch_tokens=40))
        check_told(alone(folder), await policy.logprobs(drawn), "logprobs")
        elsewhere = await policy.logprobs(drawn.assign(experts=Ragged(others, told_experts.offsets)))
        with pytest.raises(AssertionError):
            check_told(alone(folder), elsewhere, "logprobs")


@pytest.mark.parametrize(
    ("model_type", "name"),
    [("phimoe", "PhimoeTopKRouter"), ("llama4_text", "Llama4Router"), ("jetmoe", "JetMoeTopKGating")],
)
def test_a_router_that_cannot_be_followed_is_named(model_type: str, name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=name):
        TorchSampler(SamplerConfig(model=folder_of(model_type, tmp_path), record_experts=True))


@pytest.mark.megatron
async def test_a_routers_bias_stays_in_float32_from_each_trainer_to_each(tmp_path: Path) -> None:
    network = tiny("deepseek_v3")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    bias = torch.tensor([0.1, 0.2, 0.3, 0.4])
    network.get_buffer(name).copy_(bias)
    network.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    table = {"model": str(tmp_path), "dtype": "bfloat16"}
    references = [
        kind(ReferenceConfig.model_validate(table)) for kind in (TorchReference, FsdpReference, MegatronReference)
    ]
    for kind in (TorchPolicy, FsdpPolicy, MegatronPolicy):
        weights = await kind(PolicyConfig.model_validate(table)).weights()
        np.testing.assert_array_equal(weights.tensors[name], bias.numpy(), kind.__name__)
        assert weights.tensors["model.norm.weight"].dtype == "bfloat16"
        for reference in references:
            await reference.load(weights)
