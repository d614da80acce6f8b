"""Attention of packed sequences: which kernel is taken, and that one made for GPUs is asked for the same numbers.

No such kernel runs here. In its place stand functions of the same parameters that compute what its documentation says.
"""

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import structlog
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn.functional import scaled_dot_product_attention
from transformers import MistralConfig, MistralForCausalLM

from meshrl import Batch, ClippedLoss, ConfigError, NewModel, OptimizerConfig, PolicyConfig, Ragged
from meshrl.mesh import Rank, rank_context
from meshrl_fsdp.policy import FsdpPolicy
from meshrl_hf import kernels
from meshrl_hf.attention import Group, Packed
from meshrl_hf.kernels import Kernel
from meshrl_hf.options import Attention
from meshrl_hf.roles import TrainedPolicy
from meshrl_megatron.policy import MegatronPolicy
from meshrl_torch.policy import TorchPolicy
from tests.gpu_contracts.contracts import read
from tests.gpu_contracts.sources import distribution_of

BACKENDS: Mapping[str, Callable[[PolicyConfig], TrainedPolicy]] = {"fsdp": FsdpPolicy, "megatron": MegatronPolicy}
MODEL = NewModel(characters="abcdefgh>", hidden_size=16, ffn_size=24, layers=2, heads=2, max_tokens=48)


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


def _flash_attn(given: SimpleNamespace) -> Tensor:
    bounds, most = (given.cu_seqlens_q, given.cu_seqlens_k), (given.max_seqlen_q, given.max_seqlen_k)
    return by_segment(given.q, given.k, given.v, bounds, most, given.softmax_scale, given.causal, given.window_size)


def _flash_attn_4(given: SimpleNamespace) -> tuple[Tensor, None]:
    """As its `_resolve_causal_local_window` has it: a bound of -1 is one, unless both are."""
    bounds, most = (given.cu_seqlens_q, given.cu_seqlens_k), (given.max_seqlen_q, given.max_seqlen_k)
    left, right = given.window_size
    if left is not None and right is not None and left < 0 and right < 0:
        left = right = None
    assert left is None or left >= 0
    window = (-1 if left is None else left, 0 if given.causal else -1 if right is None else right)
    return by_segment(given.q, given.k, given.v, bounds, most, given.softmax_scale, given.causal, window), None


def _varlen(given: SimpleNamespace) -> Tensor:
    assert given.enable_gqa or given.query.shape[1] == given.key.shape[1]
    bounds, most = (given.cu_seq_q, given.cu_seq_k), (given.max_q, given.max_k)
    return by_segment(given.query, given.key, given.value, bounds, most, given.scale, False, given.window_size)


PLACES = {
    "flash-attn": ("flash_attn", "flash_attn_varlen_func", "flash_attn/flash_attn_interface.py", _flash_attn),
    "flash-attn-4": ("flash_attn.cute", "flash_attn_varlen_func", "flash_attn/cute/interface.py", _flash_attn_4),
    "varlen": ("torch.nn.attention.varlen", "varlen_attn", "torch/nn/attention/varlen.py", _varlen),
}
"""By setting: the module, the function in it, the file that defines it, and what it computes."""


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes this a machine with a GPU of a capability, and stand-ins for what is installed."""

    def make(installed: Sequence[str], capability: tuple[int, int] = (9, 0), cuda: str | None = "13.0") -> None:
        kernels._here.cache_clear()
        for name, (module, function, file, told) in PLACES.items():
            there = SimpleNamespace()
            if name in installed or name == "varlen":
                target = f"{file} {function}"
                signature = read(distribution_of(target))[target]
                setattr(there, function, standing_in(function, signature, told))
            monkeypatch.setitem(sys.modules, module, cast("ModuleType", there))
        monkeypatch.setattr(kernels, "_has", lambda name: name in installed)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(torch.version, "cuda", cuda)

    return make


GPU, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.mark.parametrize(
    ("installed", "capability", "cuda", "name"),
    [
        (["flash-attn"], (9, 0), "13.0", "flash-attn"),
        (["flash-attn", "flash-attn-4"], (9, 0), "13.0", "flash-attn-4"),
        (["flash-attn", "flash-attn-4"], (8, 0), "13.0", "flash-attn"),
        (["flash-attn-4"], (10, 0), "13.0", "flash-attn-4"),
        ([], (9, 0), "13.0", "varlen"),
        (["flash-attn"], (7, 5), "13.0", "sdpa"),
        ([], (9, 4), None, "sdpa"),  # AMD: torch's own is for CUDA
    ],
)
def test_the_best_kernel_that_is_there_is_chosen_and_logged(
    machine: Callable[..., None], installed: Sequence[str], capability: tuple[int, int], cuda: str | None, name: str
) -> None:
    machine(installed, capability, cuda)
    with structlog.testing.capture_logs() as said:
        kernel = kernels.chosen("auto", GPU)
    assert (kernel.name if kernel else "sdpa") == name
    assert [(line["event"], line["kernel"]) for line in said] == [("attention of packed sequences", name)]


def test_without_a_gpu_nothing_is_said() -> None:
    with structlog.testing.capture_logs() as said:
        assert kernels.chosen("auto", CPU) is None
    assert said == []


def test_a_kernel_is_taken_where_it_is_asked_for_and_an_error_says_why_it_cannot_be(
    machine: Callable[..., None],
) -> None:
    machine(["flash-attn"])
    assert kernels.chosen("flash-attn", GPU) is kernels.FLASH_ATTN
    assert kernels.chosen("varlen", GPU) is kernels.VARLEN
    assert kernels.chosen("sdpa", GPU) is None
    assert kernels.chosen("sdpa", CPU) is None
    with pytest.raises(ConfigError, match='attention = "flash-attn-4": pip install flash-attn-4; or leave it out'):
        kernels.chosen("flash-attn-4", GPU)
    with pytest.raises(ConfigError, match="is for GPUs, and this rank has none"):
        kernels.chosen("flash-attn", CPU)
    machine(["flash-attn", "flash-attn-4"], capability=(8, 6))
    with pytest.raises(ConfigError, match=r"it is for Hopper and later, and this GPU has capability 8\.6"):
        kernels.chosen("flash-attn-4", GPU)
    machine([], capability=(7, 5))
    with pytest.raises(ConfigError, match=r"needs a GPU of capability 8\.0 or later, and this one has 7\.5"):
        kernels.chosen("varlen", GPU)


def test_flash_attn_4_is_found_by_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attn has a folder `cute` too, and without it `flash_attn` is a package of that folder alone."""
    asked: list[str] = []

    def version(name: str) -> str:
        asked.append(name)
        raise PackageNotFoundError(name)

    monkeypatch.setattr(kernels, "version", version)
    kernels._here.cache_clear()
    kernels._here((9, 0))
    assert asked == ["flash-attn-4", "flash-attn"]


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
@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
async def test_kernels_for_gpus_are_asked_for_the_same_numbers(
    monkeypatch: pytest.MonkeyPatch, machine: Callable[..., None], backend: str, name: Attention, windows: bool,
    windowed: str,
) -> None:  # fmt: skip
    if backend == "megatron" and windows:
        pytest.skip("it has no models with windows")
    optimizer = OptimizerConfig(lr=1.0, eps=1.0, max_grad_norm=None)  # nearly the gradient
    table = {"model": windowed if windows else MODEL, "optimizer": optimizer, "micro_batch_tokens": 64}
    config = PolicyConfig.model_validate({**table, "backend": backend})
    batch, role = rollouts(), BACKENDS[backend]
    plain = role(config)
    expected = (await plain.logprobs(batch)).ragged("logprobs").values
    await plain.update(batch, ClippedLoss())

    machine(["flash-attn", "flash-attn-4"])
    module = "meshrl_fsdp.loading" if backend == "fsdp" else "meshrl_megatron.model"
    monkeypatch.setattr(sys.modules[module], "chosen", lambda asked, _: kernels.chosen(asked, GPU))
    monkeypatch.setattr(Kernel, "takes", lambda _, states: True)
    fused = role(PolicyConfig.model_validate({**table, "backend": backend, backend: {"attention": name}}))
    monkeypatch.setattr(Packed, "_by_shape", None)  # nothing falls back
    logprobs = (await fused.logprobs(batch)).ragged("logprobs").values
    await fused.update(batch, ClippedLoss())
    torch.testing.assert_close(torch.tensor(logprobs), torch.tensor(expected), rtol=0, atol=1e-5)
    others = dict(fused._trainable.published())
    for key, tensor in plain._trainable.published():
        torch.testing.assert_close(others[key], tensor, rtol=0, atol=1e-5)


def test_what_the_kernels_do_not_take_goes_to_sdpa() -> None:
    def takes(kernel: Kernel, dims: int, dtype: torch.dtype = torch.bfloat16, is_cuda: bool = True) -> bool:
        return kernel.takes(cast("Tensor", SimpleNamespace(shape=(1, 1, dims), dtype=dtype, is_cuda=is_cuda)))

    for kernel in (kernels.FLASH_ATTN, kernels.FLASH_ATTN_4, kernels.VARLEN):
        assert takes(kernel, 64)
        assert takes(kernel, 256, torch.float16)
        assert not takes(kernel, 12)
        assert not takes(kernel, 264)
        assert not takes(kernel, 64, torch.float32)
        assert not takes(kernel, 64, is_cuda=False)
    assert [takes(kernels.FLASH_ATTN_4_ON_BLACKWELL, dims) for dims in (128, 136, 256)] == [True, False, True]


def test_compiled_layers_are_not_compiled_again_for_other_segments() -> None:
    torch.compiler.reset()  # else it knows of other tests which sizes change
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
