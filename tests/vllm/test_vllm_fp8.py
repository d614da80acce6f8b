from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, MixtralConfig, PretrainedConfig, PreTrainedModel, Qwen2Config

from meshrl import Batch, PolicyConfig
from meshrl.errors import EngineDied, ModelError
from meshrl.mesh import Rank, rank_context
from meshrl_torch.train.one_rank import TorchPolicy
from meshrl_torch.wire import fp8
from meshrl_vllm.sampler import VllmSampler
from tests.inference.conftest import Backend
from tests.inference.networks import SHAPE, distances, drawn, offer, saved, two
from tests.senders import sending

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TIED, BIASED = LlamaConfig(**SHAPE, tie_word_embeddings=True), Qwen2Config(**SHAPE)


class InFp8(nn.Module):
    """A linear layer of a matrix in FP8, whose inputs are rounded too: what vLLM computes, by torch in float32."""

    def __init__(self, linear: nn.Linear, processes: int) -> None:
        """`processes`: how many have a part of each input, and scale it alone."""
        super().__init__()
        self.processes = processes
        self.bias = linear.bias
        self.matrix = self.rounded(linear.weight)

    @staticmethod
    def rounded(rows: Tensor) -> Tensor:
        numbers, scales = fp8.quantized(rows.detach())
        return numbers.float() * scales

    def forward(self, states: Tensor) -> Tensor:
        parts = states.reshape(-1, states.shape[-1]).chunk(self.processes, 1)
        rounded = torch.cat([self.rounded(part) for part in parts], 1).reshape(states.shape)
        return nn.functional.linear(rounded, self.matrix, self.bias)


def rounding(network: PreTrainedModel, tp: int = 1) -> PreTrainedModel:
    """The network with its matrices in FP8, over `tp` processes."""
    for name in fp8.matrices(network):
        parent, _, last = name.removesuffix(".weight").rpartition(".")
        owner = network.get_submodule(parent)
        setattr(owner, last, InFp8(getattr(owner, last), tp if last in {"o_proj", "down_proj"} else 1))
    return network


def is_exact(network: PreTrainedModel, batch: Batch) -> bool:
    """Whether a sampler computes what a network does.

    A number between two of FP8 may become either on another processor, which shifts some tokens.
    """
    apart = distances(network, batch)
    return bool(np.median(apart) < 1e-3 and apart.max() < 0.3)


def made(folder: Path, quantization: str | None = "fp8", **keys: Any) -> VllmSampler:
    own: dict[str, object] = {"quantization": quantization}
    return VllmSampler(Backend("vllm").config(model=str(folder), slots=16, keys=own, **keys))


@pytest.fixture(autouse=True)
def rank() -> None:
    rank_context.set(Rank(threads=1))


def same(one: Batch, other: Batch) -> bool:
    pairs = [(each.tokens.values, each.ragged("sampler_logprobs").values) for each in (one, other)]
    return all(np.array_equal(*both) for both in zip(*pairs, strict=True))


@pytest.mark.parametrize("config", [pytest.param(TIED, marks=pytest.mark.wide), BIASED], ids=["tied", "biased"])
async def test_it_computes_with_rounded_matrices_of_files_of_memory_and_of_a_broadcast(
    config: PretrainedConfig, tmp_path: Path
) -> None:
    networks, weights = await two(config, tmp_path)
    names = fp8.matrices(networks[0])
    sampler = made(tmp_path / "0")
    first = await drawn(sampler)
    assert not is_exact(networks[0], first)
    exact = [rounding(network) for network in networks]
    assert is_exact(exact[0], first)
    loaded = await sampler.load(weights[1].with_version(1))
    assert 1e-4 < float(loaded.row("difference").max()) < 0.5
    second = await drawn(sampler)
    assert is_exact(exact[1], second)
    for matrices in (names, frozenset[str]()):
        with sending(2, 1 << 14, matrices) as senders:
            for seed, known in ((0, first), (1, second)):
                await sampler.load(offer(senders, weights[seed], 2))
                assert same(await drawn(sampler), known)
    sampler.close()


async def test_two_processes_along_tp_round_their_own_part_of_what_comes_in(tmp_path: Path) -> None:
    network = saved(BIASED, 0, tmp_path)
    weights = await TorchPolicy(PolicyConfig(model=str(tmp_path))).weights()
    rank_context.set(Rank(0, 2, {"dp": 0, "tp": 0}, {"dp": 1, "tp": 2}, 1))
    sampler = made(tmp_path)
    known = await drawn(sampler)
    assert is_exact(rounding(network, tp=2), known)
    with sending(2, 1 << 14, fp8.matrices(network)) as senders:
        await sampler.load(offer(senders, weights, 1))
        assert same(await drawn(sampler), known)
    sampler.close()


@pytest.mark.wide
async def test_a_model_in_bfloat16_is_near(tmp_path: Path) -> None:
    network = saved(TIED, 0, tmp_path)
    sampler = made(tmp_path, dtype="bfloat16")
    assert np.median(distances(rounding(network), await drawn(sampler))) < 0.1
    weights = await TorchPolicy(PolicyConfig(model=str(tmp_path), dtype="bfloat16")).weights()
    loaded = await sampler.load(weights.with_version(1))
    assert float(loaded.row("difference").max()) < 0.5
    sampler.close()


async def test_a_sampler_without_fp8_keeps_its_weights(tmp_path: Path) -> None:
    network = saved(TIED, 0, tmp_path)
    sampler = made(tmp_path, quantization=None)
    before = await drawn(sampler)
    with sending(2, 1 << 14, fp8.matrices(network)) as senders:
        offer = senders.offer(dict(network.named_parameters()), 1)
        with pytest.raises(ModelError, match="version 1 come in FP8"):
            await sampler.load(offer)
    assert same(await drawn(sampler), before)
    sampler.close()


def test_a_mixture_of_experts_is_refused(tmp_path: Path) -> None:
    saved(MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2), 0, tmp_path)
    with pytest.raises((ModelError, EngineDied), match=r"this model cannot be in FP8: 6 of its tensors"):
        made(tmp_path)
