"""Numbers for vLLM on a fake GPU: its own CUDA operations, by hand, and its Triton kernels by Triton's interpreter.

An operation that is not here ends in torch's error that the CPU does not have it, with its name.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from itertools import pairwise
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.nn.functional import silu

from tests.support.fake_cuda.numbers import COMPOSED, SPECIAL, alias, attend, causal, named, settle


def norm(states: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    """Divide by the root of the mean square, in float32."""
    wide = states.float()
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)).to(states.dtype)
    return normed if weight is None else normed * weight


def rms_norm(result: Tensor, input: Tensor, weight: Tensor | None, epsilon: float) -> None:  # noqa: A002 -- vLLM's name
    """Write the norm."""
    result.copy_(norm(input, weight, epsilon))


def fused_add_rms_norm(input: Tensor, residual: Tensor, weight: Tensor | None, epsilon: float) -> None:  # noqa: A002 -- vLLM's name
    """Write the sum into `residual`, and its norm into `input`."""
    residual.add_(input)
    input.copy_(norm(residual, weight, epsilon))


def silu_and_mul(result: Tensor, input: Tensor) -> None:  # noqa: A002 -- vLLM's name
    """Multiply both halves, the first one after SiLU."""
    gate, up = input.chunk(2, -1)
    result.copy_(silu(gate.float()).to(gate.dtype) * up)


def rotary_embedding(
    positions: Tensor, query: Tensor, key: Tensor | None, head_size: int, cos_sin_cache: Tensor, is_neox: bool,
    rope_dim_offset: int = 0, inverse: bool = False,
) -> None:  # fmt: skip
    """Turn the first dims of each head: pairs are half of them apart."""
    _only("rotary_embedding", is_neox=is_neox, rope_dim_offset=rope_dim_offset == 0, inverse=not inverse)
    cos, sin = (part[:, None] for part in cos_sin_cache[positions.flatten()].float().chunk(2, -1))
    half = cos.shape[-1]
    for states in (query, key):
        if states is not None:
            heads = states.view(len(cos), -1, head_size)
            one, two = heads[..., :half].float(), heads[..., half : 2 * half].float()
            heads[..., :half], heads[..., half : 2 * half] = one * cos - two * sin, two * cos + one * sin


def reshape_and_cache_flash(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, kv_cache_dtype: str,
    **_: object,
) -> None:  # fmt: skip
    """Put each token's key and value into its slot. Those without one are negative."""
    _only("reshape_and_cache_flash", kv_cache_dtype=kv_cache_dtype == "auto")
    rows = (slot_mapping >= 0).nonzero().flatten()
    block, place = slot_mapping[rows] // key_cache.shape[1], slot_mapping[rows] % key_cache.shape[1]
    key_cache[block, place], value_cache[block, place] = key[rows], value[rows]


def vocab_parallel_embedding(
    out: Tensor, input_ids: Tensor, weight: Tensor, org_vocab_start_index: int, org_vocab_end_index: int, **_: object
) -> None:
    """Look up tokens of this part of the vocabulary. Others are zero."""
    here = (input_ids >= org_vocab_start_index) & (input_ids < org_vocab_end_index)
    out.copy_(weight[(input_ids - org_vocab_start_index).where(here, 0)] * here[..., None])


WRITERS: Final[Mapping[str, Callable[..., None]]] = {
    **{
        f"_C::{each.__name__}": each
        for each in (rms_norm, fused_add_rms_norm, silu_and_mul, rotary_embedding, vocab_parallel_embedding)
    },
    "_C_cache_ops::reshape_and_cache_flash": reshape_and_cache_flash,
}
"""Operations that write into their arguments, with these names in vLLM's schemas."""


def written(real: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Do one of them on the GPU's memory."""
    real(*args, **kwargs)
    WRITERS[real._schema.name](**named(real, args, kwargs))


def paged_attention(real: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """FlashAttention 3: attention of packed queries on keys and values in blocks."""
    outputs, given = real(*args, **kwargs), named(real, args, kwargs)
    unused = ("q_v", "k_new", "leftpad_k", "s_aux", "seqused_q")
    _only(real._schema.name, softcap=not given["softcap"], **{name: given.get(name) is None for name in unused})
    _only(real._schema.name, k=given["k"].dtype == given["q"].dtype)
    table = cast("Tensor", given["page_table"])
    query, keys, values, starts = given["q"], given["k"], given["v"], given["cu_seqlens_q"].tolist()
    out = alias(outputs[0]) if given.get("out") is None else given["out"]
    left = given["window_size_left"]
    for row, (begin, end) in enumerate(pairwise(starts)):
        if begin == end:
            continue
        read = int(given["seqused_k"][row])
        blocks = table[row, : -(-read // keys.shape[1])].long()
        key, value = (each[blocks].flatten(0, 1)[:read].transpose(0, 1) for each in (keys, values))
        hidden = causal(end - begin, read, left) if given["is_causal"] else None
        found, _ = attend(query[begin:end].transpose(0, 1), key, value, given["softmax_scale"], hidden)
        out[begin:end] = found.transpose(0, 1)
    return [torch.empty(0, device="cuda") if each is None else each for each in outputs]  # torch refuses none


def as_is(real: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Make what only kernels read."""
    return real(*args, **kwargs)


def _only(operation: str, **has_numbers: bool) -> None:
    missing = [name for name, has in has_numbers.items() if not has]
    if missing:
        raise NotImplementedError(f"{operation} has no numbers on a fake GPU with this {', '.join(missing)}")


class _OnTheSameBytes:
    """How Triton's interpreter gets its arguments, in the place of copies."""

    @classmethod
    def host(cls, value: Any) -> Any:
        """Return an argument as a kernel on the CPU takes it."""
        if isinstance(value, Tensor):
            return alias(value)
        if isinstance(value, tuple):
            made = [cls.host(each) for each in value]
            return type(value)(*made) if hasattr(value, "_fields") else tuple(made)
        if hasattr(value, "data_ptr") or hasattr(value, "block_shape"):
            raise NotImplementedError(f"a Triton kernel has no numbers on a fake GPU with a {type(value).__name__}")
        return value

    def init(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return all arguments."""
        settle([*args, *kwargs.values()])
        return [self.host(each) for each in args], {name: self.host(each) for name, each in kwargs.items()}


def begin() -> None:
    """Compute what vLLM asks for, too."""
    SPECIAL.update(dict.fromkeys(WRITERS, written))
    SPECIAL.update({"_vllm_fa3_C::fwd": paged_attention})
    SPECIAL.update(dict.fromkeys(("_vllm_fa3_C::get_scheduler_metadata", "_C::weak_ref_tensor"), as_is))
    COMPOSED.add("vllm")
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # a package that needs CUDA's compiler
    ways: Any = import_module("triton.runtime.interpreter").GridExecutor  # which reads the variable
    ways._init_args_hst = lambda _, args, kwargs: _OnTheSameBytes().init(args, kwargs)
    ways._restore_args_dev = lambda *_: None
