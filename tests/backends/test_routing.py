from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from transformers import Qwen3MoeConfig

from meshrl import Batch, ClippedLoss, NewModel, PolicyConfig, Ragged, ReferenceConfig, SamplerConfig, Sampling
from meshrl.agents import Gateway
from meshrl.errors import ConfigError, DataError
from meshrl_megatron.roles import MegatronPolicy
from meshrl_torch.model.chat import HuggingFaceChat
from meshrl_torch.model.text import Words, character_tokenizer
from meshrl_torch.sample.sampler import TorchSampler
from meshrl_torch.train.fsdp.roles import FsdpPolicy
from meshrl_torch.train.one_rank import TorchPolicy, TorchReference
from meshrl_torch.train.roles import TrainedPolicy
from meshrl_vllm.sampler import VllmSampler
from tests.agents.talks import opened
from tests.backends import material
from tests.backends.material import ModelOf, floats

SHAPE: dict[str, Any] = {
    **material.SHAPE, "num_hidden_layers": 3, "num_experts_per_tok": 2, "max_position_embeddings": 64,
    "intermediate_size": 24,
}  # fmt: skip
QWEN = Qwen3MoeConfig(**SHAPE, num_experts=8, moe_intermediate_size=24, norm_topk_prob=True)
PROMPTS = Batch.of(prompt=["abc>", "h>", "abcdefgh>", "h>"] * 4, row=np.arange(16))
DRAWS = Sampling(max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def model(model_of: ModelOf) -> str:
    return model_of(QWEN)


def policy(model: str, kind: type[TrainedPolicy] = TorchPolicy, **changes: object) -> TrainedPolicy:
    config = {"model": model, "optimizer": {"lr": 1e-2, "weight_decay": 0.0}, **changes}
    made: TrainedPolicy = kind(PolicyConfig.model_validate(config))
    return made


async def rows(model: str, sampling: Sampling = DRAWS, prompts: Batch = PROMPTS, **changes: object) -> Batch:
    sampler = TorchSampler(SamplerConfig.model_validate({"model": model, "record_experts": True, **changes}))
    parts = [part async for part in sampler.generate(prompts, sampling)]
    return Batch.concat(parts).assign(advantages=np.ones(len(PROMPTS), np.float32))


def values(batch: Batch, name: str) -> NDArray[np.float32]:
    return floats(batch.ragged(name).values)[np.asarray(batch.loss_mask.values, np.bool_)]


async def apart(made: TrainedPolicy, batch: Batch) -> float:
    told = await made.logprobs(batch)
    return float(np.abs(values(told, "logprobs") - values(batch, "sampler_logprobs")).mean())


async def test_followed_experts_help_another_dtype_alone(model: str) -> None:
    batch = await rows(model)
    for kind in (TorchPolicy, FsdpPolicy):
        made = policy(model, kind, micro_batch_tokens=64)
        assert await apart(made, batch) < 1e-5
        alone, following = [values(await made.logprobs(each), "logprobs") for each in (batch.drop("experts"), batch)]
        np.testing.assert_allclose(alone, following, atol=1e-6)
    made = policy(model, dtype="bfloat16")
    assert await apart(made, batch) < 0.8 * await apart(made, batch.drop("experts"))


async def test_rows_that_begin_alike_follow_their_own_experts(model: str) -> None:
    rows = [[2, 3, 4, *[5] * 40, last, 6] for last in (7, 8)]
    tokens = Ragged.of(rows, np.int32)
    completion = np.arange(len(rows[0])) >= 3
    told = [np.where(completion[:, None, None], first, 0) + np.tile([0, 1], (3, 1)) for first in (2, 4)]
    experts = Ragged(np.concatenate(told).astype(np.int16), tokens.offsets)
    batch = Batch.of(tokens=tokens, loss_mask=Ragged.of([completion] * 2, np.bool_), experts=experts)
    asked = [batch, *(batch.select([row]) for row in range(2))]
    together, *alone = [floats((await policy(model).logprobs(each)).ragged("logprobs").values) for each in asked]
    np.testing.assert_allclose(together, np.concatenate(alone), atol=1e-5)


@pytest.mark.parametrize(("kind", "checkpointing"), [(TorchPolicy, True), (FsdpPolicy, False), (FsdpPolicy, True)])
async def test_only_experts_that_are_told_learn(model: str, kind: type[TrainedPolicy], checkpointing: bool) -> None:
    batch = await rows(model)
    told = np.tile(np.array([2, 5], np.int16), (len(batch.tokens.values), 3, 1))
    batch = batch.assign(experts=Ragged(told, batch.tokens.offsets))
    made = policy(model, kind, activation_checkpointing=checkpointing)
    before = (await made.weights()).tensors
    await made.update(batch, ClippedLoss())
    after = (await made.weights()).tensors
    for name, array in after.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            changed = np.any(array != before[name], axis=(1, 2))
            assert np.flatnonzero(changed).tolist() == [2, 5], name
        if name.endswith("gate.weight"):
            assert np.any(array != before[name]), "the router learns to weigh them"


async def test_a_row_that_goes_on_has_the_experts_of_all_that_was_read(model: str) -> None:
    short = await rows(model, Sampling(max_tokens=5, ignore_eos=True))
    whole = await rows(model, DRAWS, short.drop("advantages"))
    known = np.asarray(whole.ragged("experts").values, np.int16).min(axis=(1, 2)) >= 0
    assert known.sum() == len(whole.tokens.values) - len(whole)
    ended = whole.drop("advantages")
    again = await rows(model, DRAWS, ended)
    np.testing.assert_array_equal(again.ragged("experts").values, whole.ragged("experts").values)
    other = await rows(model, DRAWS, ended.drop("experts"))
    assert (other.ragged("experts").values == -1).all(), "these had ended, and nobody knows any more"


async def test_what_cannot_be_told_or_followed_is_refused(model: str) -> None:
    dense = NewModel(characters="abcdefgh>", hidden_size=16, layers=1, heads=2)
    with pytest.raises(ConfigError, match="not a mixture of experts"):
        TorchSampler(SamplerConfig(model=dense, record_experts=True))
    with pytest.raises(ConfigError, match="'vllm' does not report the experts"):
        VllmSampler(SamplerConfig(model=dense, record_experts=True))
    batch = await rows(model)
    with pytest.raises(DataError, match=r"`experts` is \[\d+, 3, 2\] and the policy routes in 0 layers"):
        await TorchPolicy(PolicyConfig(model=dense)).logprobs(batch)
    experts = batch.ragged("experts").values
    many = batch.assign(experts=Ragged(np.full_like(experts, 8), batch.tokens.offsets))
    with pytest.raises(DataError, match="names the expert 8, and the policy has those from 0 to 7"):
        await policy(model).update(many, ClippedLoss())
    with pytest.raises(DataError, match="'megatron' cannot use"):
        await MegatronPolicy(PolicyConfig(model=dense, backend="megatron")).logprobs(batch)
    assert "logprobs" in str(await TorchReference(ReferenceConfig(model=dense)).logprobs(batch))


async def test_a_conversation_has_the_experts_that_read_each_turn(model: str) -> None:
    tokenizer = character_tokenizer("abcdefgh>", 64)
    tokenizer.chat_template = "{% for each in messages %}{{ each.content }}{{ '>' if each.role == 'user' }}{% endfor %}"
    sampler = TorchSampler(SamplerConfig.model_validate({"model": model, "record_experts": True}))
    gateway = Gateway(sampler, HuggingFaceChat(Words(tokenizer, None, frozenset({1}), 64, known=len(tokenizer))))
    messages = list[Any]()
    async with opened(gateway, Sampling(max_tokens=6, ignore_eos=True)) as talk:
        for text in ("abc", "de"):
            messages.append({"role": "user", "content": text})
            messages.append((await talk.ask(messages)).choices[0].message)
    batch = talk.rows()
    experts = np.asarray(batch.ragged("experts").values, np.int16)
    assert experts.shape == (len(batch.tokens.values), 3, 2)
    assert np.flatnonzero((experts < 0).all((1, 2))).tolist() == [9, 18], "nothing read the last token of a turn"
    assert await apart(policy(model), batch) < 1e-5
