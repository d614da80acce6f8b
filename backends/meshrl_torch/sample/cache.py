"""Keys and values of the sequences being decoded: one slot for each, allocated once and used again."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshrl.data import Images
from meshrl_torch.model.adapted import Names, Uses
from meshrl_torch.model.attention import Attend, Packed
from meshrl_torch.model.network import LanguageModel
from meshrl_torch.model.packing import groups_of, runs
from meshrl_torch.model.routing import Routes
from meshrl_torch.model.scores import Scores

Ints = NDArray[np.int64]


class States(NamedTuple):
    """The states of the tokens that a pass has read."""

    hidden: Tensor
    """[rows, hidden]: of the last token of each row or prefix."""
    experts: NDArray[np.int16] | None
    """The experts of each token that was read, in order, if they are recorded."""


class Slots(Protocol):
    """What the model remembers of the sequences being decoded, by slot."""

    slots: int
    """Number of slots in the current call."""

    def begin(self, slots: int) -> None:
        """Begin a new call with this many slots. The content is dropped."""
        ...

    def reserve(self, positions: int) -> None:
        """Make room for at least this many positions in each slot."""
        ...

    def move(self, source: Tensor, target: Tensor, positions: int) -> None:
        """Copy the first positions of the source slots to the target slots, int64 each."""
        ...

    def fill(
        self,
        model: LanguageModel,
        prefixes: Sequence[Ints],
        which: Ints,
        slots: Ints,
        records: bool,
        adapters: Names | None = None,
        images: Images | None = None,
    ) -> States:
        """Read prefixes, sorted by length, and remember prefix `which[i]` in slot `slots[i]`.

        `records`: experts are recorded. `adapters`: that of each prefix, by name. None: the default one. `images`:
        those of each prefix.
        """
        ...

    def grow(
        self, model: LanguageModel, ids: Ints, places: Ints, records: bool, adapters: Names | None = None
    ) -> States:
        """Read the token `ids[i]` at position `places[i]` of slot i, with its adapter. Later slots are free."""
        ...


def read(
    model: LanguageModel,
    ids: Tensor,
    positions: Tensor,
    attend: Attend,
    had: Ints,
    records: bool,
    adapters: Names | None,
) -> tuple[Tensor, NDArray[np.int16] | None]:
    """Return the last hidden states, and the tokens' experts if they are recorded.

    `had`, int64[batch * tokens]: the tokens of each one's row. A call's rows never grow past the native length.
    `adapters`: that of each token, by name.
    """
    routes = Routes() if records else None
    beyond = had >= model.native_tokens
    rows = torch.from_numpy(beyond).view(ids.shape) if beyond.any() else None
    own = model.reading(adapters)
    hidden = model.hidden(ids, positions, attend, routes, rows, own and Uses(own, own))
    return hidden, None if routes is None else routes.recorded()


@dataclass
class Cache:
    """The slots of a model with packed rows: two tensors for each layer, [slots, key heads, positions, dims].

    They grow if more is reserved.

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

    def fill(
        self,
        model: LanguageModel,
        prefixes: Sequence[Ints],
        which: Ints,
        slots: Ints,
        records: bool,
        adapters: Names | None = None,
        images: Images | None = None,
    ) -> States:
        """Read prefixes in one pass. They have no images, because models that see do not pack."""
        lengths = np.array([len(prefix) for prefix in prefixes], np.int64)
        ends = np.cumsum(lengths)
        mine = lengths[which]
        entries, places = runs((ends - lengths)[which], mine), runs(np.zeros_like(mine), mine)
        packed, where = Packed(groups_of(lengths, lengths)), (entries, np.repeat(slots, mine), places)
        attend = Prefill(packed, self, *map(torch.from_numpy, where))
        ids, positions = np.concatenate(prefixes), runs(np.zeros_like(lengths), lengths)
        row = torch.from_numpy(ids)[None], torch.from_numpy(positions)[None]
        names = None if adapters is None else np.repeat(adapters, lengths)
        hidden, experts = read(model, *row, attend, np.repeat(lengths, lengths), records, names)
        return States(hidden[0][torch.from_numpy(ends - 1)], experts)

    def grow(
        self, model: LanguageModel, ids: Ints, places: Ints, records: bool, adapters: Names | None = None
    ) -> States:
        """Read a token for each slot in one pass."""
        longest = int(places.max()) + 1
        positions = torch.from_numpy(places.copy())
        attend = Decode(self, positions, longest, even=int(places.min()) + 1 == longest)
        row = torch.from_numpy(ids)[:, None], positions[:, None]
        hidden, experts = read(model, *row, attend, places, records, adapters)
        return States(hidden[:, 0], experts)

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

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """Compute packed attention."""
        for states, cached in zip((key, value), self.cache.layer(layer, key, value), strict=True):
            cached[self.slots, :, self.positions] = states[0].transpose(0, 1)[self.tokens]
        return self.packed(layer, query, key, value, scores)


@dataclass(frozen=True)
class Decode:
    """The attention of one new token for each slot: slots 0 to B, each at its own position, int64[B]."""

    cache: Cache
    positions: Tensor
    longest: int
    """The highest position plus one."""
    even: bool
    """True if all positions are equal."""
    masks: dict[tuple[int | None, int | None], Tensor] = field(default_factory=dict)
    """By window and chunk. Computed in the first layer, and used in all."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """Write the token's key and value to its slot, and attend to everything there."""
        keys, values = self.cache.layer(layer, key, value)
        count = len(self.positions)
        where: tuple[slice | int | Tensor, ...] = (slice(count), slice(None), self.longest - 1)
        if not self.even:
            where = (torch.arange(count), slice(None), self.positions)
        keys[where], values[where] = key[:, :, 0], value[:, :, 0]
        seen = keys[:count, :, : self.longest], values[:count, :, : self.longest]
        return scores.attend(query, *seen, self._mask(scores, query.dtype)).transpose(1, 2)

    def _mask(self, scores: Scores, dtype: torch.dtype) -> Tensor | None:
        """Return what is added to the scores, [B, 1, 1, longest]: 0 at visible positions, -inf elsewhere."""
        name = scores.window, scores.chunk
        if self.even and min(scores.window or self.longest, scores.chunk or self.longest) >= self.longest:
            return None
        if name not in self.masks:
            query = self.positions[:, None, None, None]
            self.masks[name] = scores.hide(query, torch.arange(self.longest), dtype)
        return self.masks[name]
