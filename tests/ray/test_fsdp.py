"""FSDP2 on two processes: what one rank alone does not show. The numbers are held in tests/conformance."""

import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from meshrl import (
    Actor,
    Batch,
    ClippedLoss,
    ContractError,
    DataError,
    Gather,
    LocalEngine,
    Mesh,
    NewModel,
    Policy,
    PolicyConfig,
    Ragged,
    RankDied,
    RankFailed,
    ReferenceConfig,
    Resources,
    Shard,
    at,
    endpoint,
    respawn,
    stop,
)
from meshrl.engines.ray import RayEngine
from meshrl.losses.base import TokenLoss
from meshrl_fsdp.options import FsdpConfig
from meshrl_fsdp.policy import FsdpPolicy
from meshrl_fsdp.reference import FsdpReference
from meshrl_torch.policy import TorchPolicy

pytestmark = pytest.mark.asyncio(loop_scope="session")

MODEL = NewModel(characters="abcdefgh>", hidden_size=16, ffn_size=24, layers=2, heads=2, max_tokens=48)
CONFIG = PolicyConfig.model_validate({"model": MODEL, "backend": "fsdp", "optimizer": {"lr": 1e-2}})


def rollouts(rows: int = 6, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    tokens = Ragged.of([rng.integers(2, 11, 4 + row) for row in range(rows)], np.int32)
    learned = np.concatenate([np.arange(4 + row) >= 2 for row in range(rows)])
    return Batch.of(
        tokens=tokens,
        loss_mask=Ragged(learned, tokens.offsets),
        sampler_logprobs=Ragged(np.full(len(tokens.values), -2.0, np.float32), tokens.offsets),
        advantages=rng.normal(size=rows).astype(np.float32),
    )


class Picky(ClippedLoss):
    """A loss that fails where it is given many tokens: on one of two ranks."""

    def __call__(self, logprobs: Tensor, columns: Mapping[str, Tensor]) -> TokenLoss:
        if len(logprobs) > 5:
            raise ValueError(f"{len(logprobs)} tokens are too many")
        return super().__call__(logprobs, columns)


class Process(Actor):
    """Tells where a rank is."""

    @endpoint
    async def pid(self) -> Gather[np.ndarray]:
        return np.array([os.getpid()])

    @endpoint
    async def carriers(self) -> Gather[np.ndarray]:
        """How many threads carry what its process groups send."""
        names = [file.read_text("utf-8") for file in Path("/proc/self/task").glob("*/comm")]
        return np.array([sum("gloo" in name for name in names)])


class Maker(Process):
    """Makes rows, which stay with it."""

    @endpoint
    async def make(self, rows: Shard[Batch]) -> Gather[Batch]:
        return rows.assign(tokens=Ragged.of([np.arange(2, 11)] * len(rows), np.int32))


async def until_it_fails(policy: Policy, batch: Batch) -> None:
    while True:  # Ray notices a death a moment later
        await policy.logprobs(batch)


@pytest_asyncio.fixture(loop_scope="session")
async def two(warm: Callable[[int], Awaitable[Mesh]]) -> Mesh:
    """Two ranks."""
    return (await warm(2)).shape(dp=2)


async def spawn(mesh: Mesh, **changes: object) -> Policy:
    return await mesh.spawn(FsdpPolicy, CONFIG.model_copy(update=changes))


async def test_a_loss_that_fails_on_one_rank_leaves_the_weights_and_the_mesh_as_they_were(two: Mesh) -> None:
    policy = await spawn(two)
    before = await policy.weights()
    uneven = rollouts().select([0, 5])  # 2 learned tokens for one rank, 7 for the other
    with pytest.raises(RankFailed, match="ValueError: 7 tokens are too many"):
        await policy.update(uneven, Picky())
    assert await policy.weights() == before
    await policy.update(uneven, ClippedLoss())
    assert (await policy.weights()).version == 1


async def test_after_a_death_the_ranks_meet_again_and_go_on_from_a_checkpoint(
    ray_cluster: None, tmp_path: Path
) -> None:
    engine = RayEngine()
    two = (await Mesh.reserve(engine, 2, Resources(cpus=0))).shape(dp=2)
    policy = await spawn(two)
    await policy.update(rollouts(), ClippedLoss())
    await policy.checkpoint(str(tmp_path / "state"))
    wanted = (await policy.update(rollouts(seed=1), ClippedLoss())).means()
    pids = await (await two.spawn(Process)).pid()
    os.kill(int(pids[1]), signal.SIGKILL)
    with pytest.raises(RankDied):
        await policy.update(rollouts(), ClippedLoss())
    await respawn(policy)
    await policy.restore(str(tmp_path / "state"))
    assert (await policy.update(rollouts(seed=1), ClippedLoss())).means() == wanted
    await engine.close()


@pytest.mark.parametrize(("shape", "replicate"), [({"dp": 2}, 1), ({"dp": 2}, 2), ({"dp": 1, "tp": 2}, 1)], ids=str)
async def test_a_checkpoint_of_two_ranks_is_read_by_one_and_back(
    two: Mesh, tmp_path: Path, shape: dict[str, int], replicate: int
) -> None:
    policy = await spawn(two.shape(**shape), fsdp=FsdpConfig(replicate=replicate))
    await policy.update(rollouts(), ClippedLoss())
    await policy.checkpoint(str(tmp_path / "two"))
    engine = LocalEngine()
    one = await spawn(await Mesh.reserve(engine, 1, Resources(cpus=1)))
    await one.restore(str(tmp_path / "two"))
    assert await (await one.weights()).load() == await (await policy.weights()).load()
    told = [(await each.update(rollouts(seed=1), ClippedLoss())).means() for each in (policy, one)]
    assert told[0] == pytest.approx(told[1], rel=1e-5, abs=1e-6)
    await one.checkpoint(str(tmp_path / "one"))
    await policy.restore(str(tmp_path / "one"))
    assert await (await one.weights()).load() == await (await policy.weights()).load()
    await engine.close()


SHAPE: dict[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 48,
}


@pytest.mark.parametrize(
    "config",
    [Qwen3Config(**SHAPE), LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True)],
    ids=["norms of heads", "biases"],
)
async def test_matrices_split_over_two_ranks_leave_the_numbers(
    two: Mesh, tmp_path: Path, config: PretrainedConfig, random_model: Callable[..., str]
) -> None:
    folder = random_model(config, tmp_path / "model")
    split = await spawn(two.shape(dp=1, tp=2), model=folder)
    whole = TorchPolicy(CONFIG.model_copy(update={"model": folder}))
    for seed in range(3):
        told = [(await each.update(rollouts(seed=seed), ClippedLoss())).means() for each in (split, whole)]
        assert told[0] == pytest.approx(told[1], rel=1e-4, abs=1e-5)
    ours, theirs = (await (await split.weights()).load()).tensors, (await whole.weights()).tensors
    for name, array in theirs.items():
        np.testing.assert_allclose(np.asarray(ours[name], np.float32), np.asarray(array, np.float32), atol=1e-3)


async def test_what_one_rank_alone_cannot_take_leaves_the_others_free(two: Mesh) -> None:
    policy = await spawn(two)
    good = rollouts()
    with pytest.raises((DataError, ContractError)):
        await policy.update(good.assign(extra=[*range(5), Lock()]), ClippedLoss())
    strange = np.where(np.arange(len(good.tokens.values)) == 1, 99, good.tokens.values).astype(np.int32)
    with pytest.raises(RankFailed, match="has the token 99 and the model knows 0 to"):
        await policy.update(good.assign(tokens=Ragged(strange, good.tokens.offsets)), ClippedLoss())
    await policy.update(good, ClippedLoss())
    assert (await policy.weights()).version == 1


async def test_rows_that_one_rank_alone_has_lost_leave_the_others_free(ray_cluster: None, from_afar: None) -> None:
    engine = RayEngine(inline_bytes=0)
    mesh = await Mesh.reserve(engine, 2, Resources(cpus=0))
    policy = await spawn(mesh.shape(dp=2))
    maker = await (await Mesh.reserve(engine, 2, Resources(cpus=0))).spawn(Maker)
    made = await maker.make(Batch.of(prompt=["one", "two"]))
    batch = made.assign(loss_mask=Ragged(np.arange(18) % 9 > 2, np.array([0, 9, 18])))
    os.kill(int((await maker.pid())[1]), signal.SIGKILL)
    with pytest.raises(RankFailed, match=r"DataLost: the columns .* cannot be read from .*: the rank has died"):
        await until_it_fails(policy, batch)
    await policy.update(rollouts(), ClippedLoss())
    assert (await policy.weights()).version == 1
    await engine.close()


async def test_a_checkpoint_without_the_file_of_a_rank_is_not_whole(two: Mesh, tmp_path: Path) -> None:
    policy = await spawn(two)
    await policy.update(rollouts(), ClippedLoss())
    await policy.checkpoint(str(tmp_path / "state"))
    next((tmp_path / "state").glob("shard-00001*")).unlink()
    with pytest.raises(RankFailed, match="has the files of 1 ranks and not of 2"):
        await policy.restore(str(tmp_path / "state"))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads have names where Linux tells them")
async def test_a_role_that_is_spawned_again_takes_no_more_threads(two: Mesh) -> None:
    process, counts = await two.spawn(Process), list[list[int]]()
    for _ in range(3):
        await stop(await spawn(two))
        counts.append((await process.carriers()).tolist())
    assert counts[0] == counts[1] == counts[2]
    assert min(counts[0]) > 0


async def test_a_part_of_the_ranks_is_not_called_alone(two: Mesh) -> None:
    policy = await spawn(two)
    with pytest.raises(ContractError, match="was called on 1 of 2 ranks, which would wait for the others"):
        await at(policy, dp=0).logprobs(rollouts())
    await policy.logprobs(rollouts())


async def test_models_in_the_same_processes_have_layouts_of_their_own(two: Mesh) -> None:
    policy = await spawn(two)
    config = ReferenceConfig(model=MODEL, backend="fsdp", seed=1)
    reference = await two.shape(dp=1, tp=2).spawn(FsdpReference, config)
    for seed in range(2):
        await policy.update(rollouts(seed=seed), ClippedLoss())
        await reference.load(await policy.weights())
        expected = (await (await policy.logprobs(rollouts())).load()).ragged("logprobs").values
        found = (await (await reference.logprobs(rollouts())).load()).ragged("reference_logprobs").values
        np.testing.assert_allclose(np.asarray(found, np.float32), np.asarray(expected, np.float32), atol=1e-5)


async def test_wrong_meshes_say_what_is_wrong(two: Mesh) -> None:
    three = NewModel.model_validate({**MODEL.model_dump(), "hidden_size": 18, "heads": 3})
    with pytest.raises(RankFailed, match=r"num_attention_heads': 3.*tp = 2 does not divide"):
        await spawn(two.shape(dp=1, tp=2), model=three)
    with pytest.raises(RankFailed, match="supports the axes dp and tp"):
        await spawn(two.shape(dp=1, pp=2))
    with pytest.raises(RankFailed, match=r"fsdp.replicate = 3 does not divide the 2 ranks"):
        await spawn(two, fsdp=FsdpConfig(replicate=3))


async def test_threads_are_no_processes() -> None:
    engine = LocalEngine(cores=2)
    with pytest.raises(RankFailed, match=r"needs a process for each of 2 ranks.*run.engine = 'processes'"):
        await spawn((await Mesh.reserve(engine, 2, Resources(cpus=1))).shape(dp=2))
    await engine.close()
