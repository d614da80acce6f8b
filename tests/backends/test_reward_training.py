"""Reward models that are trained: scores and gradients are transformers' own, and what is saved judges as it did."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer, CohereConfig, CohereForCausalLM

from meshrl import (
    Batch,
    BradleyTerryLoss,
    ContractError,
    CrossEntropy,
    DataError,
    ModelError,
    NewModel,
    PolicyConfig,
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
from meshrl_hf import checkpoint
from meshrl_hf.reward_head import ScoreModel
from meshrl_hf.text import character_tokenizer
from meshrl_torch.policy import TorchPolicy
from meshrl_torch.reward import TorchReward
from meshrl_torch.reward_model import TorchRewardModel

MODEL = NewModel(characters="abcdefgh>", hidden_size=16, ffn_size=24, layers=2, heads=2, max_tokens=48)

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


@pytest.fixture(scope="module")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A policy's folder, far from its initialisation."""
    rank_context.set(Rank(threads=1))
    policy = TorchPolicy(PolicyConfig(model=MODEL))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in policy._model.network.parameters():
            parameter.add_(torch.randn_like(parameter) / 5)
    folder = tmp_path_factory.mktemp("policy") / "model"
    checkpoint.write(policy._model, str(folder))
    return str(folder)


def table(model: object, **changes: object) -> RewardTrainingConfig:
    return RewardTrainingConfig.model_validate({"model": model, "optimizer": {"lr": 1e-2}, **changes})


def judging(model: object, **changes: object) -> TorchRewardModel:
    """A reward model whose head is not zero."""
    made = TorchRewardModel(table(model, **changes))
    shaken(made._judge)
    return made


def shaken(judge: ScoreModel) -> None:
    with torch.no_grad():
        weight = judge.head.weight
        weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)) / 2)


def floats(array: np.ndarray[Any, Any]) -> NDArray[np.float32]:
    return np.asarray(array, np.float32)


def by_row(judge: ScoreModel, batch: Batch) -> list[Tensor]:
    """The score at each token by transformers' own attention, one row at a time."""
    network = judge.model.network
    network.set_attn_implementation("eager")
    rows: list[Tensor] = []
    for tokens in batch.tokens:
        ids = torch.from_numpy(tokens.astype(np.int64))
        states = network.base_model(input_ids=ids[None]).last_hidden_state[0]
        rows.append(judge.head(states)[:, 0])
    network.set_attn_implementation("meshrl")
    return rows


@pytest.mark.parametrize("budget", [16384, 12], ids=["one micro-batch", "several"])
async def test_scores_are_those_at_each_learned_token(policy_folder: str, budget: int) -> None:
    made = judging(policy_folder, micro_batch_tokens=budget)
    for batch in (PAIRS, STEPS):
        encoded = await made.encode(batch)
        scored = await made.token_scores(encoded)
        expected = torch.cat(by_row(made._judge, encoded)).detach().numpy() * encoded.loss_mask.values
        assert np.abs(expected).max() > 0.1
        np.testing.assert_allclose(floats(scored.ragged("token_scores").values), expected, atol=1e-5)
    assert len(await made.token_scores((await made.encode(PAIRS)).select([]))) == 0


async def test_a_text_is_scored_where_reward_judges_it_and_steps_where_they_end(policy_folder: str) -> None:
    made = judging(policy_folder)
    scored = await score_columns(await made.token_scores(await made.encode(PAIRS)))
    rewards = (await made.score(PAIRS)).rewards
    np.testing.assert_allclose(floats(scored.row("scores")), rewards, atol=1e-6)
    encoded = await made.encode(STEPS)
    assert [np.flatnonzero(mask).tolist() for mask in encoded.loss_mask] == [[4, 7], [3], [5, 6, 9], [3, 5]]
    assert (encoded.tokens[0] == (await made.encode(Batch.of(prompt=["abc>"], completion=["cba"]))).tokens[0]).all()


async def test_a_policys_folder_is_given_a_head_whose_scores_are_zero(policy_folder: str) -> None:
    made = TorchRewardModel(table(policy_folder))
    assert not (await made.score(PAIRS)).rewards.any()
    batch = await score_columns(await made.token_scores(await made.encode(PAIRS.drop("least_margins"))))
    told = await made.update(batch, BradleyTerryLoss())
    assert told["loss"] == pytest.approx(np.log(2) * 7 / 8)  # one pair of eight prefers neither
    assert told["tokens"] == len(batch.tokens.values)
    assert (await made.score(PAIRS)).rewards.all()


@pytest.mark.parametrize("budget", [16384, 12], ids=["one micro-batch", "several"])
async def test_an_update_has_the_gradient_of_the_pairs(policy_folder: str, budget: int) -> None:
    made = judging(policy_folder, micro_batch_tokens=budget)
    batch = await score_columns(await made.token_scores(await made.encode(PAIRS)))
    rows = torch.stack([row[-1] for row in by_row(made._judge, batch)])
    total = torch.zeros(())
    for pair in range(8):
        first = 2 * pair if PAIRS.row("preferred")[2 * pair] > 0 else 2 * pair + 1
        if PAIRS.row("preferred")[first]:
            better, worse = rows[first], rows[4 * pair + 1 - first]
            least = float(PAIRS.row("least_margins")[first])
            total = total - (better - worse - least).sigmoid().log() + 0.1 * (better + worse) ** 2
    (total / 8).backward()
    gradients = [each.grad for each in made._judge.model.network.parameters() if each.grad is not None]
    norm = torch.cat([each.flatten() for each in gradients]).norm()
    told = await made.update(batch, BradleyTerryLoss(centre=0.1))
    assert told["loss"] == pytest.approx(total.item() / 8, rel=1e-5)
    assert told["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert told["drift"] < 1e-6


async def test_a_reward_model_learns_pairs_and_steps(policy_folder: str) -> None:
    pairs, steps = TorchRewardModel(table(policy_folder)), TorchRewardModel(table(policy_folder))
    labelled = await with_labels(await steps.encode(STEPS))
    losses: list[float] = []
    for _ in range(30):
        scored = await score_columns(await pairs.token_scores(await pairs.encode(PAIRS.drop("least_margins"))))
        await pairs.update(scored, BradleyTerryLoss())
        losses.append((await steps.update(labelled, ProcessLoss()))["loss"])
    scored = await score_columns(await pairs.token_scores(await pairs.encode(PAIRS.drop("least_margins"))))
    assert score_metrics(scored)["accuracy"] > 0.8
    assert losses[0] == pytest.approx(np.log(2))
    assert losses[-1] < 0.3


@pytest.mark.parametrize("backend", [TorchRewardModel, FsdpRewardModel])
async def test_what_is_saved_judges_as_the_model_did(
    policy_folder: str, backend: type[TorchRewardModel | FsdpRewardModel], tmp_path: Path
) -> None:
    made = backend(table(policy_folder))
    for _ in range(3):
        await made.update(await score_columns(await made.token_scores(await made.encode(PAIRS))), BradleyTerryLoss())
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


async def test_fsdp_learns_as_torch_does(policy_folder: str) -> None:
    own, plain = FsdpRewardModel(table(policy_folder)), TorchRewardModel(table(policy_folder))
    for batch in (PAIRS, PAIRS.select(np.arange(4, 10))):
        told = [
            (
                await each.update(
                    await score_columns(await each.token_scores(await each.encode(batch))), BradleyTerryLoss()
                )
            ).means()
            for each in (own, plain)
        ]
        assert told[0] == pytest.approx(told[1], rel=1e-4, abs=1e-6)
    labelled = await with_labels(await own.encode(STEPS))
    assert (await own.update(labelled, ProcessLoss()))["accuracy"] == (await plain.update(labelled, ProcessLoss()))[
        "accuracy"
    ]


@pytest.mark.parametrize("backend", [TorchRewardModel, FsdpRewardModel])
async def test_a_restored_model_goes_on_to_the_bit(
    policy_folder: str, backend: type[TorchRewardModel | FsdpRewardModel], tmp_path: Path
) -> None:
    async def goes_on(model: RewardModel) -> tuple[Mapping[str, float], bytes]:
        told = await model.update(
            await score_columns(await model.token_scores(await model.encode(PAIRS))), BradleyTerryLoss()
        )
        return told.means(), (await model.score(PAIRS)).rewards.tobytes()

    made = backend(table(policy_folder))
    for _ in range(2):
        await goes_on(made)
    await made.checkpoint(str(tmp_path / "state"), wait=False)
    await made.written()
    expected = await goes_on(made)
    again = backend(table(policy_folder))
    await again.restore(str(tmp_path / "state"))
    assert await goes_on(again) == expected


async def test_what_a_reward_model_refuses(policy_folder: str, tmp_path: Path) -> None:
    made = TorchRewardModel(table(policy_folder))
    batch = await made.encode(PAIRS)
    with pytest.raises(DataError, match="this is a reward model"):
        await made.update(batch, CrossEntropy())
    with pytest.raises(DataError, match="no column `token_scores`"):
        await made.update(batch, BradleyTerryLoss())
    scored = await score_columns(await made.token_scores(batch))
    short = scored.assign(token_scores=Ragged.of([[0.0]] * 16, np.float32))
    with pytest.raises(DataError, match="row 0 has 8 tokens and 1 in `token_scores`"):
        await made.update(short, BradleyTerryLoss())
    with pytest.raises(DataError, match="row 1 cannot be judged: the row has 100 tokens"):
        await made.encode(Batch.of(prompt=["a>", "a>"], completion=["a", "a" * 97]))
    for steps, wrong in (("ab", "`steps` of row 0 is 'ab'"), ((), "row 0 has the steps"), (("a", ""), "needs a token")):
        with pytest.raises(DataError, match=wrong):
            await made.encode(Batch.of(prompt=["a>"], steps=[steps]))
    folder = str(tmp_path / "state")
    await made.checkpoint(folder)
    with pytest.raises(ModelError, match="is the state of a reward model, not of a policy"):
        await TorchPolicy(PolicyConfig(model=policy_folder)).restore(folder)
    rank_context.set(Rank(size=2, threads=1))
    with pytest.raises(ContractError, match="TorchRewardModel trains on one rank, but its mesh has 2"):
        TorchRewardModel(table(policy_folder))


@pytest.mark.parametrize("backend", [TorchRewardModel, FsdpRewardModel])
async def test_a_gradient_that_is_not_finite_names_what_a_reward_model_reads(
    policy_folder: str, backend: type[TorchRewardModel | FsdpRewardModel]
) -> None:
    made = backend(table(policy_folder))
    scored = await score_columns(await made.token_scores(await made.encode(PAIRS)))
    wrong = scored.assign(margins=np.full(len(scored), np.nan, np.float32))
    with pytest.raises(ModelError, match=r"its norm is nan.*Look for `margins`.*scores.*optimizer\.lr"):
        await made.update(wrong, BradleyTerryLoss())
    assert (await made.update(scored, BradleyTerryLoss()))["grad_norm"] > 0


async def test_an_architecture_without_a_classifier(tmp_path: Path) -> None:
    shape: dict[str, Any] = {"vocab_size": 12, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    config = CohereConfig(**shape, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=48)
    CohereForCausalLM(config).save_pretrained(tmp_path)
    character_tokenizer("abcdefgh>", 48).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="CohereForCausalLM, and transformers has no sequence classifier"):
        TorchRewardModel(table(str(tmp_path)))
