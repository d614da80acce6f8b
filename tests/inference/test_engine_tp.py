"""Engines over two ranks along tp, on a CPU: their numbers are transformers', before new weights and after."""

from collections.abc import AsyncIterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from meshrl import (
    Batch,
    Mesh,
    RankFailed,
    Resources,
    Sampling,
    Weights,
    rollout,
)
from meshrl.engines.processes import ProcessEngine
from meshrl.errors import ModelError
from meshrl.mesh import Rank, rank_context
from meshrl_hf.text import character_tokenizer
from tests.inference.conftest import TOLD, Told

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

PROMPTS = Batch.of(prompt=["abc>", "hgfe>", "abc>", "d>"])
Model: TypeAlias = "tuple[PreTrainedModel, str]"
"""A network, and its folder."""
GREEDY = Sampling(max_tokens=20, temperature=0, ignore_eos=True)
LONGEST = 1024
LONG = Sampling(max_tokens=1000, ignore_eos=True)
ENDLESS = Batch.of(prompt=["abc>"] * 8000, max_tokens=np.where(np.arange(8000) % 2, 1000, 50))
"""Rows for 260,000 steps, more than an engine makes while a test may last. Few end in a second, for slow readers."""


def network(seed: int = 0) -> PreTrainedModel:
    """A Llama of heads that engines' kernels for CPUs know, far from its initialisation."""
    config = LlamaConfig(
        vocab_size=11,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=LONGEST,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    made: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return made


def weights(made: PreTrainedModel, version: int) -> Weights:
    return Weights(version, {name: each.detach().numpy() for name, each in made.named_parameters()})


def greedy(made: PreTrainedModel, prompts: Batch = PROMPTS) -> list[list[int]]:
    """What transformers generates."""
    tokenizer = character_tokenizer("abcdefgh>", LONGEST)
    completions: list[list[int]] = []
    for text in prompts.objects("prompt"):
        ids = torch.tensor([tokenizer.encode(str(text))])
        out = made.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)  # type: ignore[operator]
        completions.append(out[0, ids.shape[1] :].tolist())
    return completions


class Row(NamedTuple):
    """A row of a rollout, an entry for each token."""

    tokens: NDArray[np.int64]
    new: NDArray[np.bool_]
    logprobs: NDArray[np.float64]
    versions: NDArray[np.int64]


def told(batch: Batch) -> list[Row]:
    columns = zip(batch.tokens, batch.loss_mask, batch.sampler_logprobs, batch.versions, strict=True)
    return [
        Row(tokens.astype(np.int64), new.astype(np.bool_), values.astype(np.float64), versions.astype(np.int64))
        for tokens, new, values, versions in columns
    ]


def completions(batch: Batch) -> list[list[int]]:
    return [row.tokens[row.new].tolist() for row in told(batch)]


def versions_of(batch: Batch) -> set[int]:
    """Of all new tokens."""
    return {version for row in told(batch) for version in row.versions[row.new].tolist()}


async def every(stream: AsyncIterator[Batch]) -> Batch:
    return Batch.concat([await batch.load() async for batch in stream])


def logprobs(made: PreTrainedModel, tokens: NDArray[np.int64], temperature: float = 1.0) -> NDArray[np.float32]:
    """Of each token but the first, given those before it."""
    with torch.no_grad():
        logits = made(torch.tensor([tokens.tolist()])).logits[0] / temperature
    chosen = torch.from_numpy(tokens[1:])
    return np.asarray(logits.log_softmax(-1)[:-1].gather(1, chosen[:, None])[:, 0])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("model")
    made = network()
    made.save_pretrained(folder)
    character_tokenizer("abcdefgh>", LONGEST).save_pretrained(folder)
    return made, str(folder)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(model: Model, backend: Any) -> AsyncIterator[Told]:
    """Over two ranks. It sleeps when it has no rows, which frees nothing on a CPU, and must change nothing either."""
    engine = ProcessEngine()
    mesh = await Mesh.reserve(engine, 2, Resources(cpus=0))
    yield await mesh.shape(dp=1, tp=2).spawn(
        TOLD[backend.name], backend.config(model=model[1], slots=16, keys={"sleep": True})
    )
    await engine.close()


async def begun(sampler: Told) -> tuple[Batch, AsyncIterator[Batch]]:
    """The rows that ended first, and those that are still drawn."""
    stream = aiter(sampler.generate(ENDLESS, LONG))
    return await anext(stream), stream


async def test_two_ranks_along_tp_compute_what_one_does(shared: Told, model: Model) -> None:
    made, _ = model
    other = network(seed=1)
    assert completions(await rollout(shared, PROMPTS, GREEDY)) == greedy(made)
    first, others = await begun(shared)
    places = await shared.load(weights(other, 2))
    assert set(places.row("rank").tolist()) == {0}
    assert versions_of(first) == {0}
    while 2 not in versions_of(await anext(others)):
        pass
    await shared.abort()
    assert (await every(others)).row("aborted").any()
    batch = await rollout(shared, PROMPTS, GREEDY)
    assert completions(batch) == greedy(other)
    for row in told(batch):
        np.testing.assert_allclose(row.logprobs[row.new], logprobs(other, row.tokens)[row.new[1:]], atol=1e-4)


async def test_a_process_of_an_engine_that_dies_ends_it_and_the_others(shared: Told) -> None:
    """The last test that can use this engine."""
    engine = psutil.Process(int((await shared.pid())[0]))
    # By order of start, because titles cannot be set everywhere. Ranks start before SGLang's detokenizer.
    children = [each for each in engine.children() if "resource_tracker" not in " ".join(each.cmdline())]
    started = sorted(children, key=lambda each: (each.create_time(), each.pid))
    assert len(started) >= 2
    _, others = await begun(shared)
    died = (
        f"of the 2 that its matrices are split over, process {started[1].pid}, at tp=1, has died \\(signal SIGKILL\\)"
    )
    started[1].kill()
    with pytest.raises(RankFailed, match=died):
        await every(others)
    with pytest.raises(RankFailed, match=died):
        await rollout(shared, PROMPTS, GREEDY)
    _, alive = psutil.wait_procs([engine, *started], timeout=600)
    assert not alive


async def test_heads_that_tp_does_not_divide_are_an_error_in_words(model: Model, backend: Any) -> None:
    rank_context.set(Rank(0, 3, {"dp": 0, "tp": 0}, {"dp": 1, "tp": 3}, 1))
    said = {
        "vllm": r"started: Total number of attention heads \(2\) must be divisible by.*\(3\)",
        "sglang": r"started: .*2 attention heads cannot be split over 3 ranks",
    }
    with pytest.raises(ModelError, match=said[backend.name]):
        backend.sampler(backend.config(model=model[1], slots=16))
