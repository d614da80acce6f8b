"""Reward models that are trained: scores and gradients are transformers' own, and what is saved judges as it did."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer, CohereConfig, CohereForCausalLM, LlamaConfig

from meshrl import (
    Batch,
    BradleyTerryLoss,
    ContractError,
    DataError,
    ModelError,
    ProcessLoss,
    Ragged,
    RewardModel,
    RewardModelConfig,
    RewardTrainingConfig,
    score_columns,
    score_metrics,
    with_labels,
)
from meshrl.mesh import Rank, rank_context
from meshrl_fsdp.reward import FsdpReward
from meshrl_fsdp.reward_model import FsdpRewardModel
from meshrl_hf.text import character_tokenizer
from meshrl_torch.reward import TorchReward
from meshrl_torch.reward_model import TorchRewardModel
from tests.backends.material import SHAPE, floats, norm_of

WORDS = ["abc", "abd", "hgf", "d", "hgd", "cab", "e", "gab"]
PAIRS = Batch.of(
    prompt=[f"{word}>" for word in WORDS for _ in range(2)],
    completion=[text for word in WORDS for text in (word[::-1], word + "a")],
    groups=np.repeat(np.arange(8), 2),
    preferred=np.array([1, -1, -1, 1, 1, -1, 0, 0, 1, -1, 1, -1, -1, 1, 1, -1], np.int8),
    least_margins=np.repeat(np.linspace(0, 1, 8).astype(np.float32), 2),
)
STEPS = Batch.of(
    prompt=["abc>", "h>", "abc>", "de>"],
    steps=[("c", "ba"), ("h",), ("cb", "a", "gg"), ("e", "d")],
    step_labels=[(1.0, 0.0), (True,), (1.0, 0.5, 0.0), (0.0, 1.0)],
)


def table(model: str, **changes: object) -> RewardTrainingConfig:
    return RewardTrainingConfig.model_validate({"model": model, "optimizer": {"lr": 1e-2}, **changes})


@pytest.fixture(scope="module")
def judge(random_model: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a classifier whose head is not zero."""
    shape: dict[str, Any] = {**SHAPE, "num_labels": 1}
    return random_model(
        LlamaConfig(**shape), tmp_path_factory.mktemp("judge") / "model", AutoModelForSequenceClassification
    )


async def scored(model: RewardModel, batch: Batch = PAIRS) -> Batch:
    return await score_columns(await model.token_scores(await model.encode(batch)))


class Plain:
    """Transformers' classifier with its own attention."""

    def __init__(self, folder: str) -> None:
        self.network: Any = AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager")

    def by_row(self, batch: Batch) -> list[Tensor]:
        """The score at each token, one row at a time."""
        rows: list[Tensor] = []
        for tokens in batch.tokens:
            states = self.network.model(input_ids=torch.from_numpy(tokens.astype(np.int64))[None]).last_hidden_state[0]
            rows.append(self.network.score(states)[:, 0])
        return rows


@pytest.mark.parametrize("budget", [16384, 12], ids=["one micro-batch", "several"])
async def test_scores_are_those_at_each_learned_token(judge: str, budget: int) -> None:
    made = TorchRewardModel(table(judge, micro_batch_tokens=budget))
    for batch in (PAIRS, STEPS):
        encoded = await made.encode(batch)
        found = await made.token_scores(encoded)
        expected = torch.cat(Plain(judge).by_row(encoded)).detach().numpy() * encoded.loss_mask.values
        assert np.abs(expected).max() > 0.1
        np.testing.assert_allclose(floats(found.ragged("token_scores").values), expected, atol=1e-5)
    assert len(await made.token_scores((await made.encode(PAIRS)).select([]))) == 0


async def test_a_text_is_scored_where_reward_judges_it_and_steps_where_they_end(judge: str) -> None:
    made = TorchRewardModel(table(judge))
    rewards = (await made.score(PAIRS)).rewards
    np.testing.assert_allclose(floats((await scored(made)).row("scores")), rewards, atol=1e-6)
    encoded = await made.encode(STEPS)
    assert [np.flatnonzero(mask).tolist() for mask in encoded.loss_mask] == [[4, 7], [3], [5, 6, 9], [3, 5]]
    assert (encoded.tokens[0] == (await made.encode(Batch.of(prompt=["abc>"], completion=["cba"]))).tokens[0]).all()


async def test_a_policys_folder_is_given_a_head_whose_scores_are_zero(small: str) -> None:
    made = TorchRewardModel(table(small))
    assert not (await made.score(PAIRS)).rewards.any()
    batch = await scored(made, PAIRS.drop("least_margins"))
    told = await made.update(batch, BradleyTerryLoss())
    assert told["loss"] == pytest.approx(np.log(2) * 7 / 8)  # one pair of eight prefers neither
    assert told["tokens"] == len(batch.tokens.values)
    assert (await made.score(PAIRS)).rewards.all()


@pytest.mark.parametrize("budget", [16384, 12], ids=["one micro-batch", "several"])
async def test_an_update_has_the_gradient_of_the_pairs(judge: str, budget: int) -> None:
    made = TorchRewardModel(table(judge, micro_batch_tokens=budget))
    batch, plain = await scored(made), Plain(judge)
    rows = torch.stack([row[-1] for row in plain.by_row(batch)])
    total = torch.zeros(())
    for pair in range(8):
        first = 2 * pair if PAIRS.row("preferred")[2 * pair] > 0 else 2 * pair + 1
        if PAIRS.row("preferred")[first]:
            better, worse = rows[first], rows[4 * pair + 1 - first]
            least = float(PAIRS.row("least_margins")[first])
            total = total - (better - worse - least).sigmoid().log() + 0.1 * (better + worse) ** 2
    (total / 8).backward()
    told = await made.update(batch, BradleyTerryLoss(centre=0.1))
    assert told["loss"] == pytest.approx(total.item() / 8, rel=1e-5)
    assert told["grad_norm"] == pytest.approx(norm_of(plain.network), rel=1e-4)
    assert told["drift"] < 1e-5


async def test_a_reward_model_learns_pairs_and_steps(small: str) -> None:
    pairs, steps = TorchRewardModel(table(small)), TorchRewardModel(table(small))
    labelled = await with_labels(await steps.encode(STEPS))
    losses: list[float] = []
    for _ in range(30):
        await pairs.update(await scored(pairs, PAIRS.drop("least_margins")), BradleyTerryLoss())
        losses.append((await steps.update(labelled, ProcessLoss()))["loss"])
    assert score_metrics(await scored(pairs, PAIRS.drop("least_margins")))["accuracy"] > 0.8
    assert losses[0] == pytest.approx(np.log(2))
    assert losses[-1] < 0.3


@pytest.mark.parametrize("backend", [TorchRewardModel, FsdpRewardModel])
async def test_what_is_saved_judges_as_the_model_did(
    small: str, backend: type[TorchRewardModel | FsdpRewardModel], tmp_path: Path
) -> None:
    made = backend(table(small))
    for _ in range(3):
        await made.update(await scored(made), BradleyTerryLoss())
    expected = (await made.score(PAIRS)).rewards
    assert np.abs(expected).max() > 0.01
    folder = str(tmp_path / "model")
    await made.save(folder)
    frozen = RewardModelConfig(model=folder)
    for reward in (TorchReward(frozen), FsdpReward(frozen), TorchRewardModel(table(folder)), backend(table(folder))):
        np.testing.assert_allclose((await reward.score(PAIRS)).rewards, expected, atol=1e-6)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    network = AutoModelForSequenceClassification.from_pretrained(folder)
    assert network.config.num_labels == 1
    pairs = zip(PAIRS.objects("prompt"), PAIRS.objects("completion"), strict=True)
    texts = [f"{prompt}{completion}{tokenizer.eos_token}" for prompt, completion in pairs]
    with torch.no_grad():
        logits = network(**tokenizer(texts, padding=True, return_tensors="pt")).logits[:, 0]
    np.testing.assert_allclose(logits.numpy(), expected, atol=1e-5)


async def test_what_a_reward_model_refuses(small: str) -> None:
    made = TorchRewardModel(table(small))
    short = (await scored(made)).assign(token_scores=Ragged.of([[0.0]] * 16, np.float32))
    with pytest.raises(DataError, match="row 0 has 8 tokens and 1 in `token_scores`"):
        await made.update(short, BradleyTerryLoss())
    with pytest.raises(DataError, match="row 1 cannot be judged: the row has 100 tokens"):
        await made.encode(Batch.of(prompt=["a>", "a>"], completion=["a", "a" * 97]))
    for steps, wrong in (("ab", "`steps` of row 0 is 'ab'"), ((), "row 0 has the steps"), (("a", ""), "needs a token")):
        with pytest.raises(DataError, match=wrong):
            await made.encode(Batch.of(prompt=["a>"], steps=[steps]))
    rank_context.set(Rank(size=2, threads=1))
    with pytest.raises(ContractError, match="TorchRewardModel trains on one rank, but its mesh has 2"):
        TorchRewardModel(table(small))


async def test_a_gradient_that_is_not_finite_names_what_a_reward_model_reads(small: str) -> None:
    for backend in (TorchRewardModel, FsdpRewardModel):
        made = backend(table(small))
        batch = await scored(made)
        wrong = batch.assign(margins=np.full(len(batch), np.nan, np.float32))
        with pytest.raises(ModelError, match=r"its norm is nan.*Look for `margins`.*scores.*optimizer\.lr"):
            await made.update(wrong, BradleyTerryLoss())
        assert (await made.update(batch, BradleyTerryLoss()))["grad_norm"] > 0


async def test_an_architecture_without_a_classifier(tmp_path: Path) -> None:
    CohereForCausalLM(CohereConfig(**SHAPE)).save_pretrained(tmp_path)
    character_tokenizer("abcdefgh>", 48).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="CohereForCausalLM, and transformers has no sequence classifier"):
        TorchRewardModel(table(str(tmp_path)))
