"""What the samplers of engines promise beside what all samplers do: the engine's process, and what they refuse."""

import asyncio
import gc
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil
import pytest

from meshrl import (
    Batch,
    ClippedLoss,
    LocalEngine,
    Mesh,
    NewModel,
    PolicyConfig,
    Ragged,
    RankFailed,
    SamplerConfig,
    Sampling,
    SequenceLoss,
    rollout,
    stop,
)
from meshrl.errors import ConfigError, DataError, ModelError
from meshrl.evaluation import BesideSampling
from meshrl_inference.sampler import EngineSampler
from meshrl_sglang.sampler import SglangSampler
from meshrl_torch.policy import TorchPolicy
from meshrl_vllm.sampler import VllmSampler

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NEW = NewModel(characters="abcdefgh>", hidden_size=64, ffn_size=96, layers=2, heads=2, max_tokens=256)
PROMPTS = Batch.of(prompt=["abc>", "hgfe>", "abc>", "d>"])


def config(backend: Any) -> SamplerConfig:
    return cast("SamplerConfig", backend.config(model=NEW, slots=32))


def ended(pid: int) -> bool:
    """Whether a process has, or nobody has asked yet how."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def ends(pid: int) -> bool:
    """Whether it does within some seconds."""
    until = time.monotonic() + 20
    while not ended(pid) and time.monotonic() < until:
        time.sleep(0.05)
    return ended(pid)


class Told(EngineSampler):
    """Leaves a note of its engine's process."""

    def __init__(self, config: SamplerConfig, note: Path) -> None:
        super().__init__(config)
        note.write_text(str(self.engine_pid))


class ToldVllm(Told, VllmSampler):
    """vLLM's."""


class ToldSglang(Told, SglangSampler):
    """SGLang's."""


TOLD: dict[str, type[Told]] = {"vllm": ToldVllm, "sglang": ToldSglang}


async def test_a_sampler_of_a_new_model_reads_what_is_long_refuses_what_is_too_long_and_ends_with_its_engine(
    backend: Any, tmp_path: Path
) -> None:
    engine = LocalEngine()
    mesh = await Mesh.reserve(engine, 1)
    sampler = await mesh.spawn(TOLD[backend.name], config(backend), tmp_path / "pid")
    with pytest.raises(RankFailed, match=r"DataError: .*at most 256"):
        await rollout(sampler, PROMPTS, Sampling(max_tokens=1000))
    long = Batch.of(prompt=["abcdefgh" * 25 + ">"] * 32)  # more tokens than an engine reads in a step
    assert len(await rollout(sampler, long, Sampling(max_tokens=4, ignore_eos=True))) == 32
    pid = int((tmp_path / "pid").read_text())
    assert not ended(pid)
    gc.collect()  # the error had the frames that it came through, and they the sampler
    await stop(sampler)
    assert await asyncio.to_thread(ends, pid)
    await engine.close()


@pytest.fixture(scope="module")
def own(backend: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineSampler]:
    """No actor, made where the path of temporary files is too long for sockets. SGLang is asked for its weights too."""
    keys = {"verify_weights": True} if backend.name == "sglang" else {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("long" * 20)))
        sampler = backend.sampler(backend.config(model=NEW, slots=32, keys=keys))
    yield sampler
    sampler.close()


def test_one_loop_after_another_draws_from_it_and_tokens_that_it_does_not_know_are_refused(own: EngineSampler) -> None:
    async def draw(prompts: Batch = PROMPTS, most: int = 3) -> Batch:
        return await rollout(own, prompts, Sampling(max_tokens=most, temperature=0, ignore_eos=True))

    first = asyncio.run(draw())
    assert asyncio.run(draw()).tokens == first.tokens
    strange = first.assign(tokens=Ragged(first.tokens.values.astype(np.int64) + 20, first.tokens.offsets))
    with pytest.raises(DataError, match=r"row 0 has tokens from \d+ to \d+, and the model knows those from 0 to 10"):
        asyncio.run(draw(strange, 9))
    assert asyncio.run(draw()).tokens == first.tokens


async def test_a_row_is_drawn_the_same_alone_and_among_others_whatever_these_ask_for(own: EngineSampler) -> None:
    weights = (await TorchPolicy(PolicyConfig(model=NEW)).weights()).with_version(1)
    prompts = Batch.of(prompt=["abc>"] * 20, number=np.arange(20))
    asked = {"max_tokens": 100, "ignore_eos": True}
    for keys in ({}, {"top_k": 3}):
        await own.load(weights)  # calls are counted anew, of which seeds are made
        alone = await (await rollout(own, prompts.select([0]), Sampling.model_validate(asked | keys))).load()
        await own.load(weights)
        others = [BesideSampling.model_validate(asked | more) for more in ({"temperature": 0}, {"top_p": 0.5}, {})]
        *_, among = await asyncio.gather(
            *(rollout(own, prompts.select(range(4)), each) for each in others),
            rollout(own, prompts, Sampling.model_validate(asked | keys)),
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
    command = [sys.executable, "-c", script, config(backend).model_dump_json()]
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as folder,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": folder}) as rank,
    ):
        assert rank.stdout is not None
        pid = next(int(line.split()[1]) for line in rank.stdout if line.startswith("engine"))
        assert not ended(pid)
        rank.kill()
        assert ends(pid)
        left = [each.name for each in Path(folder).iterdir()]
    assert not [name for name in left if not name.startswith("meshrl-model-")], "an engine takes its files with it"


def test_an_environment_without_the_engine_is_said(backend: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"cannot be started.*sampler\.{backend.name}\.python"):
        backend.sampler(backend.config(model=NEW, keys={"python": str(tmp_path / "python")}))
    with pytest.raises(ModelError, match=rf"cannot be started: No module named .*sampler\.{backend.name}\.python"):
        backend.sampler(backend.config(model=NEW, keys={"python": sys.executable}))
    with pytest.raises(ConfigError, match="whole weights"):
        backend.sampler(SamplerConfig.model_validate({"model": NEW, "lora": {}}))


@pytest.mark.parametrize("loss", [ClippedLoss(), SequenceLoss(clip=3e-4, clip_high=4e-4)])
async def test_with_top_p_the_ratio_of_a_first_update_is_1_and_nothing_is_clipped(
    own: EngineSampler, loss: ClippedLoss | SequenceLoss
) -> None:
    policy = TorchPolicy(PolicyConfig(model=NEW))
    await own.load(await policy.weights())
    rows = await (await rollout(own, PROMPTS, Sampling(n=16, max_tokens=32, top_p=0.9))).load()
    batch = rows.assign(advantages=np.where(np.arange(len(rows)) % 2, 1, -1).astype(np.float32))
    told = await policy.update(batch, loss)
    assert told["ratio"] == pytest.approx(1, abs=1e-4)
    assert told["clip_fraction"] == 0
