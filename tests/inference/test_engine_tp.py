from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio
from transformers import LlamaConfig, PreTrainedModel

from meshrl import Batch, Mesh, Resources, Weights, rollout
from meshrl.engines.processes import ProcessEngine
from meshrl.errors import ModelError, RankFailed
from meshrl.mesh import Rank, rank_context
from tests.inference.conftest import TOLD, Told
from tests.inference.networks import ENDLESS, GREEDY, LONG, PROMPTS, SHAPE, completions, distances, drawn, greedy, two

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

CONFIG = LlamaConfig(**SHAPE, tie_word_embeddings=True)


def versions_of(batch: Batch) -> set[int]:
    return set(batch.versions.values[batch.loss_mask.values.astype(np.bool_)].tolist())


async def every(stream: AsyncIterator[Batch]) -> Batch:
    return Batch.concat([await batch.load() async for batch in stream])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def models(folder: Path) -> tuple[list[PreTrainedModel], list[Weights]]:
    return await two(CONFIG, folder)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(
    models: tuple[list[PreTrainedModel], list[Weights]], folder: Path, backend: Any
) -> AsyncIterator[Told]:
    """Over two ranks. It sleeps when it has no rows, which frees nothing on a CPU, and must change nothing either."""
    engine = ProcessEngine()
    mesh = await Mesh.reserve(engine, 2, Resources(cpus=0))
    yield await mesh.shape(dp=1, tp=2).spawn(
        TOLD[backend.name], backend.config(model=str(folder / "0"), slots=16, keys={"sleep": True})
    )
    await engine.close()


async def begun(sampler: Told) -> tuple[Batch, AsyncIterator[Batch]]:
    stream = aiter(sampler.generate(ENDLESS, LONG))
    return await anext(stream), stream


async def test_two_ranks_along_tp_equal_one(shared: Told, models: tuple[list[PreTrainedModel], list[Weights]]) -> None:
    (first, second), weights = models
    assert await completions(shared) == greedy(first)
    ended, others = await begun(shared)
    places = await shared.load(weights[1].with_version(2))
    assert set(places.row("rank").tolist()) == {0}
    assert versions_of(ended) == {0}
    while 2 not in versions_of(await anext(others)):
        pass
    await shared.abort()
    assert (await every(others)).row("aborted").any()
    assert await completions(shared) == greedy(second)
    assert distances(second, await drawn(shared)).max() < 1e-4


async def test_a_process_of_an_engine_that_dies_ends_it_and_the_others(shared: Told) -> None:
    """The last test that can use this engine."""
    engine = psutil.Process(int((await shared.pid())[0]))
    # By order of start, because titles cannot be set everywhere. Ranks start before SGLang's detokenizer.
    children = [each for each in engine.children() if "resource_tracker" not in " ".join(each.cmdline())]
    started = sorted(children, key=lambda each: (each.create_time(), each.pid))
    assert len(started) >= 2
    _, others = await begun(shared)
    died = rf"process {started[1].pid}, at tp=1, has died \(signal SIGKILL\)"
    started[1].kill()
    with pytest.raises(RankFailed, match=died):
        await every(others)
    with pytest.raises(RankFailed, match=died):
        await rollout(shared, PROMPTS, GREEDY)
    _, alive = psutil.wait_procs([engine, *started], timeout=600)
    assert not alive


@pytest.mark.usefixtures("models")
async def test_heads_that_tp_does_not_divide_are_an_error_in_words(folder: Path, backend: Any) -> None:
    rank_context.set(Rank(0, 3, {"dp": 0, "tp": 0}, {"dp": 1, "tp": 3}, 1))
    said = {
        "vllm": r"started: Total number of attention heads \(2\) must be divisible by.*\(3\)",
        "sglang": r"started: .*2 attention heads cannot be split over 3 ranks",
    }
    with pytest.raises(ModelError, match=said[backend.name]):
        backend.sampler(backend.config(model=str(folder / "0"), slots=16))
