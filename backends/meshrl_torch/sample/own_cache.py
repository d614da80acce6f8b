"""Slots of a model whose own cache remembers its rows: keys and values, windows, convolutions, recurrent states."""

from collections.abc import Callable, MutableMapping, MutableSequence, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshrl.data import Images
from meshrl.errors import ModelError
from meshrl_torch.model.adapted import Names, Uses
from meshrl_torch.model.network import LanguageModel
from meshrl_torch.model.routing import Routes
from meshrl_torch.model.vision import Taken
from meshrl_torch.sample.cache import Ints, States

CACHES: Final = ("past_key_values", "cache_params", "state", None)
"""The names of a cache in the bodies of transformers. None: without."""
_DELTAS: Final = "rope_deltas"
"""The name in a body of what is kept from one pass to the next besides the cache."""


@dataclass
class Peers:
    """Rows of one length, which the model reads together without padding, so that any kind of state fits."""

    slots: Ints
    ids: Tensor
    """int64[rows, tokens]: what they have read."""
    adapters: Names | None = None
    """The adapter of each, by name. None: the default one."""
    cache: object | None = None
    """The model's own, made by its first pass. None if it has none that can be used."""
    deltas: Tensor | None = None
    """How far positions are behind those of text alone, as some models that see keep it: int64[rows, 1]."""

    def keep(self, rows: NDArray[np.bool_] | Ints) -> None:
        """Keep some rows, bool[rows], or take them by number."""
        numbers = torch.from_numpy(np.arange(len(self.slots))[rows])
        count, self.ids, self.slots = len(self.ids), self.ids[numbers], self.slots[rows]
        self.adapters = None if self.adapters is None else self.adapters[rows]
        self.cache = _selected(self.cache, count, numbers, {})
        self.deltas = None if self.deltas is None else self.deltas[numbers]


class OwnCache:
    """The caches of transformers, one for the rows of each length. A pass reads the rows of one."""

    def __init__(self, keyword: str | None) -> None:
        """`keyword`: the name of the cache in the body's calls. None: all tokens of a row are read for each new one."""
        self.slots = 0
        self._keyword = keyword
        self._peers: list[Peers] = []

    def begin(self, slots: int) -> None:
        """Begin a new call. Nothing is kept."""
        self.slots, self._peers = slots, []

    def reserve(self, positions: int) -> None:
        """Caches grow by themselves."""

    def move(self, source: Tensor, target: Tensor, positions: int) -> None:
        """Rename the source slots. The rows in the target slots are dropped."""
        names = dict(zip(source.tolist(), target.tolist(), strict=True))
        self._drop(lambda slots: np.isin(slots, target.numpy()))
        for peers in self._peers:
            peers.slots = np.array([names.get(slot, slot) for slot in peers.slots.tolist()], np.int64)

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
        """Read the prefixes of each length in one pass."""
        hidden: list[Tensor] = []
        experts: list[NDArray[np.int16]] = []
        self._drop(lambda had: np.isin(had, slots))
        first = 0
        for _, group in groupby(prefixes, len):
            ids = torch.from_numpy(np.stack(list(group)))
            own = None if adapters is None else adapters[first : first + len(ids)]
            peers = Peers(np.arange(first, first + len(ids)), ids[:, :0], own)
            taken = self._taken(model, ids, images.take(slice(first, first + len(ids)))) if images else None
            states = self._read(model, peers, ids, records, taken)
            hidden.append(states.hidden)
            experts += [] if states.experts is None else [states.experts]
            rows = np.flatnonzero((which >= first) & (which < first + len(ids)))
            peers.keep(which[rows] - first)
            peers.slots = slots[rows]
            self._peers.append(peers)
            first += len(ids)
        return States(torch.cat(hidden), np.concatenate(experts) if experts else None)

    def grow(
        self, model: LanguageModel, ids: Ints, places: Ints, records: bool, adapters: Names | None = None
    ) -> States:
        """Read a token for the rows of each length in one pass. Their adapters are those of their prefixes."""
        hidden: list[Tensor] = []
        experts: list[NDArray[np.int16]] = []
        self._drop(lambda slots: slots >= len(places))
        for peers in self._peers:
            states = self._read(model, peers, torch.from_numpy(ids[peers.slots])[:, None], records)
            hidden.append(states.hidden)
            experts += [] if states.experts is None else [states.experts]
        order = np.argsort(np.concatenate([peers.slots for peers in self._peers]))
        return States(torch.cat(hidden)[torch.from_numpy(order)], np.concatenate(experts)[order] if experts else None)

    def _drop(self, are_free: Callable[[Ints], NDArray[np.bool_]]) -> None:
        for peers in self._peers:
            if (free := are_free(peers.slots)).any():
                peers.keep(~free)
        self._peers = [peers for peers in self._peers if len(peers.slots)]

    def _taken(self, model: LanguageModel, ids: Tensor, images: Images) -> Taken | None:
        """Return what the body takes for the images of prefixes. None if they have none."""
        if model.vision is None or not any(images):
            return None
        if self._keyword is None:
            name = type(model.network).__name__
            raise ModelError(f"{name} has no cache that this sampler can use, so it cannot draw rows with images")
        names = [(name, f"prompt {row}") for row, own in enumerate(images) for name in own]
        return model.vision.taken(model.body, ids.numpy(), np.full(len(ids), ids.shape[1]), images, names)

    def _read(
        self,
        model: LanguageModel,
        peers: Peers,
        ids: Tensor,
        records: bool,
        taken: Taken | None = None,
    ) -> States:
        """Read the next tokens, int64[rows, tokens], of rows of one length. Experts are those of these tokens.

        `taken`: what the body takes for their images.
        """
        count = ids.shape[1]
        peers.ids = torch.cat([peers.ids, ids], 1)
        read = peers.ids if self._keyword is None else ids
        routes = Routes() if records else None
        is_beyond = peers.ids.shape[1] >= model.native_tokens
        names = None if peers.adapters is None else np.repeat(peers.adapters, read.shape[1])
        own = model.reading(names)
        model.begin(routes, torch.ones_like(read, dtype=torch.bool) if is_beyond else None, own and Uses(own, own))
        if self._keyword is None:
            output = model.body(input_ids=read, use_cache=False)
        else:
            had = {} if peers.cache is None else {self._keyword: peers.cache}
            keeps = hasattr(model.body, _DELTAS)
            if keeps:
                setattr(model.body, _DELTAS, peers.deltas)
            given = {"input_ids": read, "use_cache": True, **had}
            output = taken.read(model.body, **given) if taken else model.body(**given)
            peers.cache = getattr(output, self._keyword)
            peers.deltas = cast("Tensor | None", getattr(model.body, _DELTAS)) if keeps else None
        experts = None
        if routes is not None:
            seen = routes.recorded()
            experts = seen.reshape(*read.shape, *seen.shape[1:])[:, -count:].reshape(-1, *seen.shape[1:])
        return States(output.last_hidden_state[:, -1], experts)


def _selected(state: object, count: int, rows: Tensor, known: dict[int, tuple[Tensor, Tensor]]) -> object:
    """Select rows of everything that a cache holds for `count` rows. Containers and objects change in place.

    `known`: tensors by identity, each with its rows, so that two names of one tensor stay two names of one.
    """
    if isinstance(state, Tensor):
        if state.dim() and len(state) == count:
            if id(state) not in known:
                known[id(state)] = state, state.index_select(0, rows)
            return known[id(state)][1]
        return state
    if isinstance(state, tuple):
        return tuple(_selected(each, count, rows, known) for each in cast("tuple[object, ...]", state))
    if isinstance(state, MutableSequence):
        parts = cast("MutableSequence[object]", state)
        parts[:] = [_selected(each, count, rows, known) for each in parts]
    elif isinstance(state, MutableMapping) or type(state).__module__.startswith("transformers."):
        named = cast("MutableMapping[object, object]", state if isinstance(state, MutableMapping) else vars(state))
        named.update({key: _selected(each, count, rows, known) for key, each in named.items()})
    return state
