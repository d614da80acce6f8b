"""The FSDP2 backend on GPUs: what computes there and nowhere else gives the numbers of float32 and of SDPA."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from meshrl import ClippedLoss, NewModel, PolicyConfig, Run, RunConfig
from meshrl.roles import ModelConfig, Policy
from meshrl.run import MeshConfig
from meshrl_torch.model import attention as kernels
from meshrl_torch.model.attention import Bounds, Group, Kernel, Packed
from meshrl_torch.model.loading import load
from meshrl_torch.model.network import LanguageModel, ready
from meshrl_torch.model.scores import Scores
from tests.backends.material import rollouts

pytestmark = pytest.mark.gpu

MODEL = NewModel(characters="abcdefgh>", hidden_size=128, ffn_size=256, layers=2, heads=2, max_tokens=128)
GPU = torch.device("cuda")


async def trained(folder: Path, ranks: int = 1, **changes: object) -> tuple[list[dict[str, float]], Tensor]:
    mesh = MeshConfig(ranks=ranks, cpus=1, gpus=1 if ranks > 1 else 0)
    engine = "processes" if ranks > 1 else "local"
    table = {"model": MODEL, "backend": "fsdp", "mesh": "train", "micro_batch_tokens": 64, **changes}
    async with Run(RunConfig(folder=str(folder), name="run", engine=engine, meshes={"train": mesh})) as run:
        policy = await run.spawn(Policy, PolicyConfig.model_validate(table))
        steps = [(await policy.update(rollouts(24, seed=seed), ClippedLoss())).means() for seed in range(3)]
        scored = await (await policy.logprobs(rollouts(24))).load("logprobs")
    return [dict(step) for step in steps], torch.tensor(scored.ragged("logprobs").values)


COMPILER = pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")  # torch's own import
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")


@pytest.mark.parametrize(
    ("changes", "ranks", "tolerance"),
    [
        pytest.param({"dtype": "bfloat16"}, 1, 5e-2, id="bfloat16"),
        pytest.param({"fsdp": {"compile": True}}, 1, 1e-3, id="compiled blocks", marks=COMPILER),
        pytest.param({}, 2, 1e-3, id="two GPUs over NCCL", marks=TWO),
    ],
)
async def test_it_trains_as_one_gpu(tmp_path: Path, changes: dict[str, object], ranks: int, tolerance: float) -> None:
    plain, expected = await trained(tmp_path / "plain")
    changed, found = await trained(tmp_path / "changed", ranks, **changes)
    for step, wanted in zip(changed, plain, strict=True):
        for name in ("loss", "grad_norm"):
            assert step[name] == pytest.approx(wanted[name], rel=tolerance, abs=tolerance)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def attended(packed: Callable[..., Tensor], states: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
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
    states = [torch.randn(count, heads, 64, device=GPU) for count, heads in ((queries, 4), (keys, 2), (keys, 2))]
    packed, bounds, scale = Packed(groups), Bounds.of(groups, GPU), 0.1
    exact = attended(lambda q, k, v: packed._by_shape(q, k, v, Scores(scale, window))[0], states, torch.float32)
    fused = attended(lambda q, k, v: kernel.call(q, k, v, bounds, scale, window), states, torch.bfloat16)
    for found, expected in zip(fused, exact, strict=True):
        torch.testing.assert_close(found, expected, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("name", ["flash-attn-4", "flash-attn", "varlen"])
def test_kernels_for_packed_sequences_equal_sdpa(name: str) -> None:
    kernel = kernels._kernels(torch.cuda.get_device_capability())[name]
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
