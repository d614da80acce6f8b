"""One attention function, registered with transformers, that does what the forward pass asks of it.

A model is called with `attend=...`; transformers hands unknown keywords down to the attention of each layer,
and no T x T mask is made, because no mask function is registered under the name.

On a GPU all segments of a packed sequence are one call of a kernel made for them: flash-attn's where it is installed,
else torch's own. Elsewhere, and for states that these do not take, it is one call of SDPA for each shape of segment.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Final, Protocol, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from meshrl import log
from meshrl.errors import ModelError
from meshrl_hf.devices import moved

NAME: Final = "meshrl"


class Attend(Protocol):
    """The attention of one forward pass, called once a layer."""

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """[batch, tokens, heads, dims] from [batch, heads, tokens, dims], key heads dividing query heads.

        A query sees the `window` positions up to its own, or all of them.
        """
        ...


@dataclass(frozen=True)
class Group:
    """Adjacent segments of one shape: `count` times `queries` tokens that see up to `keys` tokens each."""

    count: int
    queries: int
    keys: int

    def mask(self, window: int | None, like: Tensor) -> Tensor | None:
        """What is added to the scores, [queries, keys]: 0 or -inf. None where plain causal masking says it all."""
        clipped = window is not None and window < self.keys
        if not clipped and (self.queries in (1, self.keys)):
            return None
        query = torch.arange(self.keys - self.queries, self.keys, device=like.device)[:, None]
        key = torch.arange(self.keys, device=like.device)
        hidden = key > query
        if window is not None:
            hidden |= key <= query - window
        return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, -torch.inf)


@dataclass(frozen=True)
class Bounds:
    """Where segments begin and end, as kernels for packed sequences take it."""

    queries: Tensor
    """int32[segments + 1]: where each segment's queries begin, and the end."""
    keys: Tensor
    """The same of its keys."""
    most_queries: int
    """Of one segment."""
    most_keys: int
    """Of one segment."""

    @classmethod
    def of(cls, groups: tuple[Group, ...], device: torch.device) -> "Bounds":
        """The bounds of the groups' segments."""
        counts = torch.tensor([group.count for group in groups])
        shapes = torch.tensor([(group.queries, group.keys) for group in groups]).repeat_interleave(counts, 0)
        ends = torch.cat([shapes.new_zeros(1, 2), shapes.cumsum(0)]).to(torch.int32)
        queries, keys = moved(ends.T.contiguous(), device)
        return cls(queries, keys, max(group.queries for group in groups), max(group.keys for group in groups))


Kernel: TypeAlias = Callable[[Tensor, Tensor, Tensor, Bounds, float, int | None], Tensor]
"""[tokens, heads, dims] from queries [tokens, heads, dims], keys, values, bounds, scale and window.

Within each segment a query sees the keys that are not after it, its own queries being the last of its keys.
"""


@dataclass(frozen=True)
class Packed:
    """Causal attention inside each segment of one packed sequence: nothing is padded.

    Segments of one shape are adjacent, so that each shape is one call on a view. `keys` is int64[all keys]:
    which packed token each key of each segment is, where a segment also sees a prefix that it shares;
    None where each segment sees itself alone.
    """

    groups: tuple[Group, ...]
    keys: Tensor | None = None
    bounds: dict[torch.device, Bounds] = field(default_factory=dict)
    """Made in the first layer, and used in all."""
    masks: dict[tuple[Group, int | None], Tensor | None] = field(default_factory=dict)
    """Likewise."""

    def to(self, device: torch.device) -> "Packed":
        """The same, for states on the device."""
        return Packed(self.groups, None if self.keys is None else moved(self.keys, device))

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """One call of a kernel for all segments, where there is one; else a call of SDPA a group."""
        q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
        if self.keys is not None:
            k, v = k.index_select(0, self.keys), v.index_select(0, self.keys)
        kernel = packed_kernel() if _fits(q) else None
        if kernel is None:
            return self._by_shape(q, k, v, scale, window)
        if q.device not in self.bounds:
            self.bounds[q.device] = Bounds.of(self.groups, q.device)
        return kernel(q, k, v, self.bounds[q.device], scale, window)[None]

    def _by_shape(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        asked = q.split([group.count * group.queries for group in self.groups])
        seen = [group.count * group.keys for group in self.groups]
        outputs: list[Tensor] = []
        for group, *parts in zip(self.groups, asked, k.split(seen), v.split(seen), strict=True):
            gq, gk, gv = (part.unflatten(0, (group.count, -1)).transpose(1, 2) for part in parts)
            if (group, window) not in self.masks:
                self.masks[group, window] = group.mask(window, q)
            mask = self.masks[group, window]
            causal = mask is None and group.queries > 1
            output = scaled_dot_product_attention(
                gq, gk, gv, mask, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )
            outputs.append(output.transpose(1, 2).flatten(0, 1)[None])
        return torch.cat(outputs, 1) if len(outputs) > 1 else outputs[0]


def _fits(states: Tensor) -> bool:
    """Whether the kernels for packed sequences take such states, [tokens, heads, dims]."""
    dims = states.shape[-1]
    return states.is_cuda and states.dtype in (torch.bfloat16, torch.float16) and dims % 8 == 0 and dims <= 256


@cache
def packed_kernel() -> Kernel | None:
    """The kernel for packed sequences on this process's GPU: chosen once, and logged. None: there is none."""
    if not torch.cuda.is_available():
        return None
    kernel: Kernel | None = None
    name, why = "SDPA", "GPUs before Ampere have no other"
    if torch.cuda.get_device_capability() >= (8, 0):
        if find_spec("flash_attn") is not None:
            kernel, name, why = _flash_attn, "flash-attn", "it is installed"
        elif torch.version.cuda is not None:
            kernel, name, why = _varlen_attn, "torch.nn.attention.varlen", "flash-attn is not installed"
        else:
            why = "flash-attn is not installed"
    log.info("attention of packed sequences", kernel=name, because=why)
    return kernel


def _flash_attn(q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, scale: float, window: int | None) -> Tensor:
    """As flash-attn has it from version 2.3 on: causal from the bottom right, windows inclusive."""
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
        window_size=_reach(window),
    )
    return cast("Tensor", output)


def _varlen_attn(q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, scale: float, window: int | None) -> Tensor:
    """Flash attention as torch has it: the same kernel, so the same alignment."""
    output = import_module("torch.nn.attention.varlen").varlen_attn(
        q,
        k,
        v,
        bounds.queries,
        bounds.keys,
        bounds.most_queries,
        bounds.most_keys,
        scale=scale,
        window_size=_reach(window),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return cast("Tensor", output)


def _reach(window: int | None) -> tuple[int, int]:
    """How many keys a query sees before and after its own place; -1: all."""
    return (-1 if window is None else window - 1, 0)


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
    """What transformers calls in each layer."""
    if attend is None:
        raise ModelError(f"{type(module).__name__} does not hand keywords of its forward on to its attention")
    if softcap is not None or s_aux is not None:
        used = "capped attention scores" if softcap is not None else "attention sinks"
        raise ModelError(f"{type(module).__name__} uses {used}, which the torch backend does not have")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = module.layer_idx
    assert isinstance(layer, int)  # noqa: S101 - narrows an attribute that transformers does not type
    return attend(layer, query, key, value, scale, sliding_window), None


# Compiled blocks leave it out: they would be compiled anew for the shapes of each micro-batch, until torch gives up.
AttentionInterface.register(NAME, torch.compiler.disable(_attention))
