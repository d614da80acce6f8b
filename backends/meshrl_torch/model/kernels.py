"""GPU kernels for packed sequences: which one a model uses, and how each is called."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Final, Protocol, cast

import torch
from torch import Tensor

from meshrl import log
from meshrl.errors import ConfigError
from meshrl_torch.model.devices import moved

if TYPE_CHECKING:
    from meshrl_torch.model.attention import Group
    from meshrl_torch.options import Attention

_AMPERE: Final = (8, 0)
_HOPPER: Final = (9, 0)
_BLACKWELL: Final = (10, 11)
"""The first numbers of Blackwell's capabilities, except those of consumer cards."""


@dataclass(frozen=True)
class Bounds:
    """The bounds of segments, in the form that kernels for packed sequences need."""

    queries: Tensor
    """int32[segments + 1]: the start of each segment's queries, and the end."""
    keys: Tensor
    """As `queries`, for keys."""
    most_queries: int
    """Most queries of a segment."""
    most_keys: int
    """Most keys of a segment."""

    @classmethod
    def of(cls, groups: "tuple[Group, ...]", device: torch.device) -> "Bounds":
        """Compute the bounds of the groups' segments."""
        counts = torch.tensor([group.count for group in groups])
        shapes = torch.tensor([(group.queries, group.keys) for group in groups]).repeat_interleave(counts, 0)
        ends = torch.cat([shapes.new_zeros(1, 2), shapes.cumsum(0)]).to(torch.int32)
        queries, keys = moved(ends.T.contiguous(), device)
        return cls(queries, keys, max(group.queries for group in groups), max(group.keys for group in groups))


class Call(Protocol):
    """One call for all segments."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, scale: float, window: int | None) -> Tensor:
        """Return [tokens, heads, dims] from queries of that shape, and keys and values whose heads divide the queries'.

        A segment's queries are the last of its keys. A query sees the keys of its segment up to itself, or the last
        `window` of them.
        """
        ...


@dataclass(frozen=True)
class Kernel:
    """A kernel, and the states that it supports."""

    name: str
    call: Call
    most: int = 256
    """Most dims of a head."""
    also: int = 0
    """One more supported number of dims, beyond `most`."""

    def takes(self, states: Tensor) -> bool:
        """True if it supports such queries, [tokens, heads, dims]."""
        dims = states.shape[-1]
        fits = dims % 8 == 0 and (dims <= self.most or dims == self.also)
        return states.is_cuda and states.dtype in (torch.bfloat16, torch.float16) and fits


def _flash_attn(q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, scale: float, window: int | None) -> Tensor:
    """Call flash-attn 2.3 or later: causal from the bottom right, windows inclusive."""
    output = import_module("flash_attn").flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q=bounds.queries,
        cu_seqlens_k=bounds.keys,
        max_seqlen_q=bounds.most_queries,
        max_seqlen_k=bounds.most_keys,
        softmax_scale=scale,
        causal=True,
        window_size=(-1 if window is None else window - 1, 0),
    )
    return cast("Tensor", output)


def _flash_attn_4(q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, scale: float, window: int | None) -> Tensor:
    """Call flash-attn 4. None replaces -1, which would make a causal call one with a window. It returns a pair."""
    output, _ = import_module("flash_attn.cute").flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q=bounds.queries,
        cu_seqlens_k=bounds.keys,
        max_seqlen_q=bounds.most_queries,
        max_seqlen_k=bounds.most_keys,
        softmax_scale=scale,
        causal=True,
        window_size=(None if window is None else window - 1, None if window is None else 0),
    )
    return cast("Tensor", output)


def _varlen_attn(q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, scale: float, window: int | None) -> Tensor:
    """Call torch's flash attention: the same kernel with the same alignment."""
    output = import_module("torch.nn.attention.varlen").varlen_attn(
        q,
        k,
        v,
        bounds.queries,
        bounds.keys,
        bounds.most_queries,
        bounds.most_keys,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return cast("Tensor", output)


FLASH_ATTN: Final = Kernel("flash-attn", _flash_attn)
FLASH_ATTN_4: Final = Kernel("flash-attn-4", _flash_attn_4)
FLASH_ATTN_4_ON_BLACKWELL: Final = Kernel("flash-attn-4", _flash_attn_4, most=128, also=256)
VARLEN: Final = Kernel("varlen", _varlen_attn)


def chosen(asked: "Attention", device: torch.device) -> Kernel | None:
    """Return the kernel for a model on the device. None: SDPA. ConfigError if the requested one is not available.

    "auto", which is logged, uses flash-attn 4 if it is installed and the GPU is Hopper or later, else flash-attn, else
    torch's own.
    """
    if asked == "sdpa" or (asked == "auto" and device.type != "cuda"):
        return None
    if device.type != "cuda":
        raise ConfigError(f'attention = "{asked}" is for GPUs, and this rank has none: remove it')
    here = _here(torch.cuda.get_device_capability(device))
    if asked == "auto":
        kernel = next((each for each in here.values() if isinstance(each, Kernel)), None)
        log.info("attention of packed sequences", kernel=kernel.name if kernel else "sdpa", others=_missing(here))
        return kernel
    found = here[asked]
    if not isinstance(found, Kernel):
        raise ConfigError(f'attention = "{asked}": {found}; or leave it out')
    return found


@cache
def _here(capability: tuple[int, int]) -> Mapping[str, Kernel | str]:
    """Return each kernel for a GPU of this capability, best first, or why it is unavailable."""
    old = f"it needs a GPU of capability 8.0 or later, and this one has {capability[0]}.{capability[1]}"
    fourth = FLASH_ATTN_4_ON_BLACKWELL if capability[0] in _BLACKWELL else FLASH_ATTN_4
    return {
        "flash-attn-4": (
            f"it is for Hopper and later, and this GPU has capability {capability[0]}.{capability[1]}"
            if capability < _HOPPER
            else fourth
            if _has("flash-attn-4")
            else "pip install flash-attn-4"
        ),
        "flash-attn": old if capability < _AMPERE else FLASH_ATTN if _has("flash-attn") else "pip install flash-attn",
        "varlen": old if capability < _AMPERE else VARLEN if torch.version.cuda else "torch has it for CUDA alone",
    }


def _missing(here: Mapping[str, Kernel | str]) -> str:
    return "; ".join(f"{name}: {why}" for name, why in here.items() if isinstance(why, str)) or "not asked for"


def _has(distribution: str) -> bool:
    """True if it is installed. flash-attn and flash-attn 4 share a folder `flash_attn`."""
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True
