"""Modules that mix the tokens of a row in ways other than attention: recurrent states, convolutions, counted positions.

In a packed pass they read its segments as rows, and all other modules read one sequence. What segments share is read
again for each of them.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Final, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor, nn

from meshrl.errors import ModelError
from meshrl_torch.model.attention import Attend, Group, Packed, moved
from meshrl_torch.model.packing import Ints, runs
from meshrl_torch.model.scores import Scores

_PART, _FEW = 4, 32
"""Rows of a batch are padded by at most this part of the longest, or by a few tokens."""

Path: TypeAlias = tuple[str | int, ...]
"""The place of a tensor in a call: an argument's number or name, or "" for the result, and places in tuples."""
Kinds: TypeAlias = Mapping[type[nn.Module], frozenset[Path]]
"""Classes of modules, and which tensors of their calls have a state for each token, [1, tokens, ...]."""


@dataclass(frozen=True)
class Batches:
    """The segments of a packed sequence as rows, padded at the end, in a few batches of about one length."""

    places: tuple[Tensor, ...]
    """int64[rows, tokens] for each batch: the packed token in each place."""
    back: Tensor
    """int64[packed tokens]: the place of each in the flattened batches."""

    @classmethod
    def of(cls, packed: Attend, device: torch.device) -> "Batches":
        """Divide segments, with all that they see, into batches. ModelError for the attention of a cache."""
        if not isinstance(packed, Packed):
            raise ModelError("packed slots keep keys and values alone, and the model has other states")
        counts = [group.count for group in packed.groups]
        queries = np.repeat([group.queries for group in packed.groups], counts)
        keys = np.repeat([group.keys for group in packed.groups], counts)
        starts, first, filled = np.cumsum(keys) - keys, np.zeros_like(keys), 0
        places: list[Tensor] = []
        for rows in _alike(keys):
            width = int(keys[rows].max())
            seen = starts[rows, None] + np.minimum(np.arange(width), keys[rows, None] - 1)
            places.append(moved(torch.from_numpy(seen), device))
            first[rows] = filled + np.arange(len(rows)) * width
            filled += seen.size
        if packed.keys is not None:
            places = [packed.keys[each] for each in places]
        return cls(tuple(places), moved(torch.from_numpy(runs(first + keys - queries, queries)), device))

    def call(
        self,
        forward: Callable[..., object],
        args: tuple[object, ...],
        options: Mapping[str, object],
        known: Collection[Path],
    ) -> object:
        """Call a module's `forward` for each batch, and join what it returns. `known`: tensors of tokens."""
        parts: list[object] = []
        for places in self.places:
            named = {name: _rows(value, places, known, (name,)) for name, value in options.items()}
            parts.append(forward(*(_rows(value, places, known, (at,)) for at, value in enumerate(args)), **named))
        return self._joined(parts, known, ("",))

    def _joined(self, parts: list[object], known: Collection[Path], path: Path) -> object:
        """Return what a module has returned for all batches, for the packed sequence."""
        if isinstance(parts[0], tuple):
            columns = enumerate(zip(*cast("list[tuple[object]]", parts), strict=True))
            return tuple(self._joined(list(each), known, (*path, at)) for at, each in columns)
        if path not in known:
            return parts[0]
        flat = torch.cat([part.flatten(0, 1) for part in cast("list[Tensor]", parts)])
        return flat.index_select(0, self.back)[None]


def _rows(value: object, places: Tensor, known: Collection[Path], path: Path) -> object:
    """Return what a module is given, for the rows of a batch."""
    if isinstance(value, Packed):
        return cast("Attend", _attend)
    if isinstance(value, tuple):
        parts = enumerate(cast("tuple[object, ...]", value))
        return tuple(_rows(each, places, known, (*path, at)) for at, each in parts)
    if isinstance(value, Tensor) and path in known:
        return value[0].index_select(0, places.flatten()).unflatten(0, places.shape)
    return value


def _of_tokens(value: object, tokens: int, path: Path) -> Iterator[Path]:
    """Yield the paths of tensors that have a state for each token. No size of a model is as their number, a prime."""
    if isinstance(value, tuple):
        for at, each in enumerate(cast("tuple[object, ...]", value)):
            yield from _of_tokens(each, tokens, (*path, at))
    elif isinstance(value, Tensor) and value.shape[:2] == (1, tokens):
        yield path


def _alike(lengths: Ints) -> Iterator[Ints]:
    """Yield the numbers of rows of about one length."""
    order = np.argsort(lengths, kind="stable")
    start = 0
    for index, length in enumerate(lengths[order].tolist()):
        if length - lengths[order[start]] > max(_FEW, length // _PART):
            yield order[start:index]
            start = index
    yield order[start:]


def _attend(_: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
    """Compute attention within each row."""
    count, length = query.shape[0], query.shape[2]
    return scores.attend(query, key, value, Group(count, length, length).mask(scores, query)).transpose(1, 2)


class Mixers:
    """The mixers of a network. In a packed pass, each reads the segments as rows."""

    def __init__(self, network: nn.Module, kinds: Kinds) -> None:
        """`kinds`: the classes of these modules, as `kinds_in` found them."""
        self.kinds: Final = kinds
        self.batches: Batches | None = None
        """The segments of the present packed pass and its backward pass. None: another pass."""
        call = cast("Callable[..., object]", torch.compiler.disable(self._call))
        for module in network.modules():
            if type(module) in kinds:
                module.forward = partial(call, MethodType(type(module).forward, module), kinds[type(module)])

    def _call(
        self, forward: Callable[..., object], known: Collection[Path], *args: object, **options: object
    ) -> object:
        batches, self.batches = self.batches, None  # mixers inside get rows
        try:
            return forward(*args, **options) if batches is None else batches.call(forward, args, options, known)
        finally:
            self.batches = batches


def kinds_in(network: nn.Module, packed: Packed, read: Callable[[], object]) -> Kinds:
    """Return the classes of a layer's parts that compute something else for packed segments than for rows.

    `read` passes segments through the network, packed as `packed`.
    """
    found: dict[type[nn.Module], frozenset[Path]] = {}
    batches = Batches.of(packed, next(network.parameters()).device)

    def compare(module: nn.Module, args: tuple[object, ...], options: dict[str, object]) -> None:
        returned = module.forward(*args, **options)
        together, tokens = _states(returned), len(batches.back)
        if together is None or together.shape[:2] != (1, tokens):
            return
        parts: list[tuple[str | int, object]] = [*enumerate(args), *options.items(), ("", returned)]
        known = frozenset(path for name, each in parts for path in _of_tokens(each, tokens, (name,)))
        apart = _states(batches.call(module.forward, args, options, known))
        if apart is None or not torch.allclose(together, apart, rtol=1e-4, atol=1e-5):
            found[type(module)] = found.get(type(module), frozenset()) | known

    layers = [each for parts in network.modules() if isinstance(parts, nn.ModuleList) for each in parts]
    parts = [part for layer in layers for part in layer.children()]
    hooks = [part.register_forward_pre_hook(compare, with_kwargs=True) for part in parts]
    try:
        read()
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _states(returned: object) -> Tensor | None:
    first = cast("tuple[object, ...]", returned)[0] if isinstance(returned, tuple) else returned
    return first if isinstance(first, Tensor) else None
