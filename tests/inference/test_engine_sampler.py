"""What samplers of engines promise beside what all samplers do: what they refuse, and draw together."""

import asyncio
import gc
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from meshrl import Batch, PolicyConfig, Ragged, Sampling, publish, rollout
from meshrl.engines.processes import ProcessEngine
from meshrl.errors import ConfigError, DataError, ModelError, RankFailed
from meshrl.mesh import Mesh, Resources, respawn, stop
from meshrl.run.evaluation import BesideSampling
from meshrl_inference.sampler import EngineSampler
from meshrl_torch.train.fsdp.roles import FsdpPolicy
from meshrl_torch.train.one_rank import TorchPolicy
from tests.inference.conftest import MODEL, TOLD, ended
from tests.inference.networks import GREEDY, PROMPTS

pytestmark = pytest.mark.slow


async def test_what_is_long_is_read_and_what_is_too_long_is_refused(sampler: EngineSampler) -> None:
    with pytest.raises(DataError, match=r"at most 256"):
        await rollout(sampler, PROMPTS, Sampling(max_tokens=1000))
    long = Batch.of(prompt=["abcdefgh" * 25 + ">"] * 32)  # more tokens than an engine reads in a step
    assert len(await rollout(sampler, long, Sampling(max_tokens=4, ignore_eos=True))) == 32


def test_one_loop_after_another_draws_from_it_and_tokens_that_it_does_not_know_are_refused(held: EngineSampler) -> None:
    async def draw(prompts: Batch = PROMPTS, most: int = 3) -> Batch:
        return await rollout(held, prompts, Sampling(max_tokens=most, temperature=0, ignore_eos=True))

    first = asyncio.run(draw())
    assert asyncio.run(draw()).tokens == first.tokens
    strange = first.assign(tokens=Ragged(first.tokens.values.astype(np.int64) + 20, first.tokens.offsets))
    with pytest.raises(DataError, match=r"row 0 has tokens from \d+ to \d+, and the model knows those from 0 to 12"):
        asyncio.run(draw(strange, 9))
    assert asyncio.run(draw()).tokens == first.tokens


async def test_a_row_is_drawn_the_same_alone_and_among_others_whatever_these_ask_for(sampler: EngineSampler) -> None:
    weights = (await TorchPolicy(PolicyConfig(model=MODEL)).weights()).with_version(1)
    prompts = Batch.of(prompt=["abc>"] * 20, number=np.arange(20))
    asked = {"max_tokens": 100, "ignore_eos": True}
    for keys in ({}, {"top_k": 3}):
        await sampler.load(weights)  # calls are counted anew, of which seeds are made
        alone = await (await rollout(sampler, prompts.select([0]), Sampling.model_validate(asked | keys))).load()
        await sampler.load(weights)
        others = [BesideSampling.model_validate(asked | more) for more in ({"temperature": 0}, {"top_p": 0.5}, {})]
        *_, among = await asyncio.gather(
            *(rollout(sampler, prompts.select(range(4)), each) for each in others),
            rollout(sampler, prompts, Sampling.model_validate(asked | keys)),
        )
        among = await among.load()
        mine = among.select(np.flatnonzero(among.row("number") == 0))
        assert mine.tokens == alone.tokens
        told, wanted = (each.sampler_logprobs.values.astype(np.float64) for each in (mine, alone))
        np.testing.assert_allclose(told, wanted, atol=1e-4)


def test_an_engine_ends_when_the_process_of_its_sampler_is_killed(backend: Any) -> None:
    made = backend.sampler
    script = (
        f"import sys, time; from meshrl import SamplerConfig; from {made.__module__} import {made.__name__}; "
        f"made = {made.__name__}(SamplerConfig.model_validate_json(sys.argv[1])); "
        "print('engine', made.engine_pid, flush=True); time.sleep(1000)"
    )
    command = [sys.executable, "-c", script, backend.config(model=MODEL, slots=32).model_dump_json()]
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as folder,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": folder}) as rank,
    ):
        assert rank.stdout is not None
        pid = next(int(line.split()[1]) for line in rank.stdout if line.startswith("engine"))
        assert not ended(pid)
        rank.kill()
        while not ended(pid):
            time.sleep(0.05)
        left = [each.name for each in Path(folder).iterdir()]
    assert not [name for name in left if not name.startswith("meshrl-model-")], "an engine takes its files with it"


def test_an_environment_without_the_engine_is_said(backend: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"cannot be started.*sampler\.{backend.name}\.python"):
        backend.sampler(backend.config(model=MODEL, keys={"python": str(tmp_path / "python")}))
    with pytest.raises(ModelError, match=rf"cannot be started: No module named .*sampler\.{backend.name}\.python"):
        backend.sampler(backend.config(model=MODEL, keys={"python": sys.executable}))
    if not backend.sampler.kind.takes_adapters:
        with pytest.raises(ConfigError, match="whole weights"):
            backend.sampler(backend.config(model=MODEL, lora={}))


async def test_a_killed_engine_is_told_and_another_reads_ranks_weights_and_ends_with_its_sampler(backend: Any) -> None:
    engine, no_core = ProcessEngine(), Resources(cpus=0)
    ranks = await Mesh.reserve(engine, 2, no_core)
    config = PolicyConfig(backend="fsdp", model=MODEL, seed=1, weight_sync="broadcast", bucket_mib=1)
    policy = await ranks.spawn(FsdpPolicy, config)
    mesh = await Mesh.reserve(engine, 1, no_core)
    keys = {"verify_weights": True} if backend.name == "sglang" else {}
    sampler = await mesh.spawn(TOLD[backend.name], backend.config(model=MODEL, slots=4, keys=keys))
    await publish(policy, sampler)
    before = await rollout(sampler, PROMPTS, GREEDY)

    # Rows for 400,000 steps, which no engine makes while a test may last.
    stream = aiter(sampler.generate(PROMPTS, Sampling(max_tokens=200, n=2000, ignore_eos=True)))
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
