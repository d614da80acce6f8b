"""Reward models that are trained: scores and gradients are transformers' own, and what is saved judges as it did."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

import meshrl as rl
from meshrl_fsdp.reward import FsdpReward
from meshrl_fsdp.reward_model import FsdpRewardModel
from meshrl_hf.text import character_tokenizer
from meshrl_megatron.reward_model import MegatronRewardModel
from meshrl_torch.reward import TorchReward
from meshrl_torch.reward_model import TorchRewardModel
from tests.backends.material import SHAPE, floats, norm_of

WORDS = ["abc", "abd", "hgf", "d", "hgd", "cab", "e", "gab"]
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


@pytest.fixture(scope="module")
def judge(random_model: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a classifier whose head is not zero."""
    shape: dict[str, Any] = {**SHAPE, "num_labels": 1}
    return random_model(
        transformers.LlamaConfig(**shape),
        tmp_path_factory.mktemp("judge") / "model",
        transformers.AutoModelForSequenceClassification,
    )


async def scored(model: rl.RewardModel, batch: rl.Batch = PAIRS) -> rl.Batch:
    return await rl.score_columns(await model.token_scores(await model.encode(batch)))


class Plain:
    """Transformers' classifier with its own attention."""

    def __init__(self, folder: str) -> None:
        self.network: Any = transformers.AutoModelForSequenceClassification.from_pretrained(
            folder, attn_implementation="eager"
        )

    def by_row(self, batch: rl.Batch) -> list[Tensor]:
        """The score at each token, one row at a time."""
        rows: list[Tensor] = []
        for tokens in batch.tokens:
            states = self.network.model(input_ids=torch.from_numpy(tokens.astype(np.int64))[None]).last_hidden_state[0]
            rows.append(self.network.score(states)[:, 0])
        return rows


async def test_scores_are_those_at_each_learned_token(judge: str) -> None:
    for budget in (16384, 12):
        made = TorchRewardModel(table(judge, micro_batch_tokens=budget))
        for batch in (PAIRS, STEPS):
            encoded = await made.encode(batch)
            found = await made.token_scores(encoded)
            expected = torch.cat(Plain(judge).by_row(encoded)).detach().numpy() * encoded.loss_mask.values
            assert np.abs(expected).max() > 0.1
            np.testing.assert_allclose(floats(found.ragged("token_scores").values), expected, atol=1e-5)


async def test_a_text_is_scored_where_reward_judges_it_and_steps_where_they_end(judge: str) -> None:
    made = TorchRewardModel(table(judge))
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


async def test_an_update_has_the_gradient_of_the_pairs(judge: str) -> None:
    batch, plain = await scored(TorchRewardModel(table(judge))), Plain(judge)
    rows = torch.stack([row[-1] for row in plain.by_row(batch)])
    total = torch.zeros(())
    for pair in range(8):
        first = 2 * pair if PAIRS.row("preferred")[2 * pair] > 0 else 2 * pair + 1
        if PAIRS.row("preferred")[first]:
            better, worse = rows[first], rows[4 * pair + 1 - first]
            least = float(PAIRS.row("least_margins")[first])
            total = total - (better - worse - least).sigmoid().log() + 0.1 * (better + worse) ** 2
    (total / 8).backward()
    for budget in (16384, 12):
        made = TorchRewardModel(table(judge, micro_batch_tokens=budget))
        told = await made.update(batch, rl.BradleyTerryLoss(centre=0.1))
        assert told["loss"] == pytest.approx(total.item() / 8, rel=1e-5)
        assert told["grad_norm"] == pytest.approx(norm_of(plain.network), rel=1e-4)
        assert told["drift"] < 1e-5


async def test_a_reward_model_learns_steps(small: str) -> None:
    made = TorchRewardModel(table(small))
    labelled = await rl.with_labels(await made.encode(STEPS))
    losses = [(await made.update(labelled, rl.ProcessLoss()))["loss"] for _ in range(12)]
    assert losses[0] == pytest.approx(np.log(2))
    assert losses[-1] < 0.5


@pytest.mark.megatron
async def test_megatron_and_fsdp_read_a_judge_and_go_on_from_each_others_checkpoints(
    random_model: Callable[..., str], tmp_path: Path
) -> None:
    shape: dict[str, Any] = {**SHAPE, "num_labels": 1}
    qwen = transformers.Qwen3Config(**shape, head_dim=16, pad_token_id=0, tie_word_embeddings=True)
    judge = random_model(qwen, tmp_path / "judge", transformers.AutoModelForSequenceClassification)
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
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    network = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    assert network.config.num_labels == 1
    pairs = zip(PAIRS.objects("prompt"), PAIRS.objects("completion"), strict=True)
    texts = [f"{prompt}{completion}{tokenizer.eos_token}" for prompt, completion in pairs]
    with torch.no_grad():
        logits = network(**tokenizer(texts, padding=True, return_tensors="pt")).logits[:, 0]
    np.testing.assert_allclose(logits.numpy(), expected, atol=1e-5)


async def test_what_a_reward_model_refuses(small: str) -> None:
    made = TorchRewardModel(table(small))
    short = (await scored(made)).assign(token_scores=rl.Ragged.of([[0.0]] * 16, np.float32))
    with pytest.raises(rl.DataError, match="row 0 has 8 tokens and 1 in `token_scores`"):
        await made.update(short, rl.BradleyTerryLoss())
    with pytest.raises(rl.DataError, match="row 1 cannot be judged: the row has 100 tokens"):
        await made.encode(rl.Batch.of(prompt=["a>", "a>"], completion=["a", "a" * 97]))
    for steps, wrong in (("ab", "`steps` of row 0 is 'ab'"), ((), "row 0 has the steps"), (("a", ""), "needs a token")):
        with pytest.raises(rl.DataError, match=wrong):
            await made.encode(rl.Batch.of(prompt=["a>"], steps=[steps]))


async def test_an_architecture_without_a_classifier(tmp_path: Path) -> None:
    transformers.CohereForCausalLM(transformers.CohereConfig(**SHAPE)).save_pretrained(tmp_path)
    character_tokenizer("abcdefgh>", 48).save_pretrained(tmp_path)
    with pytest.raises(rl.ModelError, match="CohereForCausalLM, and transformers has no sequence classifier"):
        TorchRewardModel(table(str(tmp_path)))
