import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog.testing
import torch
import transformers
from torch import Tensor

import meshrl as rl
from meshrl.errors import DataError, ModelError
from meshrl_megatron.roles import MegatronReward, MegatronRewardModel
from meshrl_torch.model.text import character_tokenizer
from meshrl_torch.options import FsdpConfig
from meshrl_torch.train.fsdp.roles import FsdpReward, FsdpRewardModel
from meshrl_torch.train.one_rank import TorchPolicy, TorchReward, TorchRewardModel
from tests.backends.material import GPT2, SHAPE, ModelOf, changed, floats, norm_of

WORDS = ["abc", "abd", "hgf", "d", "hgd", "cab", "e", "gab"]
JUDGE: dict[str, Any] = {**SHAPE, "num_labels": 1}
PAIRS = rl.Batch.of(
    prompt=[f"{word}>" for word in WORDS for _ in range(2)],
    completion=[text for word in WORDS for text in (word[::-1], word + "a")],
    groups=np.repeat(np.arange(8), 2),
    preferred=np.array([1, -1, -1, 1, 1, -1, 0, 0, 1, -1, 1, -1, -1, 1, 1, -1], np.int8),
    least_margins=np.repeat(np.linspace(0, 1, 8).astype(np.float32), 2),
)
STEPS = rl.Batch.of(
    prompt=["abc>", "h>", "abc>", "de>"],
    steps=[("c", "ba"), ("h",), ("cb", "a", "gg"), ("e", "d")],
    step_labels=[(1.0, 0.0), (True,), (1.0, 0.5, 0.0), (0.0, 1.0)],
)


def table(model: str, **changes: object) -> rl.RewardTrainingConfig:
    return rl.RewardTrainingConfig.model_validate({"model": model, "optimizer": {"lr": 1e-2}, **changes})


async def scored(model: rl.RewardModel, batch: rl.Batch = PAIRS) -> rl.Batch:
    return await rl.score_columns(await model.token_scores(await model.encode(batch)))


def classifier(folder: str) -> Any:
    return transformers.AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager")


def by_row(network: Any, batch: rl.Batch) -> list[Tensor]:
    ids = [torch.from_numpy(tokens.astype(np.int64))[None] for tokens in batch.tokens]
    return [network.score(network.model(input_ids=each).last_hidden_state[0])[:, 0] for each in ids]


async def test_scores_are_those_at_each_learned_token(llama: str) -> None:
    for budget in (16384, 12):
        made = TorchRewardModel(table(llama, micro_batch_tokens=budget))
        for batch in (PAIRS, STEPS):
            encoded = await made.encode(batch)
            found = await made.token_scores(encoded)
            expected = torch.cat(by_row(classifier(llama), encoded)).detach().numpy() * encoded.loss_mask.values
            assert np.abs(expected).max() > 0.1
            np.testing.assert_allclose(floats(found.ragged("token_scores").values), expected, atol=1e-5)


async def test_a_text_is_scored_where_reward_judges_it_and_steps_where_they_end(llama: str) -> None:
    made = TorchRewardModel(table(llama))
    rewards = (await made.score(PAIRS)).rewards
    np.testing.assert_allclose(floats((await scored(made)).row("scores")), rewards, atol=1e-6)
    encoded = await made.encode(STEPS)
    assert [np.flatnonzero(mask).tolist() for mask in encoded.loss_mask] == [[4, 7], [3], [5, 6, 9], [3, 5]]
    assert (encoded.tokens[0] == (await made.encode(rl.Batch.of(prompt=["abc>"], completion=["cba"]))).tokens[0]).all()


async def test_a_policys_folder_is_given_a_head_whose_scores_are_zero(small: str) -> None:
    made = TorchRewardModel(table(small))
    assert not (await made.score(PAIRS)).rewards.any()
    batch = await scored(made, PAIRS.drop("least_margins"))
    told = await made.update(batch, rl.BradleyTerryLoss())
    assert told["loss"] == pytest.approx(np.log(2) * 7 / 8)  # one pair of eight prefers neither
    assert told["tokens"] == len(batch.tokens.values)
    assert (await made.score(PAIRS)).rewards.all()


async def test_an_update_has_the_gradient_of_the_pairs(llama: str) -> None:
    batch, plain = await scored(TorchRewardModel(table(llama))), classifier(llama)
    rows = torch.stack([row[-1] for row in by_row(plain, batch)])
    total = torch.zeros(())
    for pair in range(8):
        first = 2 * pair if PAIRS.row("preferred")[2 * pair] > 0 else 2 * pair + 1
        if PAIRS.row("preferred")[first]:
            better, worse = rows[first], rows[4 * pair + 1 - first]
            least = float(PAIRS.row("least_margins")[first])
            total = total - (better - worse - least).sigmoid().log() + 0.1 * (better + worse) ** 2
    (total / 8).backward()
    for budget in (16384, 12):
        made = TorchRewardModel(table(llama, micro_batch_tokens=budget))
        told = await made.update(batch, rl.BradleyTerryLoss(centre=0.1))
        assert told["loss"] == pytest.approx(total.item() / 8, rel=1e-5)
        assert told["grad_norm"] == pytest.approx(norm_of(plain), rel=1e-4)
        assert told["drift"] < 1e-5


@pytest.mark.megatron
async def test_megatron_and_fsdp_go_on_from_each_others_checkpoints(model_of: ModelOf, tmp_path: Path) -> None:
    qwen = transformers.Qwen3Config(**JUDGE, head_dim=16, pad_token_id=0, tie_word_embeddings=True)
    judge = model_of(qwen, auto=transformers.AutoModelForSequenceClassification)
    own, other = (role(table(judge)) for role in (MegatronRewardModel, FsdpRewardModel))
    for source, target, name in ((own, other, "there"), (other, own, "back")):
        await source.update(await scored(source), rl.BradleyTerryLoss())
        await source.checkpoint(str(tmp_path / name), wait=False)
        await source.written()
        await target.restore(str(tmp_path / name))
        told = [(await each.update(await scored(each), rl.BradleyTerryLoss())).means() for each in (source, target)]
        assert told[0] == pytest.approx(told[1], rel=1e-4, abs=1e-5)
        np.testing.assert_allclose((await target.score(PAIRS)).rewards, (await source.score(PAIRS)).rewards, atol=1e-5)
    assert np.abs((await own.score(PAIRS)).rewards).max() > 0.5
    await own.save(str(tmp_path / "saved"))
    again = TorchReward(rl.RewardModelConfig(model=str(tmp_path / "saved"), dtype="float32"))
    np.testing.assert_allclose((await again.score(PAIRS)).rewards, (await own.score(PAIRS)).rewards, atol=1e-5)


@pytest.mark.parametrize("backend", [TorchRewardModel, FsdpRewardModel])
async def test_what_is_saved_judges_as_the_model_did(
    small: str, backend: type[TorchRewardModel | FsdpRewardModel], tmp_path: Path
) -> None:
    made = backend(table(small))
    for _ in range(3):
        await made.update(await scored(made), rl.BradleyTerryLoss())
    assert rl.score_metrics(await scored(made))["accuracy"] > 0.8
    expected = (await made.score(PAIRS)).rewards
    folder = str(tmp_path / "model")
    await made.save(folder)
    frozen = rl.RewardModelConfig(model=folder)
    for reward in (TorchReward(frozen), FsdpReward(frozen), TorchRewardModel(table(folder)), backend(table(folder))):
        np.testing.assert_allclose((await reward.score(PAIRS)).rewards, expected, atol=1e-6)
    assert classifier(folder).config.num_labels == 1
    np.testing.assert_allclose(judged(folder, chat=False, batch=PAIRS), expected, atol=1e-5)


async def test_what_a_reward_model_refuses(small: str, tmp_path: Path) -> None:
    made = TorchRewardModel(table(small))
    short = (await scored(made)).assign(token_scores=rl.Ragged.of([[0.0]] * 16, np.float32))
    with pytest.raises(DataError, match="row 0 has 8 tokens and 1 in `token_scores`"):
        await made.update(short, rl.BradleyTerryLoss())
    for steps, wrong in (("ab", "`steps` of row 0 is 'ab'"), ((), "row 0 has the steps"), (("a", ""), "needs a token")):
        with pytest.raises(DataError, match=wrong):
            await made.encode(rl.Batch.of(prompt=["a>"], steps=[steps]))
    transformers.CohereForCausalLM(transformers.CohereConfig(**SHAPE)).save_pretrained(tmp_path)
    character_tokenizer("abcdefgh>", 48).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="CohereForCausalLM, and transformers has no sequence classifier"):
        TorchRewardModel(table(str(tmp_path)))


SMALL: dict[str, Any] = {**JUDGE, "vocab_size": 12, "hidden_size": 16, "head_dim": 4}
CLASSIFIERS = [
    transformers.LlamaConfig(**SMALL),
    transformers.Qwen3Config(**SMALL),
    transformers.GPT2Config(**changed(GPT2, vocab_size=12, num_labels=1)),
    transformers.LlamaConfig(**SMALL, pad_token_id=1),  # the token that ends a text: the score is of the one before
    transformers.LlamaConfig(**SMALL, pad_token_id=0),
]
TURN = "{{ '>' if each.role == 'user' else '<' }}{{ each.content }}{{ eos_token }}"
TEMPLATE = f"{{% for each in messages %}}{TURN}{{% endfor %}}"
ROWS = rl.Batch.of(
    prompt=["abc", "abc", "abc", "h", "", "abc", "h", "gfedcba"],
    completion=["", "de", "d", "hhhhhhhhhh", "a", "de", "f", "abcdefgh" * 3],
)
"""Groups of a prompt, one row twice, one row of its prompt alone, and texts without a character."""


@pytest.fixture(scope="module")
def judge_of(model_of: ModelOf) -> ModelOf:
    def save(config: transformers.PretrainedConfig) -> str:
        folder = model_of(config, auto=transformers.AutoModelForSequenceClassification)
        tokenizer = character_tokenizer("abcdefgh><", 48)
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(folder)
        return folder

    return save


@pytest.fixture(scope="module")
def llama(judge_of: ModelOf) -> str:
    return judge_of(transformers.LlamaConfig(**SMALL))


def reward(folder: str, backend: str = "torch", **changes: object) -> rl.Reward:
    config = rl.RewardModelConfig.model_validate({"model": folder, "backend": backend, **changes})
    return FsdpReward(config) if backend == "fsdp" else TorchReward(config)


def judged(folder: str, chat: bool, batch: rl.Batch = ROWS) -> list[float]:
    network, tokenizer = classifier(folder), transformers.AutoTokenizer.from_pretrained(folder)
    scores: list[float] = []
    for prompt, completion in zip(batch.objects("prompt"), batch.objects("completion"), strict=True):
        turns = [{"role": "user", "content": str(prompt)}, {"role": "assistant", "content": str(completion)}]
        text = str(tokenizer.apply_chat_template(turns, tokenize=False)) if chat else f"{prompt}{completion}<eos>"
        ids = tokenizer(text, add_special_tokens=not chat, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            scores.append(float(network(input_ids=ids).logits[0, 0]))
    return scores


async def test_a_score_is_what_transformers_gives_the_row_alone(judge_of: ModelOf) -> None:
    for config in CLASSIFIERS:
        judge = judge_of(config)
        for chat, batch in ((True, ROWS), (False, ROWS.select([0, 1, 2, 3, 5, 6, 7]))):  # one prompt has no token
            expected = judged(judge, chat, batch)
            assert np.ptp(expected) > 0.1
            for backend in ("torch", "fsdp"):
                found = await reward(judge, backend, chat=chat).score(batch)
                assert found.rewards.dtype == np.float32
                np.testing.assert_allclose(found.rewards, expected, atol=1e-5, err_msg=f"{backend}: {config}")
                assert found.objects("reward_error") == (None,) * len(batch)


async def test_neither_micro_batches_nor_the_order_of_rows_nor_sharding_change_the_scores(llama: str) -> None:
    expected = np.array(judged(llama, chat=True))
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
    none = (await made.score(ROWS.select([]))).rewards
    assert (none.shape, none.dtype.name) == ((0,), "float32")


@pytest.mark.parametrize(("backend", "chat"), [("torch", False), ("fsdp", True)])
async def test_a_row_that_cannot_be_judged_costs_the_others_nothing(llama: str, backend: str, chat: bool) -> None:
    batch = rl.Batch.of(prompt=["abc", "a!c", "abc", "abc"], completion=["de", "d", "d" * 46, "h"])
    made = reward(llama, backend, chat=chat)
    with structlog.testing.capture_logs() as logs:
        found = await made.score(batch)
        await made.score(batch)
    good = batch.select([0, 3])
    np.testing.assert_allclose(found.rewards[[0, 3]], judged(llama, chat, good), atol=1e-5)
    assert np.isnan(found.rewards).tolist() == [False, True, True, False]
    first, strange, long, last = found.objects("reward_error")
    assert "has '!', which the tokenizer does not know" in str(strange)
    assert f"the row has {53 if chat else 50} tokens and the model takes at most 48" in str(long)
    assert first is last is None
    assert [each["rows"] for each in logs if each["log_level"] == "warning"] == [2]


async def test_other_rows_that_cannot_be_judged(llama: str, tmp_path: Path) -> None:
    (error,) = (await reward(llama).score(ROWS.select([4]))).objects("reward_error")
    assert "the prompt '' has no token" in str(error)
    shutil.copytree(llama, tmp_path, dirs_exist_ok=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(llama)
    tokenizer.add_tokens(["ABC"])
    tokenizer.chat_template = "{{ raise_exception('no turns') if messages[0].content == 'h' }}" + TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    batch = rl.Batch.of(prompt=["h", "a", "a"], completion=["a", "ABC", "b"])
    refused, unknown, none = (await reward(str(tmp_path), chat=True).score(batch)).objects("reward_error")
    assert "the chat template refuses a row: TemplateError: no turns" in str(refused)
    assert "the row has the token 12 (ABC) and the model knows 0 to 11" in str(unknown)
    assert none is None
    with pytest.raises(DataError, match="`completion` of row 1 is 3"):
        await reward(llama).score(rl.Batch.of(prompt=["a", "b"], completion=["a", 3]))


@pytest.mark.megatron
def test_folders_that_hold_no_judge_or_a_judge_alone(llama: str, judge_of: ModelOf) -> None:
    three = judge_of(transformers.LlamaConfig(**changed(SMALL, num_labels=3)))
    for role in (FsdpReward, MegatronReward):
        with pytest.raises(ModelError, match=r" has 3 labels \(LABEL_0, LABEL_1, LABEL_2\): a reward model must"):
            role(rl.RewardModelConfig(model=three))
    with pytest.raises(ModelError, match="is a LlamaForSequenceClassification, not a causal language model"):
        TorchPolicy(rl.PolicyConfig(model=llama))
