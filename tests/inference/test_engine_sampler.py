"""What the samplers of engines promise beside what all samplers do: what they refuse, and how they draw together."""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshrl import Batch, ClippedLoss, PolicyConfig, Ragged, SamplerConfig, Sampling, SequenceLoss, rollout
from meshrl.errors import ConfigError, DataError, ModelError
from meshrl.run.evaluation import BesideSampling
from meshrl_inference.sampler import EngineSampler
from meshrl_torch.train.one_rank import TorchPolicy
from tests.inference.conftest import MODEL, ended
from tests.inference.networks import PROMPTS

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


async def test_with_top_p_the_ratio_of_a_first_update_is_1_and_nothing_is_clipped(sampler: EngineSampler) -> None:
    rows = await (await rollout(sampler, PROMPTS, Sampling(n=16, max_tokens=32, top_p=0.9))).load()
    batch = rows.assign(advantages=np.where(np.arange(len(rows)) % 2, 1, -1).astype(np.float32))
    for loss in (ClippedLoss(), SequenceLoss(clip=3e-4, clip_high=4e-4)):
        told = await TorchPolicy(PolicyConfig(model=MODEL)).update(batch, loss)
        assert told["ratio"] == pytest.approx(1, abs=1e-4)
        assert told["clip_fraction"] == 0


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
    with pytest.raises(ConfigError, match="whole weights"):
        backend.sampler(SamplerConfig.model_validate({"model": MODEL, "lora": {}}))
