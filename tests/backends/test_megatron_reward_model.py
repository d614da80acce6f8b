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
    ModelError,
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
from tests.backends.material import SHAPE

pytestmark = pytest.mark.megatron

SIZES: dict[str, Any] = {**SHAPE, "pad_token_id": 0, "num_labels": 1}
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


@pytest.mark.parametrize(("kind", "dtype", "tolerance"), [("Llama", "float32", 1e-5), ("Qwen3, tied", "bfloat16", 0.1)])
async def test_a_judge_is_read_with_its_head_and_written_with_it(
    kind: str, dtype: str, tolerance: float, judge_of: Callable[[PretrainedConfig], str], tmp_path: Path
) -> None:
    folder = judge_of(SHAPES[kind])
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


async def test_a_frozen_judge_scores_as_in_the_torch_backend(judge_of: Callable[[PretrainedConfig], str]) -> None:
    batch = Batch.of(prompt=["abc>", "abd>", "abc>"], completion=["cba", "!", "abcabc"])  # "!" has no token
    for shape in SHAPES.values():
        config = RewardModelConfig(model=judge_of(shape))
        found, expected = await MegatronReward(config).score(batch), await TorchReward(config).score(batch)
        np.testing.assert_allclose(found.rewards, expected.rewards, atol=1e-5)
        assert found.objects("reward_error") == expected.objects("reward_error")


async def test_the_backend_fsdp_goes_on_from_a_checkpoint_and_back(
    judge_of: Callable[[PretrainedConfig], str], tmp_path: Path
) -> None:
    judge = judge_of(SHAPES["Llama"])
    own, other = MegatronRewardModel(table(judge)), FsdpRewardModel(table(judge))
    for source, target, name in ((own, other, "there"), (other, own, "back")):
        await learned(source)
        await source.checkpoint(str(tmp_path / name), wait=False)
        await source.written()
        await target.restore(str(tmp_path / name))
        assert await learned(target) == pytest.approx(await learned(source), rel=1e-4, abs=1e-5)
        np.testing.assert_allclose((await target.score(PAIRS)).rewards, (await source.score(PAIRS)).rewards, atol=1e-5)


def test_what_is_no_judge_is_refused(judge_of: Callable[[PretrainedConfig], str], tmp_path: Path) -> None:
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    character_tokenizer("abcdefgh>", 48).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="is a LlamaForCausalLM, not a sequence classifier"):
        MegatronReward(RewardModelConfig(model=str(tmp_path)))
    two: dict[str, Any] = {**SIZES, "num_labels": 2}
    with pytest.raises(ModelError, match="has 2 labels"):
        MegatronRewardModel(table(judge_of(LlamaConfig(**two))))
