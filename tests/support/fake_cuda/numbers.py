"""Numbers for a fake GPU: each operation on CUDA tensors is also done by the CPU, on the same memory.

The real CUDA operation comes first, so devices, dtypes, shapes, memory and streams are those of a GPU. Its kernels do
nothing. `waits` counts what the host waits for, by the place in the product that asks for it.
"""

import ctypes
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

DIRECT: Final = {
    *("record_stream", "set_", "resize_", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
    *("is_pinned", "_pin_memory", "pin_memory", "is_same_size", "_record_function_enter_new", "_resize_output_"),
    *("detach", "lift_fresh", "alias", "storage_offset", "_has_compatible_shallow_copy_type", "is_set_to"),
    "_local_scalar_dense",
}
"""Operations that need no numbers."""
GROWING: Final = {
    *("nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "repeat_interleave", "bincount"),
}
"""Operations whose shapes depend on numbers."""
INDEXED: Final = {"index", "index_put", "index_put_", "_index_put_impl_"}
"""The same, if an index is a mask."""

COMPOSED: Final = set[str]()
"""Packages whose operations are written in Python, of others."""

waits: Final = Counter[tuple[str, str]]()
"""What the host waited for, and where, while `watch` is on."""

_runtime: Final = ctypes.CDLL("libcudart.so.13")
_runtime.fakecuda_settle.argtypes = [ctypes.c_void_p]


def alias(tensor: Tensor) -> Tensor:
    """Return the same memory as a tensor of the CPU."""
    if not tensor.is_cuda:
        return tensor
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    if size == 0:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    base = torch.frombuffer((ctypes.c_ubyte * size).from_address(storage.data_ptr()), dtype=torch.uint8)
    made = torch.empty(0, dtype=tensor.dtype)
    return made.set_(base.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def on_host(value: object) -> object:
    """Return a value for the same operation on the CPU."""
    if isinstance(value, Tensor):
        return alias(value)
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    if isinstance(value, torch.Generator) and value.device.type == "cuda":
        return None
    return value


def on_gpu(device: torch.device, value: object) -> object:
    """Return a result of the CPU as one of the GPU."""
    if not isinstance(value, Tensor):
        return value
    made = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)
    if value.numel():
        alias(made).copy_(value)
    return made


def attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float, hidden: Tensor | None = None,
    bias: Tensor | None = None, gradient: Tensor | None = None,
) -> Sequence[Tensor]:  # fmt: skip
    """Attention of [..., heads, tokens, dims], and its log-sum-exp. With the output's gradient: those of the inputs."""
    group = query.shape[-3] // key.shape[-3]
    keys, values = (each.float().repeat_interleave(group, -3) for each in (key, value))
    queries = query.float()
    scores = queries @ keys.transpose(-1, -2) * scale
    if bias is not None:
        scores = scores + bias
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    shares, output = scores.softmax(-1), scores.softmax(-1) @ values
    if gradient is None:
        return output, scores.logsumexp(-1)
    out = gradient.float()
    by_score = shares * (out @ values.transpose(-1, -2) - (out * output).sum(-1, keepdim=True)) * scale
    to_keys, to_values = by_score.transpose(-1, -2) @ queries, shares.transpose(-1, -2) @ out
    folded = [each.unflatten(-3, (-1, group)).sum(-3) for each in (to_keys, to_values)]
    return by_score @ keys, *folded


def causal(queries: int, keys: int, left: int | None = None) -> Tensor:
    """Return the mask of what queries do not see, if they are the last of the keys and see at most `left` before."""
    at, seen = torch.arange(keys - queries, keys)[:, None], torch.arange(keys)[None]
    return (seen > at) | ((seen < at - left) if left is not None and left >= 0 else torch.tensor(False))


def named(real: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return an operation's arguments by their names, with tensors of the CPU."""
    own = dict(zip((each.name for each in real._schema.arguments), args, strict=False)) | dict(kwargs)
    return {name: alias(each) if isinstance(each, Tensor) else each for name, each in own.items()}


def _fill(outputs: Sequence[Any], found: Sequence[Tensor]) -> None:
    for made, each in zip(outputs, found, strict=False):
        if made.shape == each.shape:
            alias(made).copy_(each)


def packed_attention(real: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Attention of packed sequences, forwards and backwards."""
    outputs, given = real(*args, **kwargs), named(real, args, kwargs)
    starts, ends = (cast("Tensor", given.get(f"cum_seq_{each}", given.get(f"cu_seq_{each}"))) for each in "qk")
    window = given.get("window_size") or (given.get("window_size_left", -1), given.get("window_size_right", -1))
    query, gradient = given["query"], given.get("grad_out")
    scale = given.get("scale") or query.shape[-1] ** -0.5
    found: list[list[Tensor]] = []
    for (begin, end), (first, last) in zip(*(zip(x.tolist(), x[1:].tolist()) for x in (starts, ends)), strict=True):  # noqa: B905 -- neighbours
        is_causal = given["is_causal"] or window[1] == 0
        hidden = causal(end - begin, last - first, window[0]) if is_causal else None
        parts = query[begin:end], given["key"][first:last], given["value"][first:last]
        q, k, v = (part.transpose(0, 1) for part in parts)
        out = None if gradient is None else gradient[begin:end].transpose(0, 1)
        each = attend(q, k, v, scale, hidden, gradient=out)
        found.append([part.transpose(0, 1) if part.dim() == 3 else part for part in each])
    _fill(outputs, [torch.cat(each, 0 if each[0].dim() == 3 else 1) for each in zip(*found, strict=True)])
    return outputs


def attention(real: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Attention by torch's own kernels, forwards and backwards."""
    outputs, given = real(*args, **kwargs), named(real, args, kwargs)
    query, key = given["query"], given["key"]
    scale = given.get("scale") or query.shape[-1] ** -0.5
    hidden = causal(query.shape[-2], query.shape[-2])[:, : key.shape[-2]] if given.get("is_causal") else None
    gradient = given.get("grad_out", given.get("grad_out_"))
    found = attend(query, key, given["value"], scale, hidden, given.get("attn_bias"), gradient)
    _fill(outputs, found)
    return outputs


SPECIAL: Final = {
    **dict.fromkeys(
        (*("aten::_flash_attention_forward", "aten::_flash_attention_backward"),
         *("torch_attn::_varlen_attn", "torch_attn::_varlen_attn_backward")),
        packed_attention,
    ),
    **{
        f"aten::_scaled_dot_product_{kind}_attention{way}": attention
        for kind in ("flash", "efficient", "cudnn")
        for way in ("", "_backward")
    },
}  # fmt: skip


def _is_cuda(value: object) -> bool:
    return value.is_cuda if isinstance(value, Tensor) else isinstance(value, torch.device) and value.type == "cuda"


class Numbers(TorchDispatchMode):
    """Computes what the GPU does not."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if any(each.__name__ == "FakeTensor" for each in types):
            return func(*args, **kwargs)
        plain: Any = Tensor
        if any(each.__torch_dispatch__ != plain.__torch_dispatch__ for each in types):
            return NotImplemented
        flat, spec = tree_flatten((args, kwargs))
        package, _, name = func._schema.name.partition("::")
        mutable = func._schema.is_mutable
        whole = torch.is_inference_mode_enabled() and func._can_decompose()  # composite operations come whole then
        direct = (
            name in DIRECT or package in ("c10d", "_c10d_functional") or (func.is_view and not mutable and not whole)
        )
        if direct or not any(map(_is_cuda, flat)):
            return func(*args, **kwargs)
        settle(flat)
        if special := SPECIAL.get(func._schema.name):
            return special(func, args, kwargs)
        if whole:
            with self:
                return func.decompose(*args, **kwargs)
        if package in COMPOSED:
            with self:
                return func.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), *args, **kwargs)
        return _computed(func, name, args, kwargs, flat, spec)


def settle(flat: Sequence[object]) -> None:
    """Wait for what the current stream of each GPU waits for, as the kernels would."""
    for index in {each.device.index for each in flat if isinstance(each, Tensor) and each.is_cuda}:
        _runtime.fakecuda_settle(torch._C._cuda_getCurrentRawStream(index))


def _computed(func: Any, name: str, args: Any, kwargs: Any, flat: Sequence[Any], spec: Any) -> Any:
    """Do an operation twice, and take the numbers of the CPU's."""
    seen = [each for each in flat if isinstance(each, Tensor)]
    masks = name in INDEXED and any(each.dtype in (torch.bool, torch.uint8) for each in seen[1:])
    growing = name in GROWING or masks
    outputs = None if growing else func(*args, **kwargs)
    if (isinstance(outputs, Tensor) and outputs.is_meta) or any(each.is_meta for each in seen):
        return outputs
    written: list[Tensor] = [outputs] if name == "_to_copy" and isinstance(outputs, Tensor) else seen[:1]
    to_host = name in ("_to_copy", "copy_") and not any(each.is_cuda for each in written)
    if to_host and len({each.dtype for each in (*seen, *written)}) == 1:
        return outputs  # a real copy
    host_args, host_kwargs = tree_unflatten([on_host(each) for each in flat], spec)
    if name == "_to_copy" and to_host:
        host_kwargs = {**host_kwargs, "device": None}
    if "pin_memory" in host_kwargs:
        host_kwargs["pin_memory"] = None
    found = func(*host_args, **host_kwargs)
    if growing:
        device = next(each.device for each in seen if each.is_cuda)
        return args[0] if func._schema.is_mutable else tree_map(partial(on_gpu, device), found)
    for one, other in zip(tree_flatten(outputs)[0], tree_flatten(found)[0], strict=False):
        if isinstance(one, Tensor) and isinstance(other, Tensor) and one.numel():
            place = alias(one)
            if place.data_ptr() != other.data_ptr():
                place.copy_(other)
    return outputs


def _refuse(self: torch.cuda.CUDAGraph) -> None:
    raise NotImplementedError("a CUDA graph has no numbers on a fake GPU: run without graphs, or with FAKE_CUDA=memory")


def begin() -> None:
    """Compute on fake GPUs in this thread, and in each that starts from now on."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # its library plans on the GPU
    torch.cuda.CUDAGraph.replay = _refuse  # type: ignore[method-assign]
    run = threading.Thread.run
    mode: Any = Numbers  # whose base class has no annotations

    def run_with_numbers(self: threading.Thread) -> None:
        with mode():
            run(self)

    threading.Thread.run = run_with_numbers  # type: ignore[method-assign]
    own: Any = torch
    write: Callable[..., str] = own._tensor_str._str

    def write_host(self: Tensor, **options: Any) -> str:  # torch turns all modes off for it
        return write(self.detach().cpu() if self.is_cuda else self, **options)

    own._tensor_str._str = write_host
    mode().__enter__()


@contextmanager
def watch(under: str = "/meshrl") -> Generator[None]:
    """Count what the host waits for. Places are the innermost lines of files whose path contains `under`."""

    def note(what: bytes, _: int) -> None:
        stack = reversed(traceback.extract_stack())
        frame = next((each for each in stack if under in each.filename and each.filename != __file__), None)
        waits[what.decode(), f"{frame.filename}:{frame.lineno} {frame.name}" if frame else "elsewhere"] += 1

    hook = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_size_t)(cast("Callable[..., None]", note))
    place = ctypes.c_void_p.in_dll(_runtime, "fakecuda_hook")
    place.value = ctypes.cast(hook, ctypes.c_void_p).value
    try:
        yield
    finally:
        place.value = None
