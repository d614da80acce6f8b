"""One attention function, registered with transformers, that does what the forward pass asks of it.

A model is called with `attend=...`. transformers passes unknown keywords on to the attention of each layer. No T x T
mask is made, because no mask function is registered under the name.

With a kernel for packed sequences (`kernels`), all segments are one call. Without a kernel, and for states that it does
not support, each shape of segments is one call of SDPA.
"""

from dataclasses import dataclass, field, replace
from typing import Final, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from meshrl.errors import ModelError
from meshrl_torch.model.devices import moved
from meshrl_torch.model.kernels import Bounds, Kernel

NAME: Final = "meshrl"


class Attend(Protocol):
    """The attention of one forward pass, called once for each layer."""

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """Return [batch, tokens, heads, dims] from [batch, heads, tokens, dims]. Key heads divide query heads.

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
        """Return what is added to the scores, [queries, keys]: 0 or -inf. None if plain causal masking suffices."""
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
    masks: dict[tuple[Group, int | None], Tensor | None] = field(default_factory=dict)
    """As `bounds`."""

    def to(self, device: torch.device) -> "Packed":
        """Return the same on a device."""
        return Packed(self.groups, None if self.keys is None else moved(self.keys, device), self.kernel)

    def by(self, kernel: Kernel | None) -> "Packed":
        """Return the same with a kernel. It shares what other layers have computed."""
        return self if kernel is self.kernel else replace(self, kernel=kernel)

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """Call the kernel once for all segments, or SDPA once for each group."""
        q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
        if self.keys is not None:
            k, v = k.index_select(0, self.keys), v.index_select(0, self.keys)
        if self.kernel is None or not self.kernel.takes(q):
            return self._by_shape(q, k, v, scale, window)
        if q.device not in self.bounds:
            self.bounds[q.device] = Bounds.of(self.groups, q.device)
        return self.kernel.call(q, k, v, self.bounds[q.device], scale, window)[None]

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
    if softcap is not None or s_aux is not None:
        used = "capped attention scores" if softcap is not None else "attention sinks"
        raise ModelError(f"{type(module).__name__} uses {used}, which the torch backend does not have")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = module.layer_idx
    assert isinstance(layer, int)  # noqa: S101 - narrows an attribute that transformers does not type
    return attend(layer, query, key, value, scale, sliding_window), None


# Compiled blocks skip it: torch would recompile them for the shapes of each micro-batch, and then give up.
AttentionInterface.register(NAME, torch.compiler.disable(_attention))
