"""Attention of packed sequences: which kernel is taken, and that one made for GPUs is asked for the same numbers.

No such kernel runs here. In its place stand functions of the same parameters that compute what its documentation says.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import structlog
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import varlen
from torch.nn.functional import scaled_dot_product_attention
from transformers import MistralConfig, MistralForCausalLM

from meshrl import Batch, ClippedLoss, NewModel, OptimizerConfig, PolicyConfig, Ragged
from meshrl.mesh import Rank, rank_context
from meshrl_hf import attention
from meshrl_hf.attention import Group, Kernel, Packed
from meshrl_torch.policy import TorchPolicy

MODEL = NewModel(characters="abcdefgh>", hidden_size=16, ffn_size=24, layers=2, heads=2, max_tokens=48)


@pytest.fixture(autouse=True)
def _choose_again() -> Iterator[None]:
    attention.packed_kernel.cache_clear()
    yield
    attention.packed_kernel.cache_clear()


def by_segment(
    q: Tensor, k: Tensor, v: Tensor, bounds: tuple[Tensor, Tensor], most: tuple[int, int], scale: float | None,
    causal: bool, window: tuple[int, int],
) -> Tensor:  # fmt: skip
    """What both libraries document: query i sees keys i + shift - left to i + shift + right, shift = keys - queries."""
    for each, longest in zip(bounds, most, strict=True):
        assert each.dtype == torch.int32
        assert each.is_contiguous()
        assert int(each.diff().max()) == longest
    assert scale is not None
    left, right = window
    outputs: list[Tensor] = []
    for rows, columns in zip(
        *(zip(each[:-1].tolist(), each[1:].tolist(), strict=True) for each in bounds), strict=True
    ):
        place = torch.arange(rows[1] - rows[0])[:, None] + (columns[1] - columns[0]) - (rows[1] - rows[0])
        key = torch.arange(columns[1] - columns[0])
        seen = torch.ones(len(place), len(key), dtype=torch.bool)
        if causal or right >= 0:
            seen &= key <= place + (0 if causal else right)
        if left >= 0:
            seen &= key >= place - left
        states = (q[slice(*rows)], k[slice(*columns)], v[slice(*columns)])
        query, keys, values = (each.transpose(0, 1)[None] for each in states)
        output = scaled_dot_product_attention(query, keys, values, seen, scale=scale, enable_gqa=True)
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


def flash_attn_varlen_func(  # noqa: PLR0913 - as flash-attn has it
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """Of flash-attn 2.8."""
    bounds, most = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    return by_segment(q, k, v, bounds, most, softmax_scale, causal, window_size)


def varlen_attn(*arguments: Any, **keywords: Any) -> Tensor:
    """Of torch."""
    bound = inspect.signature(TRUE_VARLEN).bind(*arguments, **keywords)
    bound.apply_defaults()
    given = SimpleNamespace(**bound.arguments)
    assert given.enable_gqa or given.query.shape[1] == given.key.shape[1]
    bounds, most = (given.cu_seq_q, given.cu_seq_k), (given.max_q, given.max_k)
    return by_segment(given.query, given.key, given.value, bounds, most, given.scale, False, given.window_size)


TRUE_VARLEN = varlen.varlen_attn


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Kernel | None]:
    """What is chosen on a GPU of a capability, with and without flash-attn, whose place a stand-in takes."""
    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)

    def choose(installed: bool, capability: tuple[int, int] = (9, 0), cuda: str | None = "13.0") -> Kernel | None:
        flash_attn = SimpleNamespace(__spec__=object(), flash_attn_varlen_func=flash_attn_varlen_func)
        monkeypatch.setitem(sys.modules, "flash_attn", cast("ModuleType", flash_attn if installed else None))
        with monkeypatch.context() as machine:
            machine.setattr(torch.cuda, "is_available", lambda: True)
            machine.setattr(torch.cuda, "get_device_capability", lambda: capability)
            machine.setattr(torch.version, "cuda", cuda)
            return attention.packed_kernel()

    return choose


@pytest.mark.parametrize(
    ("installed", "capability", "cuda", "name"),
    [
        (True, (9, 0), "13.0", "flash-attn"),
        (False, (9, 0), "13.0", "torch.nn.attention.varlen"),
        (True, (7, 5), "13.0", "SDPA"),
        (False, (9, 4), None, "SDPA"),  # AMD: torch's own is for CUDA
    ],
)
def test_the_kernel_is_chosen_and_logged_once(
    chosen: Callable[..., Kernel | None], installed: bool, capability: tuple[int, int], cuda: str | None, name: str
) -> None:
    with structlog.testing.capture_logs() as said:
        assert (chosen(installed, capability, cuda) is None) == (name == "SDPA")
        chosen(installed, capability, cuda)
    assert [(line["event"], line["kernel"]) for line in said] == [("attention of packed sequences", name)]


def test_without_a_gpu_nothing_is_said() -> None:
    with structlog.testing.capture_logs() as said:
        assert attention.packed_kernel() is None
    assert said == []


def rollouts(rows: int = 14, prompts: int = 4) -> Batch:
    """Rows with shared prompts, and a few alone."""
    rng = np.random.default_rng(0)
    heads = [rng.integers(2, 11, rng.integers(1, 9)) for _ in range(prompts)]
    pairs = [(heads[rng.integers(prompts)], rng.integers(1, 11, rng.integers(1, 10))) for _ in range(rows)]
    tokens = Ragged.of([np.concatenate(pair) for pair in pairs], np.int32)
    return Batch.of(
        tokens=tokens,
        loss_mask=Ragged.of([np.arange(len(a) + len(b)) >= len(a) for a, b in pairs], np.bool_),
        sampler_logprobs=Ragged(rng.normal(-2, 0.3, len(tokens.values)).astype(np.float32), tokens.offsets),
        advantages=rng.normal(size=rows).astype(np.float32),
    )


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with a sliding window of 5 and fewer key heads than query heads."""
    folder = tmp_path_factory.mktemp("models") / "windowed"
    shape: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 48}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = MistralForCausalLM(MistralConfig(vocab_size=11, **shape, **heads, eos_token_id=1, sliding_window=5))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(8 if parameter.dim() == 2 else 1)  # attention that tells its keys apart
    network.save_pretrained(folder)
    rank_context.set(Rank(threads=1))
    policy = TorchPolicy(PolicyConfig(model=MODEL))
    policy._model.tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("windows", [True, False])
@pytest.mark.parametrize("installed", [True, False])
async def test_kernels_for_gpus_are_asked_for_the_same_numbers(
    monkeypatch: pytest.MonkeyPatch,
    chosen: Callable[..., Kernel | None],
    installed: bool,
    windows: bool,
    windowed: str,
) -> None:
    optimizer = OptimizerConfig(lr=1.0, eps=1.0, max_grad_norm=None)  # nearly the gradient
    config = PolicyConfig(model=windowed if windows else MODEL, optimizer=optimizer, micro_batch_tokens=64)
    batch = rollouts()
    plain, fused = TorchPolicy(config), TorchPolicy(config)
    expected = (await plain.logprobs(batch)).ragged("logprobs").values
    await plain.update(batch, ClippedLoss())

    chosen(installed)
    monkeypatch.setattr(attention, "_fits", lambda states: True)
    monkeypatch.setattr(Packed, "_by_shape", None)  # nothing falls back
    logprobs = (await fused.logprobs(batch)).ragged("logprobs").values
    await fused.update(batch, ClippedLoss())
    torch.testing.assert_close(torch.tensor(logprobs), torch.tensor(expected), rtol=0, atol=1e-5)
    others = fused._model.tensors()
    for name, tensor in plain._model.tensors().items():
        torch.testing.assert_close(others[name], tensor, rtol=0, atol=1e-5)


def test_what_the_kernels_do_not_take_goes_to_sdpa() -> None:
    def fits(dims: int, dtype: torch.dtype, is_cuda: bool = True) -> bool:
        return attention._fits(cast("Tensor", SimpleNamespace(shape=(1, 1, dims), dtype=dtype, is_cuda=is_cuda)))

    assert fits(64, torch.bfloat16)
    assert fits(256, torch.float16)
    assert not fits(12, torch.bfloat16)
    assert not fits(264, torch.bfloat16)
    assert not fits(64, torch.float32)
    assert not fits(64, torch.bfloat16, is_cuda=False)


def test_compiled_layers_are_not_compiled_again_for_other_segments() -> None:
    model = TorchPolicy(PolicyConfig(model=MODEL))._model
    counter = CompileCounter()
    for layer in cast("nn.ModuleList", model.network.base_model.layers):
        layer.compile(backend=counter)
    compiled: list[int] = []
    # Twice: for the first number of tokens, and for any.
    for groups in ((Group(2, 6, 6),), (Group(3, 4, 4), Group(1, 8, 8)), (Group(5, 3, 3),), (Group(1, 9, 9),)):
        lengths = [group.queries for group in groups for _ in range(group.count)]
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        with torch.no_grad():
            model.hidden(positions % 9 + 2, positions, Packed(groups))
        compiled.append(counter.frame_count)
    assert compiled[1:] == [2 * compiled[0]] * 3
    assert compiled[0] > 0
