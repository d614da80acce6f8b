"""A Megatron reward model of one rank: what it reads and writes is what the other backends do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import (
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    Qwen3Config,
)

from meshrl import (
    Batch,
    BradleyTerryLoss,
    CrossEntropy,
    DataError,
    ModelError,
    NewModel,
    RewardModel,
    RewardModelConfig,
    RewardTrainingConfig,
    score_columns,
)
from meshrl_fsdp.reward_model import FsdpRewardModel
from meshrl_hf.text import character_tokenizer
from meshrl_megatron.reward import MegatronReward
from meshrl_megatron.reward_model import MegatronRewardModel
from meshrl_torch.reward import TorchReward
from meshrl_torch.reward_model import TorchRewardModel

pytestmark = pytest.mark.megatron

NEW = NewModel(characters="abcdefgh>", hidden_size=16, ffn_size=24, layers=2, heads=2, max_tokens=48)
SIZES: dict[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 48,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "num_labels": 1,
}
SHAPES = {
    "Llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "Qwen3, tied": Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
}
WORDS = ["abc", "abd", "hgf", "d"]
PAIRS = Batch.of(
    prompt=[f"{word}>" for word in WORDS for _ in range(2)],
    completion=[text for word in WORDS for text in (word[::-1], word + "a")],
    groups=np.repeat(np.arange(4), 2),
    preferred=np.array([1, -1, -1, 1, 1, -1, 0, 0], np.int8),
)


@pytest.fixture
def judge_of(
    random_model: Callable[..., str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[PretrainedConfig], str]:
    """Makes the folder of a judge, whose every parameter is random."""
    return lambda config: random_model(config, tmp_path_factory.mktemp("judge"), AutoModelForSequenceClassification)


@pytest.fixture
def judge(judge_of: Callable[[PretrainedConfig], str]) -> str:
    return judge_of(SHAPES["Llama"])


def table(model: object, **changes: object) -> RewardTrainingConfig:
    return RewardTrainingConfig.model_validate({"model": model, "optimizer": {"lr": 1e-2, "eps": 1e-3}, **changes})


async def learned(model: RewardModel) -> dict[str, float]:
    return dict(
        (
            await model.update(
                await score_columns(await model.token_scores(await model.encode(PAIRS))), BradleyTerryLoss()
            )
        ).means()
    )


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_judge_is_read_with_its_head_and_written_with_it(
    shape: PretrainedConfig, dtype: str, judge_of: Callable[[PretrainedConfig], str], tmp_path: Path
) -> None:
    folder, tolerance = judge_of(shape), 1e-5 if dtype == "float32" else 0.1
    made = MegatronRewardModel(table(folder, dtype=dtype))
    expected = (await TorchRewardModel(table(folder, dtype=dtype)).score(PAIRS)).rewards
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose((await made.score(PAIRS)).rewards, expected, atol=tolerance)
    await learned(made)
    learnt = (await made.score(PAIRS)).rewards
    assert np.abs(learnt - expected).max() > 0.05
    await made.save(str(tmp_path / "saved"))
    again = TorchReward(RewardModelConfig(model=str(tmp_path / "saved"), dtype="float32"))
    np.testing.assert_allclose((await again.score(PAIRS)).rewards, learnt, atol=tolerance)


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_frozen_judge_scores_as_in_the_torch_backend(
    shape: str, judge_of: Callable[[PretrainedConfig], str]
) -> None:
    config = RewardModelConfig(model=judge_of(SHAPES[shape]))
    batch = Batch.of(prompt=["abc>", "abd>", "abc>"], completion=["cba", "!", "abcabc"])  # "!" has no token
    found, expected = await MegatronReward(config).score(batch), await TorchReward(config).score(batch)
    np.testing.assert_allclose(found.rewards, expected.rewards, atol=1e-5)
    assert found.objects("reward_error") == expected.objects("reward_error")


async def test_a_frozen_judge_is_no_generator(tmp_path: Path) -> None:
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    character_tokenizer("abcdefgh>", 48).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="is a LlamaForCausalLM, not a sequence classifier"):
        MegatronReward(RewardModelConfig(model=str(tmp_path)))


async def test_a_model_that_is_no_judge_scores_zero_and_learns_as_in_the_torch_backend(tmp_path: Path) -> None:
    own, plain = MegatronRewardModel(table(NEW)), TorchRewardModel(table(NEW))
    assert not (await own.score(PAIRS)).rewards.any()
    for _ in range(3):
        assert await learned(own) == pytest.approx(await learned(plain), rel=1e-4, abs=1e-5)
    rewards = (await own.score(PAIRS)).rewards
    assert np.abs(rewards).max() > 0.01
    np.testing.assert_allclose(rewards, (await plain.score(PAIRS)).rewards, atol=1e-5)


async def test_the_backend_fsdp_goes_on_from_a_checkpoint_and_back(judge: str, tmp_path: Path) -> None:
    own, other = MegatronRewardModel(table(judge)), FsdpRewardModel(table(judge))
    for source, target, name in ((own, other, "there"), (other, own, "back")):
        await learned(source)
        await source.checkpoint(str(tmp_path / name), wait=False)
        await source.written()
        await target.restore(str(tmp_path / name))
        assert await learned(target) == pytest.approx(await learned(source), rel=1e-4, abs=1e-5)
        np.testing.assert_allclose((await target.score(PAIRS)).rewards, (await source.score(PAIRS)).rewards, atol=1e-5)


async def test_what_a_megatron_reward_model_refuses(judge: str, judge_of: Callable[[PretrainedConfig], str]) -> None:
    made = MegatronRewardModel(table(judge))
    batch = await made.encode(PAIRS)
    with pytest.raises(DataError, match="this is a reward model"):
        await made.update(batch, CrossEntropy())
    two: dict[str, Any] = {**SIZES, "num_labels": 2}
    with pytest.raises(ModelError, match="has 2 labels"):
        MegatronRewardModel(table(judge_of(LlamaConfig(**two))))
