"""The sampler of an engine on Ray: the engine is killed."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from meshrl import (
    Mesh,
    NewModel,
    PolicyConfig,
    RankFailed,
    Resources,
    Sampling,
    respawn,
    rollout,
)
from meshrl.data import Batch
from meshrl.engines.ray import RayEngine
from meshrl_torch.policy import TorchPolicy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NEW = NewModel(characters="abcdefgh>", hidden_size=64, ffn_size=96, layers=2, heads=2, max_tokens=256)
PROMPTS = Batch.of(prompt=["abc>", "hgfe>", "abc>", "d>"])
GREEDY = Sampling(max_tokens=20, temperature=0, ignore_eos=True)
ENDLESS = Sampling(max_tokens=200, n=2000, ignore_eos=True)
"""Rows for 400,000 steps, which no engine makes while a test may last."""


def only(found: list[psutil.Process]) -> psutil.Process:
    (process,) = found
    return process


def engine_of(rank: psutil.Process) -> psutil.Process:
    return only([child for child in rank.children() if "meshrl_inference.worker" in child.cmdline()])


def rank_here() -> psutil.Process:
    """The process of the rank: the one that has an engine."""
    found: list[psutil.Process] = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess, ValueError):
            engine_of(process)
            found.append(process)
    return only(found)


async def test_a_killed_engine_is_told_and_respawn_starts_another(
    ray_cluster: None, tmp_path: Path, backend: Any
) -> None:
    models = [TorchPolicy(PolicyConfig(model=NEW, seed=seed)) for seed in range(2)]
    await models[0].save(str(tmp_path / "model"))
    weights = (await models[1].weights()).with_version(3)
    ray = RayEngine()
    mesh = await Mesh.reserve(ray, 1, Resources(cpus=0))
    sampler = await mesh.spawn(backend.sampler, backend.config(model=str(tmp_path / "model"), slots=4))
    await sampler.load(weights)
    before = await rollout(sampler, PROMPTS, GREEDY)

    rank = rank_here()
    stream = aiter(sampler.generate(PROMPTS, ENDLESS))
    await anext(stream)
    engine_of(rank).kill()
    died = rf"{backend.title}'s process \d+ has died \(signal SIGKILL\): respawn the sampler"
    with pytest.raises(RankFailed, match=died):
        [batch async for batch in stream]
    with pytest.raises(RankFailed, match="has died"):
        await sampler.load(weights)
    await respawn(sampler)
    await sampler.load(weights)
    after = await rollout(sampler, PROMPTS, GREEDY)
    assert after.only("tokens", "versions") == before.only("tokens", "versions")
    assert engine_of(rank).is_running(), "the rank is the same, and has one engine"
    await ray.close()
