"""A reward whose model is split over two processes: its scores are those of one rank."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForSequenceClassification, LlamaConfig, Qwen3Config

from meshrl import Batch, Mesh, Reward, RewardModelConfig, stop
from meshrl.errors import DataError, RankFailed
from meshrl_megatron.roles import MegatronReward
from meshrl_torch.train.fsdp.roles import FsdpReward
from meshrl_torch.train.one_rank import TorchReward
from tests.backends.material import SHAPE

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.process, pytest.mark.xdist_group("warm")]

ONE: dict[str, Any] = {**SHAPE, "num_labels": 1}
MODELS = {"llama": LlamaConfig(**ONE), "qwen3": Qwen3Config(**ONE, head_dim=16)}
SPLITS: Mapping[str, tuple[Callable[..., Reward], Sequence[tuple[str, str]]]] = {
    "fsdp": (FsdpReward, [("llama", "dp"), ("qwen3", "tp")]),
    "megatron": (MegatronReward, [("llama", axis) for axis in ("dp", "tp", "pp", "cp")]),
}
"""By backend: models, and the axis that they are split along."""


def rows(count: int) -> Batch:
    """Rows of many lengths, some of one prompt; the fourth is none that a judge can read."""
    texts = [("abcdefgh" * (1 + row % 2), "hgfedcba"[: row % 5] * (1 + row % 4)) for row in range(count)]
    return Batch.of(
        prompt=[prompt for prompt, _ in texts],
        completion=["!" if row == 3 else completion for row, (_, completion) in enumerate(texts)],
    )


@pytest.fixture
def judge_of(random_model: Callable[..., str], tmp_path: Path) -> Callable[[str], str]:
    """Makes the folder of a judge."""
    return lambda kind: random_model(MODELS[kind], tmp_path / kind, AutoModelForSequenceClassification)


@pytest.mark.parametrize("backend", ["fsdp", pytest.param("megatron", marks=pytest.mark.megatron)])
async def test_scores_are_those_of_one_rank(
    warm: Callable[[int], Awaitable[Mesh]], judge_of: Callable[[str], str], backend: str
) -> None:
    role, splits = SPLITS[backend]
    for kind, axis in splits:
        judge = judge_of(kind)
        config = RewardModelConfig(backend=backend, model=judge, micro_batch_tokens=64)
        made = await (await warm(2)).shape(**{"dp": 1, axis: 2}).spawn(role, config)
        whole = TorchReward(RewardModelConfig(model=judge))
        for count in (9, 1, 2, 0, 9):  # of one row, one rank has none
            found, expected = await made.score(rows(count)), await whole.score(rows(count))
            np.testing.assert_allclose(found.rewards, expected.rewards, atol=1e-5, err_msg=f"{kind} along {axis}")
            assert found.objects("reward_error") == expected.objects("reward_error")
        assert np.ptp(expected.rewards) > 0.1
        assert [error is None for error in expected.objects("reward_error")] == [row != 3 for row in range(9)]
        await stop(made)


async def test_a_row_that_no_rank_can_take_leaves_the_others_free(
    warm: Callable[[int], Awaitable[Mesh]], judge_of: Callable[[str], str]
) -> None:
    config = RewardModelConfig(backend="fsdp", model=judge_of("llama"), micro_batch_tokens=8)
    made = await (await warm(2)).shape(dp=2).spawn(FsdpReward, config)
    with pytest.raises((RankFailed, DataError), match="`completion` of row 0 is 3"):
        await made.score(Batch.of(prompt=["a" * 20, "a"], completion=["b", 3]))
    calls = [made.score(rows(count)) for count in (5, 8)]
    assert [len(each) for each in await asyncio.gather(*calls)] == [5, 8]
