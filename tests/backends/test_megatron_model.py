"""One rank's forward pass, against transformers with its own SDPA: the same bits for the same shapes of matrices."""

from collections.abc import Iterator
from itertools import product
from typing import Final, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from meshrl import Batch, PolicyConfig, Ragged
from meshrl.data import Source
from meshrl.mesh import Rank, rank_context
from meshrl_megatron.model import Model, build
from meshrl_megatron.passes import Pipeline
from meshrl_torch.model.scoring import logprobs
from tests.backends.material import SHAPE, ModelOf

pytestmark = [pytest.mark.bits, pytest.mark.megatron]

SCALED: Final = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
SHAPES: Final = {
    "Llama, scaled RoPE, a head of its own": LlamaConfig(**SHAPE, rope_parameters=SCALED, tie_word_embeddings=False),
    "Qwen2, biases, tied": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "Qwen3, norms and wide heads": Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True),
}


@pytest.fixture(autouse=True)
def _one_thread_again() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=list(SHAPES.values()), ids=list(SHAPES))
def folder(request: pytest.FixtureRequest, model_of: ModelOf) -> str:
    return model_of(request.param)


def cases() -> Iterator[tuple[str, int]]:
    for dtype, threads in product(("float32", "bfloat16"), (1, 2)):
        rank_context.set(Rank(threads=threads))
        torch.set_num_threads(threads)
        yield dtype, threads


def row(length: int) -> Batch:
    rng = np.random.default_rng(0)
    tokens = Ragged.of([rng.integers(2, 11, length)], np.int32)
    return Batch.of(tokens=tokens, temperature=rng.uniform(0.5, 1.5, 1).astype(np.float32))


def built(folder: str, dtype: str) -> Model:
    config = PolicyConfig.model_validate({"model": folder, "dtype": dtype})
    return build(config, Rank(threads=1))


def scored(model: Model, batch: Batch) -> Tensor:
    pipeline = Pipeline(model.stages, model)
    found = logprobs(pipeline.passes(1000), batch, Source.trainer(0))
    return torch.from_numpy(found.values.copy())


def reference(folder: str, dtype: str) -> PreTrainedModel:
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval()
    for parameter in network.parameters():
        parameter.data = parameter.data.clone()  # in a mapped file they lie askew, which tells in products of one row
    return cast("PreTrainedModel", network)


@torch.no_grad()
def of_transformers(network: PreTrainedModel, batch: Batch) -> Tensor:
    ids = torch.from_numpy(batch.tokens[0].astype(np.int64))
    logits = network(input_ids=ids[None, :-1], use_cache=False).logits[0]
    scaled = logits / torch.full((len(ids) - 1, 1), float(batch.row("temperature")[0]))
    return torch.cat([torch.zeros(1), scaled.log_softmax(-1, dtype=torch.float32).gather(1, ids[1:, None])[:, 0]])


def test_one_row_has_the_bits_of_transformers(folder: str) -> None:
    for dtype, threads in cases():
        model, network = built(folder, dtype), reference(folder, dtype)
        for length in (9, 2, 17, 30):
            expected = of_transformers(network, row(length))
            assert torch.equal(scored(model, row(length)), expected), (dtype, threads, length)
