"""FSDP2 on two processes, and rewards split over two: what one rank alone does not show, beside test_backends.py."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from transformers import AutoModelForSequenceClassification, LlamaConfig, Qwen3Config

import meshrl as rl
from meshrl.errors import ContractError, DataError, RankFailed
from meshrl_megatron.roles import MegatronReward
from meshrl_torch.options import FsdpConfig
from meshrl_torch.train.fsdp.roles import FsdpPolicy, FsdpReference, FsdpReward
from meshrl_torch.train.one_rank import TorchPolicy, TorchReward
from tests.backends.material import MODEL, RANKS, SHAPE, Warm, floats, near, rollouts

pytestmark = RANKS

CONFIG = rl.PolicyConfig.model_validate({"model": MODEL, "backend": "fsdp", "optimizer": {"lr": 1e-2, "eps": 1e-3}})
NORMS_AND_BIASES = Qwen3Config(**SHAPE, head_dim=16, attention_bias=True)


@pytest_asyncio.fixture(loop_scope="session")
async def two(warm: Warm) -> rl.Mesh:
    return (await warm(2)).shape(dp=2)


async def spawn(mesh: rl.Mesh, **changes: object) -> rl.Policy:
    return await mesh.spawn(FsdpPolicy, CONFIG.model_copy(update=changes))


async def test_layouts_go_on_from_each_others_checkpoints_with_the_numbers_of_one_rank(
    two: rl.Mesh, tmp_path: Path, random_model: Callable[..., str]
) -> None:
    folder = random_model(NORMS_AND_BIASES, tmp_path / "model")
    plain, kept = TorchPolicy(CONFIG.model_copy(update={"model": folder})), None
    meshes = [(two, 1), (two.shape(dp=1, tp=2), 1), (None, 1), (two, 2), (two.shape(dp=1, tp=2), 1)]
    for step, (mesh, replicate) in enumerate(meshes):
        changes = {"model": folder, "fsdp": FsdpConfig(replicate=replicate)}
        policy = await spawn(mesh, **changes) if mesh else FsdpPolicy(CONFIG.model_copy(update=changes))
        if kept:
            await policy.restore(str(tmp_path / f"state-{step - 1}"))
            assert await (await policy.weights()).load() == kept
        told = [(await each.update(rollouts(seed=step), rl.ClippedLoss())).means() for each in (policy, plain)]
        assert told[0] == pytest.approx(told[1], rel=1e-5, abs=1e-5)
        kept = await (await policy.weights()).load()
        near(kept, await plain.weights(), 1e-5)
        await policy.checkpoint(str(tmp_path / f"state-{step}"))


async def test_what_one_rank_alone_cannot_take_leaves_the_others_free(two: rl.Mesh) -> None:
    policy = await spawn(two)
    good = rollouts()
    with pytest.raises((DataError, ContractError)):
        await policy.update(good.assign(extra=[*range(len(good) - 1), Lock()]), rl.ClippedLoss())
    strange = np.where(np.arange(len(good.tokens.values)) == 1, 99, good.tokens.values).astype(np.int32)
    with pytest.raises(RankFailed, match="has the token 99 and the model knows 0 to"):
        await policy.update(good.assign(tokens=rl.Ragged(strange, good.tokens.offsets)), rl.ClippedLoss())
    with pytest.raises(ContractError, match="was called on 1 of 2 ranks, which would wait for the others"):
        await rl.at(policy, dp=0).logprobs(good)
    await policy.update(good, rl.ClippedLoss())
    assert (await policy.weights()).version == 1


async def test_models_in_the_same_processes_have_layouts_of_their_own(two: rl.Mesh) -> None:
    policy = await spawn(two)
    config = rl.ReferenceConfig(model=MODEL, backend="fsdp", seed=1)
    reference = await two.shape(dp=1, tp=2).spawn(FsdpReference, config)
    for seed in range(2):
        await policy.update(rollouts(seed=seed), rl.ClippedLoss())
        await reference.load(await policy.weights())
        expected = (await (await policy.logprobs(rollouts())).load()).ragged("logprobs").values
        found = (await (await reference.logprobs(rollouts())).load()).ragged("reference_logprobs").values
        np.testing.assert_allclose(floats(found), floats(expected), atol=1e-5)


async def test_wrong_meshes_say_what_is_wrong(two: rl.Mesh) -> None:
    three = rl.NewModel.model_validate({**MODEL.model_dump(), "hidden_size": 18, "heads": 3})
    with pytest.raises(RankFailed, match=r"num_attention_heads': 3.*tp = 2 does not divide"):
        await spawn(two.shape(dp=1, tp=2), model=three)
    with pytest.raises(RankFailed, match="supports the axes dp and tp"):
        await spawn(two.shape(dp=1, pp=2))
    with pytest.raises(RankFailed, match=r"fsdp.replicate = 3 does not divide the 2 ranks"):
        await spawn(two, fsdp=FsdpConfig(replicate=3))
    engine = rl.LocalEngine(cores=2)
    with pytest.raises(RankFailed, match=r"needs a process for each of 2 ranks.*run.engine = 'processes'"):
        await spawn((await rl.Mesh.reserve(engine, 2, rl.Resources(cpus=1))).shape(dp=2))
    await engine.close()


ONE: dict[str, Any] = {**SHAPE, "num_labels": 1}
JUDGES = {"llama": LlamaConfig(**ONE), "qwen3": Qwen3Config(**ONE, head_dim=16)}
SPLITS: Mapping[str, tuple[Callable[..., rl.Reward], Sequence[tuple[str, str]]]] = {
    "fsdp": (FsdpReward, [("llama", "dp"), ("qwen3", "tp")]),
    "megatron": (MegatronReward, [("llama", axis) for axis in ("dp", "tp", "pp", "cp")]),
}
"""By backend: models, and the axis that they are split along."""


def rows(count: int) -> rl.Batch:
    """Rows of many lengths, some of one prompt; the fourth is none that a judge can read."""
    texts = [("abcdefgh" * (1 + row % 2), "hgfedcba"[: row % 5] * (1 + row % 4)) for row in range(count)]
    return rl.Batch.of(
        prompt=[prompt for prompt, _ in texts],
        completion=["!" if row == 3 else completion for row, (_, completion) in enumerate(texts)],
    )


@pytest.fixture
def judge_of(random_model: Callable[..., str], tmp_path: Path) -> Callable[[str], str]:
    return lambda kind: random_model(JUDGES[kind], tmp_path / kind, AutoModelForSequenceClassification)


@pytest.mark.parametrize("backend", ["fsdp", pytest.param("megatron", marks=pytest.mark.megatron)])
async def test_scores_are_those_of_one_rank(warm: Warm, judge_of: Callable[[str], str], backend: str) -> None:
    role, splits = SPLITS[backend]
    for kind, axis in splits:
        judge = judge_of(kind)
        config = rl.RewardModelConfig(backend=backend, model=judge, micro_batch_tokens=64)
        made = await (await warm(2)).shape(**{"dp": 1, axis: 2}).spawn(role, config)
        whole = TorchReward(rl.RewardModelConfig(model=judge))
        for count in (9, 1, 2, 0, 9):  # of one row, one rank has none
            found, expected = await made.score(rows(count)), await whole.score(rows(count))
            np.testing.assert_allclose(found.rewards, expected.rewards, atol=1e-5, err_msg=f"{kind} along {axis}")
            assert found.objects("reward_error") == expected.objects("reward_error")
        assert np.nanmax(expected.rewards) - np.nanmin(expected.rewards) > 0.1
        assert [error is None for error in expected.objects("reward_error")] == [row != 3 for row in range(9)]
        await rl.stop(made)


async def test_a_row_that_no_rank_can_take_leaves_the_others_free(warm: Warm, judge_of: Callable[[str], str]) -> None:
    config = rl.RewardModelConfig(backend="fsdp", model=judge_of("llama"), micro_batch_tokens=8)
    made = await (await warm(2)).shape(dp=2).spawn(FsdpReward, config)
    with pytest.raises((RankFailed, DataError), match="`completion` of row 0 is 3"):
        await made.score(rl.Batch.of(prompt=["a" * 20, "a"], completion=["b", 3]))
    calls = [made.score(rows(count)) for count in (5, 8)]
    assert [len(each) for each in await asyncio.gather(*calls)] == [5, 8]
