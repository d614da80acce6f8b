"""Attention of packed sequences: which kernel is taken, and that one made for GPUs is asked for the same numbers.

No such kernel runs here. In its place stand functions of the same parameters that compute what its documentation says.
"""

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import structlog
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import MistralConfig

from meshrl import ClippedLoss, PolicyConfig
from meshrl.errors import ConfigError
from meshrl_megatron.roles import MegatronPolicy
from meshrl_torch.model import attention as kernels
from meshrl_torch.model.attention import Kernel, Packed
from meshrl_torch.options import Attention
from meshrl_torch.train.fsdp.roles import FsdpPolicy
from meshrl_torch.train.roles import TrainedPolicy
from tests.backends.material import SGD, SHAPE, ModelOf, floats, near, rollouts
from tests.backends.test_megatron_families import FAMILIES
from tests.contracts.contracts import read
from tests.contracts.sources import distribution_of

BACKENDS: Mapping[str, Callable[[PolicyConfig], TrainedPolicy]] = {"fsdp": FsdpPolicy, "megatron": MegatronPolicy}


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
    assert q.shape[-1] == k.shape[-1] == v.shape[-1], "the kernels check it"
    left, right = window
    outputs: list[Tensor] = []
    for rows, columns in zip(*(pairwise(each.tolist()) for each in bounds), strict=True):
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


def standing_in(name: str, parameters: str, told: Callable[[SimpleNamespace], object]) -> Callable[..., object]:
    """A function of the real one's parameters, as its release has them, which is told what it is called with."""
    names: dict[str, Any] = {}
    exec(f"def {name}{parameters}: ...", names)  # noqa: S102 -- a signature that is committed
    signature = inspect.signature(names[name])

    def called(*arguments: object, **keywords: object) -> object:
        bound = signature.bind(*arguments, **keywords)
        bound.apply_defaults()
        return told(SimpleNamespace(**bound.arguments))

    return called


def _flash_attn(given: SimpleNamespace, window: tuple[int, int] | None = None) -> Tensor:
    bounds, most = (given.cu_seqlens_q, given.cu_seqlens_k), (given.max_seqlen_q, given.max_seqlen_k)
    states = given.q, given.k, given.v
    return by_segment(*states, bounds, most, given.softmax_scale, given.causal, window or given.window_size)


def _flash_attn_4(given: SimpleNamespace) -> tuple[Tensor, None]:
    """As its `_resolve_causal_local_window` has it: a bound of -1 is one, unless both are."""
    left, right = given.window_size
    if left is not None and right is not None and left < 0 and right < 0:
        left = right = None
    assert left is None or left >= 0
    window = -1 if left is None else left, 0 if given.causal else -1 if right is None else right
    return _flash_attn(given, window), None


def _varlen(given: SimpleNamespace) -> Tensor:
    assert given.enable_gqa or given.query.shape[1] == given.key.shape[1]
    bounds, most = (given.cu_seq_q, given.cu_seq_k), (given.max_q, given.max_k)
    return by_segment(given.query, given.key, given.value, bounds, most, given.scale, False, given.window_size)


PLACES: Mapping[str, tuple[str, str, Callable[[SimpleNamespace], object]]] = {
    "flash-attn": ("flash_attn", "flash_attn_varlen_func", _flash_attn),
    "flash-attn-4": ("flash_attn.cute", "flash_attn_varlen_func", _flash_attn_4),
    "varlen": ("torch.nn.attention.varlen", "varlen_attn", _varlen),
}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def make(installed: Sequence[str], capability: tuple[int, int] = (9, 0), cuda: str | None = "13.0") -> None:
        def version(name: str) -> str:
            if name not in installed:
                raise PackageNotFoundError(name)
            return "1"

        kernels._kernels.cache_clear()
        for name, (module, function, told) in PLACES.items():
            there = SimpleNamespace()
            if name in installed or name == "varlen":
                target = f"{module}.{function}"
                signature = read(distribution_of(target))[target]
                setattr(there, function, standing_in(function, signature, told))
            monkeypatch.setitem(sys.modules, module, cast("ModuleType", there))
        monkeypatch.setattr(kernels, "version", version)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(torch.version, "cuda", cuda)

    return make


GPU, CPU = torch.device("cuda"), torch.device("cpu")


def test_the_best_kernel_that_is_there_is_chosen_and_logged(machine: Callable[..., None]) -> None:
    for installed, capability, cuda, name in (
        (["flash-attn"], (9, 0), "13.0", "flash-attn"),
        (["flash-attn", "flash-attn-4"], (9, 0), "13.0", "flash-attn-4"),
        (["flash-attn", "flash-attn-4"], (8, 0), "13.0", "flash-attn"),
        (["flash-attn-4"], (10, 0), "13.0", "flash-attn-4"),
        ([], (9, 0), "13.0", "varlen"),
        (["flash-attn"], (7, 5), "13.0", "sdpa"),
        ([], (9, 4), None, "sdpa"),  # AMD: torch's own is for CUDA
    ):
        machine(installed, capability, cuda)
        with structlog.testing.capture_logs() as said:
            kernel = kernels.chosen("auto", GPU)
        assert (kernel.name if kernel else "sdpa") == name, (installed, capability, cuda)
        assert [(line["event"], line["kernel"]) for line in said] == [("attention of packed sequences", name)]
    with structlog.testing.capture_logs() as said:
        assert kernels.chosen("auto", CPU) is None
    assert said == []


def test_a_kernel_is_taken_where_it_is_asked_for_or_an_error_says_why_not(machine: Callable[..., None]) -> None:
    machine(["flash-attn"])
    taken: list[tuple[Attention, torch.device]] = [("flash-attn", GPU), ("varlen", GPU), ("sdpa", GPU), ("sdpa", CPU)]
    assert [kernels.chosen(*each) for each in taken] == [kernels.FLASH_ATTN, kernels.VARLEN, None, None]
    wrong: list[tuple[Attention, torch.device, tuple[int, int], str]] = [
        ("flash-attn-4", GPU, (9, 0), 'attention = "flash-attn-4": pip install flash-attn-4; or leave it out'),
        ("flash-attn", CPU, (9, 0), "is for GPUs, and this rank has none"),
        ("flash-attn-4", GPU, (8, 6), r"it is for Hopper and later, and this GPU has capability 8\.6"),
        ("varlen", GPU, (7, 5), r"needs a GPU of capability 8\.0 or later, and this one has 7\.5"),
    ]
    for asked, device, capability, words in wrong:
        machine(["flash-attn"] if capability == (9, 0) else ["flash-attn", "flash-attn-4"], capability)
        with pytest.raises(ConfigError, match=words):
            kernels.chosen(asked, device)


@pytest.mark.parametrize(
    ("backend", "name"), [("fsdp", "flash-attn"), ("fsdp", "flash-attn-4"), ("fsdp", "varlen"), ("megatron", "varlen")]
)
async def test_kernels_for_gpus_are_asked_for_the_same_numbers(
    monkeypatch: pytest.MonkeyPatch, machine: Callable[..., None], backend: str, name: Attention, model_of: ModelOf
) -> None:
    role = BACKENDS[backend]
    narrow = FAMILIES["deepseek_v3"][0]  # its values are smaller than its queries
    model = model_of(narrow if backend == "megatron" else MistralConfig(**SHAPE, sliding_window=5))
    table = {"backend": backend, "optimizer": SGD, "micro_batch_tokens": 64, "model": model}
    batch, plain = rollouts(), role(PolicyConfig.model_validate(table))
    expected = floats((await plain.logprobs(batch)).ragged("logprobs").values)
    await plain.update(batch, ClippedLoss())
    updated = await plain.weights()

    machine(["flash-attn", "flash-attn-4"])
    module = "meshrl_torch.train.fsdp.loading" if backend == "fsdp" else "meshrl_megatron.model"
    monkeypatch.setattr(sys.modules[module], "chosen", lambda asked, _: kernels.chosen(asked, GPU))
    monkeypatch.setattr(Kernel, "takes", lambda _, states: True)
    fused = role(PolicyConfig.model_validate({**table, backend: {"attention": name}}))
    monkeypatch.setattr(Packed, "_by_shape", None)  # nothing falls back
    found = floats((await fused.logprobs(batch)).ragged("logprobs").values)
    await fused.update(batch, ClippedLoss())
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)
    near(await fused.weights(), updated, 2e-5)


def test_what_the_kernels_do_not_take_goes_to_sdpa() -> None:
    def takes(kernel: Kernel, dims: int, dtype: torch.dtype = torch.bfloat16, is_cuda: bool = True) -> bool:
        return kernel.takes(cast("Tensor", SimpleNamespace(shape=(1, 1, dims), dtype=dtype, is_cuda=is_cuda)))

    for kernel in (kernels.FLASH_ATTN, kernels.FLASH_ATTN_4, kernels.VARLEN):
        assert [takes(kernel, dims) for dims in (64, 12, 264)] == [True, False, False]
        assert takes(kernel, 256, torch.float16)
        assert not takes(kernel, 64, torch.float32)
        assert not takes(kernel, 64, is_cuda=False)
    assert [takes(kernels.FLASH_ATTN_4_ON_BLACKWELL, dims) for dims in (128, 136, 256)] == [True, False, True]
