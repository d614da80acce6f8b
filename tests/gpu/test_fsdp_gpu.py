"""The FSDP2 backend on GPUs: what computes there and nowhere else gives the numbers of float32 and of SDPA."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from meshrl import ClippedLoss, MeshConfig, ModelConfig, NewModel, PolicyConfig, Run, RunConfig
from meshrl.roles import Policy
from meshrl_hf import kernels
from meshrl_hf.attention import Group, Packed
from meshrl_hf.kernels import Bounds, Kernel
from meshrl_hf.loading import load
from meshrl_hf.model import LanguageModel, ready
from tests.backends.material import rollouts

pytestmark = pytest.mark.gpu

MODEL = NewModel(characters="abcdefgh>", hidden_size=128, ffn_size=256, layers=2, heads=2, max_tokens=128)
GPU = torch.device("cuda")


async def trained(folder: Path, ranks: int = 1, **changes: object) -> tuple[list[dict[str, float]], Tensor]:
    """The metrics of three steps, and the log-probs after them."""
    mesh = MeshConfig(ranks=ranks, cpus=1, gpus=1 if ranks > 1 else 0)
    engine = "processes" if ranks > 1 else "local"
    table = {"model": MODEL, "backend": "fsdp", "mesh": "train", "micro_batch_tokens": 64, **changes}
    async with Run(RunConfig(folder=str(folder), name="run", engine=engine, meshes={"train": mesh})) as run:
        policy = await run.spawn(Policy, PolicyConfig.model_validate(table))
        steps = [(await policy.update(rollouts(24, seed=seed), ClippedLoss())).means() for seed in range(3)]
        scored = await (await policy.logprobs(rollouts(24))).load("logprobs")
    return [dict(step) for step in steps], torch.tensor(scored.ragged("logprobs").values)


async def assert_alike(one: Path, other: Path, tolerance: float, ranks: int = 1, **changes: object) -> None:
    """Training with these changes gives what training in float32 on one GPU gives."""
    (plain, expected), (changed, found) = await trained(one), await trained(other, ranks, **changes)
    for step, wanted in zip(changed, plain, strict=True):
        assert step["loss"] == pytest.approx(wanted["loss"], rel=tolerance, abs=tolerance)
        assert step["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=tolerance, abs=tolerance)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


async def test_bfloat16_trains_as_float32_does(tmp_path: Path) -> None:
    await assert_alike(tmp_path / "float32", tmp_path / "bfloat16", 5e-2, dtype="bfloat16")


async def test_compiled_blocks_give_the_same_numbers(tmp_path: Path) -> None:
    await assert_alike(tmp_path / "plain", tmp_path / "compiled", 1e-3, fsdp={"compile": True})


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
async def test_two_gpus_over_nccl_give_the_numbers_of_one(tmp_path: Path) -> None:
    await assert_alike(tmp_path / "one", tmp_path / "two", 1e-3, ranks=2)


def attended(
    packed: Callable[[Tensor, Tensor, Tensor], Tensor], states: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype
) -> list[Tensor]:
    """The output and the gradients of queries, keys and values, in float32."""
    given = [each.to(dtype).requires_grad_() for each in states]
    output = packed(*given)
    weights = torch.linspace(-1, 1, output.numel(), device=GPU).reshape(output.shape)
    gradients = torch.autograd.grad((output.float() * weights).sum(), given)
    return [each.float() for each in (output, *gradients)]


def assert_equals_sdpa(kernel: Kernel, window: int | None) -> None:
    groups = (Group(3, 1, 1), Group(2, 5, 17), Group(1, 64, 64), Group(2, 30, 130))
    queries = sum(group.count * group.queries for group in groups)
    keys = sum(group.count * group.keys for group in groups)
    torch.manual_seed(0)
    states = (
        torch.randn(queries, 4, 64, device=GPU),
        torch.randn(keys, 2, 64, device=GPU),
        torch.randn(keys, 2, 64, device=GPU),
    )
    packed, bounds, scale = Packed(groups), Bounds.of(groups, GPU), 0.1
    exact = attended(lambda q, k, v: packed._by_shape(q, k, v, scale, window)[0], states, torch.float32)
    fused = attended(lambda q, k, v: kernel.call(q, k, v, bounds, scale, window), states, torch.bfloat16)
    for found, expected in zip(fused, exact, strict=True):
        torch.testing.assert_close(found, expected, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("name", ["flash-attn-4", "flash-attn", "varlen"])
def test_kernels_for_packed_sequences_equal_sdpa(name: str) -> None:
    kernel = kernels._here(torch.cuda.get_device_capability())[name]
    if not isinstance(kernel, Kernel):
        pytest.skip(kernel)
    for window in (None, 7):
        assert_equals_sdpa(kernel, window)


def test_a_policy_in_bfloat16_takes_such_a_kernel() -> None:
    kernel = kernels.chosen("auto", GPU)
    assert (kernel is None) == (torch.cuda.get_device_capability() < (8, 0))
    assert kernel is None or kernel.takes(torch.zeros(1, 2, 64, dtype=torch.bfloat16, device=GPU))


def test_logprobs_of_a_large_vocabulary_hold_a_quarter_of_the_naive_way() -> None:
    tokens, vocabulary, dims = 8192, 150_000, 256
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=dims, intermediate_size=8, num_hidden_layers=1, num_attention_heads=4,
        eos_token_id=1,
    )  # fmt: skip
    model = ready(LlamaForCausalLM(config), load(ModelConfig(model=MODEL)).tokenizer, chat=None)
    torch.nn.Module.to(model.network, GPU, torch.bfloat16)
    chosen = torch.arange(tokens, device=GPU)
    peaks: list[int] = []
    for way in (naive, LanguageModel.logprobs):
        model.network.zero_grad()
        hidden = torch.ones(tokens, dims, device=GPU, dtype=torch.bfloat16, requires_grad=True)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        way(model, hidden, chosen, None).sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] <= peaks[0] / 4


def naive(model: LanguageModel, hidden: Tensor, chosen: Tensor, temperature: Tensor | None) -> Tensor:
    return model.logits(hidden).log_softmax(-1).gather(1, chosen[:, None])[:, 0]
