"""Keys and values of the sequences being decoded: one slot for each, allocated once and used again."""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from meshrl_torch.model.attention import Packed, mask_of


@dataclass
class Cache:
    """Two tensors for each layer, [slots, key heads, positions, dims], which grow if more is reserved.

    Memory is slow on first use, so a cache is kept from one call to the next.
    """

    slots: int = 0
    """Number of slots in the current call."""
    positions: int = 0
    """Number of positions that it has reserved so far."""
    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def begin(self, slots: int) -> None:
        """Begin a new call with this many slots. The content is dropped, and the memory stays."""
        self.slots, self.positions = slots, 0

    def reserve(self, positions: int) -> None:
        """Give each layer at least this many positions when it is next used."""
        self.positions = max(self.positions, positions)

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return a layer's tensors, with the heads, dims and dtype of `key` and `value` [_, heads, _, dims]."""
        cached = self.layers.get(index)
        if cached is None or cached[0].shape[0] < self.slots or cached[0].shape[2] < self.positions:
            cached = self._grown(key, cached and cached[0]), self._grown(value, cached and cached[1])
            self.layers[index] = cached
        return cached

    def move(self, source: Tensor, target: Tensor, positions: int) -> None:
        """Copy the first positions of the source slots to the target slots, int64 each."""
        for key, value in self.layers.values():
            for states in (key, value):
                states[target, :, :positions] = states[source, :, :positions]

    def _grown(self, like: Tensor, old: Tensor | None) -> Tensor:
        shape = (self.slots, like.shape[1], self.positions, like.shape[3])
        grown = like.new_zeros(shape)
        if old is not None:
            slots, positions = min(self.slots, old.shape[0]), min(self.positions, old.shape[2])
            grown[:slots, :, :positions] = old[:slots, :, :positions]
        return grown


@dataclass(frozen=True)
class Prefill:
    """The attention of packed prompts, whose keys and values are also written to slots.

    Entry i of `tokens`, `slots` and `positions`, int64[entries], writes that packed token to that slot at that
    position. A prompt of several slots is computed once.
    """

    packed: Packed
    cache: Cache
    tokens: Tensor
    slots: Tensor
    positions: Tensor

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """Compute packed attention."""
        for states, cached in zip((key, value), self.cache.layer(layer, key, value), strict=True):
            cached[self.slots, :, self.positions] = states[0].transpose(0, 1)[self.tokens]
        return self.packed(layer, query, key, value, scale, window)


@dataclass(frozen=True)
class Decode:
    """The attention of one new token for each slot: slots 0 to B, each at its own position, int64[B]."""

    cache: Cache
    positions: Tensor
    longest: int
    """The highest position plus one."""
    even: bool
    """True if all positions are equal."""
    masks: dict[int | None, Tensor] = field(default_factory=dict)
    """By window. Computed in the first layer, and used in all."""

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """Write the token's key and value to its slot, and attend to everything there."""
        keys, values = self.cache.layer(layer, key, value)
        count = len(self.positions)
        where: tuple[slice | int | Tensor, ...] = (slice(count), slice(None), self.longest - 1)
        if not self.even:
            where = (torch.arange(count), slice(None), self.positions)
        keys[where], values[where] = key[:, :, 0], value[:, :, 0]
        output = scaled_dot_product_attention(
            query,
            keys[:count, :, : self.longest],
            values[:count, :, : self.longest],
            self._mask(window, query.dtype),
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return output.transpose(1, 2)

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """Return what is added to the scores, [B, 1, 1, longest]: 0 at visible positions, -inf elsewhere."""
        clipped = window is not None and window < self.longest
        if self.even and not clipped:
            return None
        if window not in self.masks:
            query = self.positions[:, None, None, None]
            self.masks[window] = mask_of(query, torch.arange(self.longest), window, dtype)
        return self.masks[window]
