"""A reward whose model is split over two processes: its scores are those of one rank."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from transformers import AutoModelForSequenceClassification, LlamaConfig, PretrainedConfig, Qwen3Config

from meshrl import Batch, DataError, Mesh, RankFailed, Reward, RewardModelConfig
from meshrl_fsdp.reward import FsdpReward
from meshrl_megatron.reward import MegatronReward
from meshrl_torch.reward import TorchReward

pytestmark = pytest.mark.asyncio(loop_scope="session")

SHAPE: dict[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 48,
    "num_labels": 1,
}


def rows(count: int) -> Batch:
    """Rows of many lengths, some of one prompt; the fourth is none that a judge can read."""
    texts = [("abcdefgh" * (1 + row % 2), "hgfedcba"[: row % 5] * (1 + row % 4)) for row in range(count)]
    return Batch.of(
        prompt=[prompt for prompt, _ in texts],
        completion=["!" if row == 3 else completion for row, (_, completion) in enumerate(texts)],
    )


@pytest_asyncio.fixture(loop_scope="session")
async def two(warm: Callable[[int], Awaitable[Mesh]]) -> Mesh:
    """Two ranks."""
    return await warm(2)


LLAMA, QWEN3 = LlamaConfig(**SHAPE), Qwen3Config(**SHAPE)


@pytest.fixture
def judge(request: pytest.FixtureRequest, random_model: Callable[..., str], tmp_path: Path) -> str:
    """The folder of a judge."""
    return random_model(request.param, tmp_path / "model", AutoModelForSequenceClassification)


async def spawn(mesh: Mesh, judge: str, backend: str = "fsdp", budget: int = 64) -> Reward:
    config = RewardModelConfig(backend=backend, model=judge, micro_batch_tokens=budget)
    return await mesh.spawn(MegatronReward if backend == "megatron" else FsdpReward, config)


SPLITS = [
    *((model, "fsdp", shape) for model in (LLAMA, QWEN3) for shape in ({"dp": 2}, {"dp": 1, "tp": 2})),
    *(
        pytest.param(LLAMA, "megatron", {"dp": 1, axis: 2}, marks=pytest.mark.megatron)
        for axis in ("dp", "tp", "pp", "cp")
    ),
]


@pytest.mark.parametrize(
    ("judge", "backend", "shape"),
    SPLITS,
    ids=lambda value: value.model_type if isinstance(value, PretrainedConfig) else str(value),
    indirect=["judge"],
)
async def test_scores_are_those_of_one_rank(two: Mesh, judge: str, backend: str, shape: dict[str, int]) -> None:
    made = await spawn(two.shape(**shape), judge, backend)
    whole = TorchReward(RewardModelConfig(model=judge))
    for count in (9, 1, 2, 0, 9):  # of one row, one rank has none
        batch = rows(count)
        found, expected = await made.score(batch), await whole.score(batch)
        np.testing.assert_allclose(found.rewards, expected.rewards, atol=1e-5)
        assert found.objects("reward_error") == expected.objects("reward_error")
    assert np.ptp(expected.rewards) > 0.1
    assert [error is None for error in expected.objects("reward_error")] == [row != 3 for row in range(9)]


@pytest.mark.timeout(300)  # a micro-batch for each token waits for the other process each time: long on a busy machine
@pytest.mark.parametrize("judge", [LLAMA], ids=["llama"], indirect=True)
async def test_a_row_that_no_rank_can_take_leaves_the_others_free(two: Mesh, judge: str) -> None:
    made = await spawn(two.shape(dp=2), judge, budget=1)
    with pytest.raises((RankFailed, DataError), match="`completion` of row 0 is 3"):
        await made.score(Batch.of(prompt=["a" * 20, "a"], completion=["b", 3]))
    calls = [made.score(rows(count)) for count in (5, 8)]
    assert [len(each) for each in await asyncio.gather(*calls)] == [5, 8]
