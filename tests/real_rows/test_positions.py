"""Positions that depend on a row's length, as LongRoPE's: every row's numbers are those of the row alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config, PhimoeConfig

from meshrl import Batch, PolicyConfig, Ragged, Sampling
from meshrl.agents import Gateway
from meshrl.algo import CrossEntropy
from meshrl.errors import DataError, ModelError
from meshrl.roles import OptimizerConfig, SamplerConfig
from meshrl_torch.model.chat import HuggingFaceChat
from meshrl_torch.model.loading import read_words
from meshrl_torch.sample.sampler import TorchSampler
from meshrl_torch.train.one_rank import TorchPolicy
from tests.agents.talks import opened
from tests.backends.material import SHAPE, by_row, changed, norm_of

NATIVE = 16
ROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": NATIVE, "factor": 3.0,
    "short_factor": [1.0] * 4, "long_factor": [3.0, 4.0, 5.0, 6.0],
}  # fmt: skip
SHAPES: dict[str, Any] = {
    "llama": LlamaConfig(**changed(SHAPE, rope_parameters=ROPE)),
    "phi3": Phi3Config(
        **changed(SHAPE, rope_parameters=ROPE, original_max_position_embeddings=NATIVE, pad_token_id=0),
    ),
    "phimoe": PhimoeConfig(
        **changed(
            SHAPE, rope_parameters={**ROPE, "short_mscale": 1.2, "long_mscale": 1.5}, num_local_experts=2,
            num_experts_per_tok=2, original_max_position_embeddings=NATIVE,
        ),
    ),
}  # fmt: skip
LENGTHS = [3, NATIVE - 1, NATIVE, NATIVE + 1, NATIVE + 2, 40]


def rows_of(*lengths: int, same: int = 0) -> Batch:
    """Random rows, the first `same` tokens of which are equal, that learn all but their first two tokens."""
    random = np.random.default_rng(0)
    head = random.integers(2, 11, same)
    rows = [np.concatenate([head, random.integers(2, 11, length)])[:length] for length in lengths]
    masks = [np.arange(length) >= 2 for length in lengths]
    return Batch.of(tokens=Ragged.of(rows, np.int32), loss_mask=Ragged.of(masks, np.bool_))


def alone(folder: str, batch: Batch) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        return torch.cat(by_row(AutoModelForCausalLM.from_pretrained(folder), batch)).numpy()


@pytest.mark.parametrize("same", [0, 2, NATIVE])
@pytest.mark.parametrize("name", SHAPES)
async def test_rows_packed_together_are_scored_as_each_alone(model: Callable[[str], str], name: str, same: int) -> None:
    batch = rows_of(*LENGTHS, same=same)
    scored = await TorchPolicy(PolicyConfig(model=model(name))).logprobs(batch)
    found = scored.ragged("logprobs").values.astype(np.float64)
    np.testing.assert_allclose(found, alone(model(name), batch), atol=1e-5)


async def test_gradients_are_those_of_each_row_alone(model: Callable[[str], str]) -> None:
    batch = rows_of(*LENGTHS, same=4)
    masks = [np.isin(np.arange(len(row)), [4, 5]) for row in batch.tokens]  # a long row that learns near its beginning
    batch = batch.assign(loss_mask=Ragged.of(masks, np.bool_))
    policy = TorchPolicy(PolicyConfig(model=model("phi3"), optimizer=OptimizerConfig(max_grad_norm=None)))
    metrics = await policy.update(batch, CrossEntropy())
    network = AutoModelForCausalLM.from_pretrained(model("phi3"))
    picked = torch.cat(by_row(network, batch))[torch.tensor(batch.loss_mask.values)]
    (-picked.mean()).backward()
    assert metrics["loss"] == pytest.approx(-float(picked.detach().mean()), abs=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm_of(network), rel=1e-4)


async def test_rows_drawn_together_are_drawn_as_each_alone(model: Callable[[str], str]) -> None:
    sampler = TorchSampler(SamplerConfig(model=model("phi3"), slots=2))
    prompts = Batch.of(prompt=["ab", "abcdefgh" * 2, "ab>cd", "abcdefgh" * 3])
    sampling = Sampling(n=2, max_tokens=NATIVE - 5, ignore_eos=True)
    drawn = Batch.concat([each async for each in sampler.generate(prompts, sampling)])
    assert sorted(drawn.tokens.lengths.tolist()) == [13, 13, 16, 16, 27, 27, 35, 35]
    mask = drawn.loss_mask.values.astype(np.bool_)
    found = drawn.sampler_logprobs.values[mask].astype(np.float64)
    np.testing.assert_allclose(found, alone(model("phi3"), drawn)[mask], atol=1e-5)


async def test_a_row_that_may_cross_the_native_length_is_refused_before_it_is_drawn(
    model: Callable[[str], str],
) -> None:
    sampler = TorchSampler(SamplerConfig(model=model("phi3")))
    with pytest.raises(DataError, match=r"row 1 has 5 tokens and may get 17, .* rows of more than 16: .*max_tokens"):
        async for _ in sampler.generate(Batch.of(prompt=["ab", "abcde"]), Sampling(max_tokens=12)):
            pass


async def test_no_turn_takes_a_row_across_the_native_length(model: Callable[[str], str]) -> None:
    """A row has room for what keeps the positions that its first turn was drawn with, and is truncated there."""
    sampler, sampling = TorchSampler(SamplerConfig(model=model("phi3"))), Sampling(max_tokens=5, ignore_eos=True)
    prompts = Batch.of(prompt=["ab", "abcdefgh" * 2, "abcdef", "abcdefghabc"]).part(np.arange(4))
    drawn = Batch.join([each async for each in sampler.generate(prompts, sampling)])
    masks = [[False] * length for length in drawn.tokens.lengths]  # as episodes ask: all that was is a prompt
    rows = Batch(dict(drawn.columns)).part(np.arange(4))
    rows = rows.assign(loss_mask=Ragged.of(masks, np.bool_), observation=["abcdef", "ab", "abcdefgh", "a"])
    more = Batch.join([each async for each in sampler.generate(rows, sampling)])
    assert more.tokens.lengths.tolist() == [NATIVE, 16 + 5 + 2 + 5, 6 + 5, NATIVE]
    assert more.row("truncated").tolist() == [True] * 4
    mask = more.versions.values.astype(np.int64) >= 0
    found = more.sampler_logprobs.values[mask].astype(np.float64)
    np.testing.assert_allclose(found, alone(model("phi3"), more)[mask], atol=1e-5)


async def test_no_turn_of_a_conversation_crosses_the_native_length(model: Callable[[str], str]) -> None:
    config = SamplerConfig(model=model("phi3"))
    known = read_words(config, Path(model("phi3")))
    known.tokenizer.chat_template = "{{ messages[0].content }}"
    gateway = Gateway(TorchSampler(config), HuggingFaceChat(known))
    async with opened(gateway, Sampling(max_tokens=90, ignore_eos=True)) as talk:
        told = (await talk.complete("abc", max_tokens=9)).choices[0].text
        assert (await talk.complete(f"abc{told}ab")).usage.completion_tokens == 2
        with pytest.raises(openai.BadRequestError, match="the model takes 1 to 15"):
            await talk.complete(f"abc{told}abcdef")
        assert (await talk.complete("abcdef" * 3)).usage.completion_tokens > NATIVE
    await gateway.aclose()


async def test_a_probe_has_rows_of_both_kinds(model: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    weights = await TorchPolicy(PolicyConfig(model=model("phi3"))).weights()
    assert weights.probe is not None
    assert weights.probe.tokens.lengths.tolist() == [16] * 4 + [32]
    np.testing.assert_allclose(
        weights.probe.logprobs,
        np.delete(alone(model("phi3"), Batch.of(tokens=weights.probe.tokens)), weights.probe.tokens.offsets[:-1]),
        atol=1e-5,
    )
    sampler = TorchSampler(SamplerConfig(model=model("phi3")))
    await sampler.load(weights)
    monkeypatch.setattr("meshrl_torch.model.positions.Rotaries._embed", lambda _, embed, *given, **named: embed(*given))
    other = TorchSampler(SamplerConfig(model=equal_factors(Path(model("phi3")))))
    with pytest.raises(ModelError, match="its completions cannot be trusted"):  # it differs in the long row alone
        await other.load(weights)


def equal_factors(folder: Path) -> str:
    """A copy whose long rows have the positions of short ones, as an engine that knows no other."""
    network = AutoModelForCausalLM.from_pretrained(folder)
    network.config.rope_parameters["long_factor"] = network.config.rope_parameters["short_factor"]
    network.save_pretrained(folder / "equal")
    for file in folder.glob("tokenizer*"):
        (folder / "equal" / file.name).write_bytes(file.read_bytes())
    return str(folder / "equal")


async def test_equal_factors_are_no_other_positions(model: Callable[[str], str]) -> None:
    sampler = TorchSampler(SamplerConfig(model=equal_factors(Path(model("phi3")))))
    drawn = [each async for each in sampler.generate(Batch.of(prompt=["ab"]), Sampling(max_tokens=20, ignore_eos=True))]
    assert [batch.tokens.lengths.tolist() for batch in drawn] == [[22]]


def test_positions_that_depend_on_the_pass_in_an_unknown_way_are_refused(
    model: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshrl_torch.model.text.native_tokens", lambda _: 1 << 62)
    with pytest.raises(ModelError, match="its positions depend on the longest row"):
        TorchPolicy(PolicyConfig(model=model("phi3")))
