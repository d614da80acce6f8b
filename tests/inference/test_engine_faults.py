"""The engine of a sampler is killed, another is started, and it ends with its sampler."""

import asyncio
import gc
from typing import Any

import psutil
import pytest

from meshrl import Mesh, NewModel, PolicyConfig, Resources, Sampling, publish, respawn, rollout, stop
from meshrl.engines.processes import ProcessEngine
from meshrl.errors import RankFailed
from meshrl_torch.train.fsdp.roles import FsdpPolicy
from tests.inference.conftest import TOLD, ended
from tests.inference.networks import GREEDY, PROMPTS

pytestmark = pytest.mark.slow

NEW = NewModel(characters="abcdefgh>", hidden_size=64, ffn_size=96, layers=2, heads=2, max_tokens=256)
ENDLESS = Sampling(max_tokens=200, n=2000, ignore_eos=True)
"""Rows for 400,000 steps, which no engine makes while a test may last."""


async def test_a_killed_engine_is_told_and_another_reads_from_the_ranks_of_a_policy_and_ends_with_its_sampler(
    backend: Any,
) -> None:
    engine, no_core = ProcessEngine(), Resources(cpus=0)
    ranks = await Mesh.reserve(engine, 2, no_core)
    config = PolicyConfig(backend="fsdp", model=NEW, seed=1, weight_sync="broadcast", bucket_mib=1)
    policy = await ranks.spawn(FsdpPolicy, config)
    mesh = await Mesh.reserve(engine, 1, no_core)
    keys = {"verify_weights": True} if backend.name == "sglang" else {}
    sampler = await mesh.spawn(TOLD[backend.name], backend.config(model=NEW, slots=4, keys=keys))
    await publish(policy, sampler)
    before = await rollout(sampler, PROMPTS, GREEDY)

    stream = aiter(sampler.generate(PROMPTS, ENDLESS))
    await anext(stream)
    psutil.Process(int((await sampler.pid())[0])).kill()
    died = rf"{backend.sampler.kind.title}'s process \d+ has died \(signal SIGKILL\): respawn the sampler"
    with pytest.raises(RankFailed, match=died):
        [batch async for batch in stream]
    with pytest.raises(RankFailed, match=r"has died \(signal SIGKILL\)"):
        await publish(policy, sampler)
    await respawn(sampler)
    await publish(policy, sampler)
    after = await rollout(sampler, PROMPTS, GREEDY)
    assert after.only("tokens", "versions") == before.only("tokens", "versions")

    pid = int((await sampler.pid())[0])
    assert not ended(pid)
    gc.collect()  # the error had the frames that it came through, and they the sampler
    await stop(sampler)
    while not ended(pid):  # noqa: ASYNC110 -- of another process
        await asyncio.sleep(0.05)
    await engine.close()
