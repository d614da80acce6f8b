"""A reward that holds a model: its scores are transformers' own, row by row, and a row that it cannot judge is data."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog.testing
import torch
import transformers

from meshrl import Batch, PolicyConfig, Reward, RewardModelConfig
from meshrl.errors import DataError, ModelError
from meshrl_fsdp.options import FsdpConfig
from meshrl_fsdp.reward import FsdpReward
from meshrl_hf.text import character_tokenizer
from meshrl_megatron.reward import MegatronReward
from meshrl_torch.policy import TorchPolicy
from meshrl_torch.reward import TorchReward
from tests.backends import material

SHAPE: dict[str, Any] = {**material.SHAPE, "vocab_size": 12, "hidden_size": 16, "head_dim": 4, "num_labels": 1}
GPT2: dict[str, Any] = {
    "vocab_size": 12, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 48, "num_labels": 1,
}  # fmt: skip
JUDGES = [
    transformers.LlamaConfig(**SHAPE),
    transformers.Qwen3Config(**SHAPE),
    transformers.GPT2Config(**GPT2),
    transformers.LlamaConfig(**SHAPE, pad_token_id=1),  # the token that ends a text: the score is of the one before
    transformers.LlamaConfig(**SHAPE, pad_token_id=0),
]
TEMPLATE = (
    "{% for each in messages %}{{ '>' if each.role == 'user' else '<' }}{{ each.content }}{{ eos_token }}{% endfor %}"
)
ROWS = Batch.of(
    prompt=["abc", "abc", "abc", "h", "", "abc", "h", "gfedcba"],
    completion=["", "de", "d", "hhhhhhhhhh", "a", "de", "f", "abcdefgh" * 3],
)
"""Groups of a prompt, one row twice, one row of its prompt alone, and texts without a character."""


def save(
    folder: Path, config: transformers.PretrainedConfig, auto: Any = transformers.AutoModelForSequenceClassification
) -> str:
    """A model far from its initialisation, with a character tokenizer."""
    torch.manual_seed(0)
    network = auto.from_config(config)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    network.save_pretrained(folder)
    tokenizer = character_tokenizer("abcdefgh><", 48)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("llama") / "model", transformers.LlamaConfig(**SHAPE))


def reward(folder: str, backend: str = "torch", **changes: object) -> Reward:
    config = RewardModelConfig.model_validate({"model": folder, "backend": backend, **changes})
    return FsdpReward(config) if backend == "fsdp" else TorchReward(config)


def by_row(folder: str, chat: bool, batch: Batch = ROWS) -> list[float]:
    """What transformers gives each row alone, with its own tokenizer and attention."""
    network = transformers.AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    scores: list[float] = []
    for prompt, completion in zip(batch.objects("prompt"), batch.objects("completion"), strict=True):
        text = f"{prompt}{completion}<eos>"
        if chat:
            turns = [{"role": "user", "content": str(prompt)}, {"role": "assistant", "content": str(completion)}]
            text = str(tokenizer.apply_chat_template(turns, tokenize=False))
        ids = tokenizer(text, add_special_tokens=not chat, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            scores.append(float(network(input_ids=ids).logits[0, 0]))
    return scores


WITHOUT_EMPTY = ROWS.select([0, 1, 2, 3, 5, 6, 7])
"""Without the row whose prompt has no token, which a judge needs a template for."""


async def test_a_score_is_what_transformers_gives_the_row_alone(tmp_path: Path) -> None:
    for number, config in enumerate(JUDGES):
        judge = save(tmp_path / f"judge-{number}", config)
        for chat, batch in ((True, ROWS), (False, WITHOUT_EMPTY)):
            expected = by_row(judge, chat, batch)
            assert np.ptp(expected) > 0.1
            for backend in ("torch", "fsdp"):
                found = await reward(judge, backend, chat=chat).score(batch)
                assert found.rewards.dtype == np.float32
                np.testing.assert_allclose(found.rewards, expected, atol=1e-5, err_msg=f"{backend}: {config}")
                assert found.objects("reward_error") == (None,) * len(batch)


async def test_neither_micro_batches_nor_the_order_of_rows_nor_sharding_change_the_scores(llama: str) -> None:
    expected = np.array(by_row(llama, chat=True))
    for budget in (1, 16, 48):
        order = np.random.default_rng(budget).permutation(len(ROWS))
        found = await reward(llama, micro_batch_tokens=budget, chat=True).score(ROWS.select(order))
        np.testing.assert_allclose(found.rewards, expected[order], atol=1e-5)
    cut = ROWS.assign(truncated=np.ones(len(ROWS), np.bool_))
    made = reward(llama, "fsdp", chat=True, fsdp=FsdpConfig(reshard_after_forward=False))
    for batch in (ROWS, cut):  # a cut completion is judged as a whole one
        np.testing.assert_allclose((await made.score(batch)).rewards, expected, atol=1e-5)
    for backend in ("torch", "fsdp"):
        found = await reward(llama, backend, chat=True, dtype="bfloat16").score(ROWS)
        assert 1e-5 < np.abs(found.rewards - expected).max() < 0.1
    none = await made.score(ROWS.select([]))
    assert len(none) == 0
    assert none.rewards.dtype == np.float32


@pytest.mark.parametrize(("backend", "chat"), [("torch", False), ("fsdp", True)])
async def test_a_row_that_cannot_be_judged_gets_nothing_and_costs_the_others_nothing(
    llama: str, backend: str, chat: bool
) -> None:
    batch = Batch.of(prompt=["abc", "a!c", "abc", "abc"], completion=["de", "d", "d" * 46, "h"])
    made = reward(llama, backend, chat=chat)
    with structlog.testing.capture_logs() as logs:
        found = await made.score(batch)
        await made.score(batch)
    good = batch.select([0, 3])
    np.testing.assert_allclose(found.rewards[[0, 3]], by_row(llama, chat, good), atol=1e-5)
    assert found.rewards[[1, 2]].tolist() == [0, 0]
    _, strange, long, _ = found.objects("reward_error")
    assert "has '!', which the tokenizer does not know" in str(strange)
    assert f"the row has {53 if chat else 50} tokens and the model takes at most 48" in str(long)
    assert found.objects("reward_error")[0] is found.objects("reward_error")[3] is None
    told = [each for each in logs if each["log_level"] == "warning"]
    assert [each["rows"] for each in told] == [2]


async def test_other_rows_that_cannot_be_judged(llama: str, tmp_path: Path) -> None:
    (error,) = (await reward(llama).score(ROWS.select([4]))).objects("reward_error")
    assert "the prompt '' has no token" in str(error)
    network = transformers.AutoModelForSequenceClassification.from_pretrained(llama)
    network.save_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(llama)
    tokenizer.add_tokens(["ABC"])
    tokenizer.chat_template = "{{ raise_exception('no turns') if messages[0].content == 'h' }}" + TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    batch = Batch.of(prompt=["h", "a", "a"], completion=["a", "ABC", "b"])
    refused, unknown, none = (await reward(str(tmp_path), chat=True).score(batch)).objects("reward_error")
    assert "the chat template refuses a row: TemplateError: no turns" in str(refused)
    assert "the row has the token 12 and the model knows 0 to 11" in str(unknown)
    assert none is None
    with pytest.raises(DataError, match="`completion` of row 1 is 3"):
        await reward(llama).score(Batch.of(prompt=["a", "b"], completion=["a", 3]))


@pytest.mark.megatron
def test_folders_that_hold_no_judge_or_a_judge_alone(llama: str, tmp_path: Path) -> None:
    labels: dict[str, Any] = {**SHAPE, "num_labels": 3}
    three = save(tmp_path / "three", transformers.LlamaConfig(**labels))
    for role in (FsdpReward, MegatronReward):
        with pytest.raises(ModelError, match=r"three' has 3 labels \(LABEL_0, LABEL_1, LABEL_2\): a reward model must"):
            role(RewardModelConfig(model=three))
    with pytest.raises(ModelError, match="is a LlamaForSequenceClassification, not a causal language model"):
        TorchPolicy(PolicyConfig(model=llama))
