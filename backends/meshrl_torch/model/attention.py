"""One attention function, registered with transformers, and the GPU kernels for packed sequences that it calls.

A model is called with `attend=...`. transformers passes unknown keywords on to the attention of each layer. No T x T
mask is made, because no mask function is registered under the name.

With a kernel for packed sequences, all segments are one call. Without a kernel, and for states that it does not
support, each shape of segments is one call of SDPA.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Final, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AttentionInterface

from meshrl import log
from meshrl.errors import ConfigError, ModelError
from meshrl_torch.model.scores import Scores
from meshrl_torch.options import Attention


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to the device. The host does not wait, because a GPU copies from pinned memory."""
    if tensor.device == device:
        return tensor
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


NAME: Final = "meshrl"
_AMPERE: Final = (8, 0)
_HOPPER: Final = (9, 0)
_BLACKWELL: Final = (10, 11)
"""The first numbers of Blackwell's capabilities, except those of consumer cards."""


Attend: TypeAlias = Callable[[int, Tensor, Tensor, Tensor, Scores], Tensor]
"""The attention of one forward pass, called once for each layer: `(layer, query, key, value, scores)`.

Returns [batch, tokens, heads, dims] from [batch, heads, tokens, dims]. Key heads divide query heads.
"""


@dataclass(frozen=True)
class Group:
    """Adjacent segments of one shape: `count` times `queries` tokens that see up to `keys` tokens each."""

    count: int
    queries: int
    keys: int

    def mask(self, scores: Scores, like: Tensor) -> Tensor | None:
        """Return what is added to the scores, [queries, keys]: 0 or -inf. None if `Scores.attend` needs none."""
        clipped = min(scores.window or self.keys, scores.chunk or self.keys) < self.keys
        if scores.own or (not clipped and self.queries in (1, self.keys)):
            return None
        key = torch.arange(self.keys, device=like.device)
        return scores.hide(key[-self.queries :, None], key, like.dtype)


@dataclass(frozen=True)
class Bounds:
    """The bounds of segments, in the form that kernels for packed sequences need."""

    queries: Tensor
    """int32[segments + 1]: the start of each segment's queries, and the end."""
    keys: Tensor
    """As `queries`, for keys."""
    most_queries: int
    most_keys: int

    @classmethod
    def of(cls, groups: tuple[Group, ...], device: torch.device) -> "Bounds":
        """Compute the bounds of the groups' segments."""
        counts = torch.tensor([group.count for group in groups])
        shapes = torch.tensor([(group.queries, group.keys) for group in groups]).repeat_interleave(counts, 0)
        ends = torch.cat([shapes.new_zeros(1, 2), shapes.cumsum(0)]).to(torch.int32)
        queries, keys = moved(ends.T.contiguous(), device)
        return cls(queries, keys, max(group.queries for group in groups), max(group.keys for group in groups))


Call: TypeAlias = Callable[[Tensor, Tensor, Tensor, Bounds, float, int | None], Tensor]
"""One call for all segments: `(q, k, v, bounds, scale, window)`.

Returns [tokens, heads, dims] from queries of that shape, and keys and values whose heads divide the queries'. A
segment's queries are the last of its keys. A query sees the keys of its segment up to itself, or the last `window` of
them.
"""


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
FLASH_ATTN_4_ON_BLACKWELL: Final = replace(FLASH_ATTN_4, most=128, also=256)
VARLEN: Final = Kernel("varlen", _varlen_attn)


def chosen(option: Attention, device: torch.device) -> Kernel | None:
    """Return the kernel for a model on the device. None: SDPA. ConfigError if the requested one is not available.

    "auto", which is logged, uses flash-attn 4 if it is installed and the GPU is Hopper or later, else flash-attn, else
    torch's own.
    """
    if option == "sdpa" or (option == "auto" and device.type != "cuda"):
        return None
    if device.type != "cuda":
        raise ConfigError(f'attention = "{option}" is for GPUs, and this rank has none: remove it')
    kernels = _kernels(torch.cuda.get_device_capability(device))
    if option == "auto":
        kernel = next((each for each in kernels.values() if isinstance(each, Kernel)), None)
        missing = "; ".join(f"{name}: {why}" for name, why in kernels.items() if isinstance(why, str))
        name = kernel.name if kernel else "sdpa"
        log.info("attention of packed sequences", kernel=name, others=missing or "not asked for")
        return kernel
    named = kernels[option]
    if not isinstance(named, Kernel):
        raise ConfigError(f'attention = "{option}": {named}; or leave it out')
    return named


@cache
def _kernels(capability: tuple[int, int]) -> Mapping[str, Kernel | str]:
    """Return each kernel for a GPU of this capability, best first, or why it is unavailable."""
    has = f"capability {capability[0]}.{capability[1]}"
    fourth: Kernel | str = FLASH_ATTN_4_ON_BLACKWELL if capability[0] in _BLACKWELL else FLASH_ATTN_4
    if capability < _HOPPER:
        fourth = f"it is for Hopper and later, and this GPU has {has}"
    elif not _has("flash-attn-4"):
        fourth = "pip install flash-attn-4"
    if capability < _AMPERE:
        old = f"it needs a GPU of capability 8.0 or later, and this one has {capability[0]}.{capability[1]}"
        return {"flash-attn-4": fourth, "flash-attn": old, "varlen": old}
    return {
        "flash-attn-4": fourth,
        "flash-attn": FLASH_ATTN if _has("flash-attn") else "pip install flash-attn",
        "varlen": VARLEN if torch.version.cuda else "torch has it for CUDA alone",
    }


def _has(distribution: str) -> bool:
    """True if it is installed. flash-attn and flash-attn 4 share a folder `flash_attn`."""
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True


@dataclass(frozen=True)
class Packed:
    """Causal attention inside each segment of one packed sequence, without padding.

    Segments of one shape are adjacent, so each shape is one call on a view. `keys`, int64[all keys], is the packed
    token of each key of each segment, if segments also see a shared prefix. None if each segment sees only itself.
    """

    groups: tuple[Group, ...]
    keys: Tensor | None = None
    kernel: Kernel | None = None
    """The kernel for all segments at once."""
    bounds: dict[torch.device, Bounds] = field(default_factory=dict)
    """Computed in the first layer, and used in all."""
    masks: dict[tuple[Group, int | None, int | None, bool], Tensor | None] = field(default_factory=dict)
    """As `bounds`."""

    def to(self, device: torch.device) -> "Packed":
        """Return the same on a device."""
        keys = None if self.keys is None else moved(self.keys, device)
        return replace(self, keys=keys, bounds={}, masks={})

    def by(self, kernel: Kernel | None) -> "Packed":
        """Return the same with a kernel. It shares what other layers have computed."""
        return self if kernel is self.kernel else replace(self, kernel=kernel)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """Call the kernel once for all segments, or SDPA once for each group."""
        q, k, v = (states.squeeze(0).transpose(0, 1) for states in (query, key, value))
        if self.keys is not None:
            k, v = k.index_select(0, self.keys), v.index_select(0, self.keys)
        less = q.shape[-1] - v.shape[-1]
        if self.kernel is None or not self.kernel.takes(q) or not scores.plain or less < 0:
            return self._by_shape(q, k, v, scores)
        if less:  # kernels take values of the queries' size alone
            v = pad(v, (0, less))
        if q.device not in self.bounds:
            self.bounds[q.device] = Bounds.of(self.groups, q.device)
        output = self.kernel.call(q, k, v, self.bounds[q.device], scores.scale, scores.window)[None]
        return output[..., : v.shape[-1] - less] if less else output

    def _by_shape(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
        queries = q.split([group.count * group.queries for group in self.groups])
        seen = [group.count * group.keys for group in self.groups]
        outputs: list[Tensor] = []
        for group, *parts in zip(self.groups, queries, k.split(seen), v.split(seen), strict=True):
            gq, gk, gv = (part.unflatten(0, (group.count, -1)).transpose(1, 2) for part in parts)
            name = group, scores.window, scores.chunk, scores.own
            if name not in self.masks:
                self.masks[name] = group.mask(scores, q)
            outputs.append(scores.attend(gq, gk, gv, self.masks[name]).transpose(1, 2).flatten(0, 1)[None])
        return torch.cat(outputs, 1) if len(outputs) > 1 else outputs[0]


def _attention(  # noqa: PLR0913, PLR0917 - as transformers calls it
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 - always None
    scaling: float | None = None,
    attend: Attend | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Called by transformers in each layer."""
    if attend is None:
        raise ModelError(f"{type(module).__name__} does not hand keywords of its forward on to its attention")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    number = getattr(module, "layer_idx", None)
    layer = number if isinstance(number, int) else -1  # layers share it
    window, chunk = _reach(module, layer)
    scores = Scores(scale, window if sliding_window is None else sliding_window, chunk, softcap, s_aux)
    return attend(layer, query, key, value, scores), None


def _reach(module: torch.nn.Module, layer: int) -> tuple[int | None, int | None]:
    """Return the window and the chunks that a layer's kind says, because some models tell them only to their masks."""
    config = getattr(module, "config", None)
    kinds = cast("Sequence[str]", getattr(config, "layer_types", None) or ())
    kind = kinds[layer] if 0 <= layer < len(kinds) else ""
    window = getattr(config, "sliding_window", None) if kind == "sliding_attention" else None
    return window, getattr(config, "attention_chunk_size", None) if kind == "chunked_attention" else None


# Compiled blocks skip it: torch would recompile them for the shapes of each micro-batch, and then give up.
AttentionInterface.register(NAME, torch.compiler.disable(_attention))
