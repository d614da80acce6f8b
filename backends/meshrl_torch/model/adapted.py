"""A frozen base with named adapters: each layer adds the low-rank product of a token's own adapter.

The adapters' matrices are no parameters of the network, so they are the same on each rank, however it is spread.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from meshrl.data import BASE, DEFAULT_ADAPTER
from meshrl.errors import ModelError
from meshrl.roles import LoraConfig
from meshrl_torch.model.attention import moved

Names: TypeAlias = NDArray[np.str_]

TP: Final = "tp"
"""The axis along which matrices are split."""


class Blocks(NamedTuple):
    """The tokens of several adapters in blocks of one size, each of one adapter, which one product multiplies."""

    number: int
    size: int
    order: Tensor | None
    """The numbers of the tokens, those of the first adapter first, int64[tokens]. None: all in their order."""
    cells: Tensor | None
    """Their places in the blocks, int64[tokens]. None: they fill them."""
    owners: Tensor | None
    """The adapter of each block, int64[blocks]. None: each has one."""

    @classmethod
    def of(cls, places: Sequence[NDArray[np.int64]], tokens: int, device: torch.device) -> "Blocks":
        """Divide tokens into blocks. `places`: the numbers of each adapter's tokens, of all `tokens`.

        The size is the mean number of an adapter's tokens, so that half of the cells are filled or more.
        """
        counts, order = np.array([len(own) for own in places]), np.concatenate(places)
        size = -(-len(order) // len(counts))
        blocks = -(-counts // size)
        number, starts = int(blocks.sum()), size * (np.cumsum(blocks) - blocks)
        cells = np.concatenate([start + np.arange(count) for start, count in zip(starts, counts, strict=True)])
        owners = np.arange(len(counts)).repeat(blocks)
        return cls(
            number,
            size,
            None if np.array_equal(order, np.arange(tokens)) else moved(torch.from_numpy(order), device),
            None if len(cells) == number * size else moved(torch.from_numpy(cells), device),
            None if number == len(counts) else moved(torch.from_numpy(owners), device),
        )

    def gather(self, states: Tensor) -> Tensor:
        """Return [blocks, size, in] of [tokens, in]. Cells without a token are zeros."""
        own = states if self.order is None else states.index_select(0, self.order)
        if self.cells is not None:
            own = own.new_zeros(self.number * self.size, own.shape[1]).index_copy(0, self.cells, own)
        return own.view(self.number, self.size, -1)

    def add(self, result: Tensor, change: Tensor) -> Tensor:
        """Add [blocks, size, out] to the rows of [tokens, out]."""
        change = change.flatten(0, 1)
        if self.cells is not None:
            change = change.index_select(0, self.cells)
        if self.order is None:
            return (result + change).to(result.dtype)
        changed = (result.index_select(0, self.order) + change).to(result.dtype)
        return result.index_copy(0, self.order, changed)


class Reading(NamedTuple):
    """Which adapter reads each token. Tokens of no adapter are read by the base alone."""

    parts: Sequence[tuple[str, Tensor | None]] = ()
    """The adapters by name, each with the numbers of its tokens, int64[tokens]. None: all are its own."""
    tokens: int = 0
    """Number of all tokens, if adapters share them."""
    blocks: Blocks | None = None
    """The same numbers in blocks, if adapters share the tokens."""


class LoraPair(NamedTuple):
    """The matrices of an adapter in one layer: the output changes by `scale * states @ down.T @ up.T`."""

    down: nn.Parameter
    """[rank, in]."""
    up: nn.Parameter
    """[out, rank]."""
    scale: float
    is_linear: bool
    """True if the layer's weight is [out, in], False if it is [in, out]."""

    def scaled(self, scale: float) -> Tensor:
        """Return `up` for another scale."""
        return self.up if scale == self.scale else self.up * (self.scale / scale)


BASE_LAYER: Final = ".base_layer."
"""Part of the names of an adapted layer's own tensors."""


def own_name(name: str) -> str:
    """Return the name in the original model of a tensor of an adapted one."""
    return name.replace(BASE_LAYER, ".")


@dataclass(frozen=True)
class Adapter:
    """One adapter of a network."""

    config: LoraConfig
    pairs: Mapping[str, LoraPair]
    """By the names of the layers in the original model."""
    parameters: Mapping[str, nn.Parameter]
    """The same matrices, by the names that peft gives them in an adapter called "default", in a fixed order."""
    partial: frozenset[str]
    """The names of those that are divided among ranks: this rank's gradient covers only its part."""
    in_head: bool
    """True if it changes the head."""


class Uses(NamedTuple):
    """Which adapter reads each token of a pass, in the body and in the head."""

    body: Reading
    head: Reading

    @classmethod
    def of(cls, tokens: Names, device: torch.device, read: NDArray[np.int64] | None = None) -> "Uses":
        """Divide tokens by the name of each one's adapter. `read`: those that the head reads, by number. None: all."""
        own = reading(tokens, device)
        return cls(own, own if read is None or not own.tokens else reading(tokens[read], device))


def reading(tokens: Names, device: torch.device) -> Reading:
    """Divide tokens by the name of each one's adapter."""
    names, numbers = np.unique(tokens, return_inverse=True)
    if len(names) < 2:
        return Reading([(str(name), None) for name in names if name != BASE])
    found = [(np.flatnonzero(numbers == number), str(name)) for number, name in enumerate(names) if name != BASE]
    own = {name: places for places, name in sorted(found, key=lambda each: int(each[0][0]))}
    parts = [(name, moved(torch.from_numpy(places), device)) for name, places in own.items()]
    return Reading(parts, len(tokens), Blocks.of([*own.values()], len(tokens), device))


@dataclass
class Adapters:
    """The adapters of a network."""

    named: dict[str, Adapter] = field(default_factory=dict)
    mixes: bool = False
    """True if training passes may read rows of several adapters."""
    uses: Uses = field(default_factory=lambda: Uses(Reading(), Reading()))
    """Of the present pass and its backward pass, which may compute layers again."""

    def begin(self, uses: Uses | None) -> None:
        """Begin a pass. None: all its tokens are of the default adapter, or of the base if there is none."""
        if uses is None:
            every = Reading([(DEFAULT_ADAPTER, None)] if DEFAULT_ADAPTER in self.named else [])
            uses = Uses(every, every)
        self.uses = uses

    def drop(self, network: nn.Module, name: str) -> None:
        """Drop an adapter from the layers of its network."""
        del self.named[name]
        for module in network.modules():
            if isinstance(module, Adapted):
                module.pairs.pop(name, None)

    @property
    def in_head(self) -> bool:
        """True if an adapter changes the head."""
        return any(each.in_head for each in self.named.values())


class _Split(NamedTuple):
    """How tensor parallelism divides a layer's matrix."""

    columns: bool
    """True if each rank has other outputs, False if it reads other inputs."""
    ranks: dist.ProcessGroup
    number: int

    def part(self, matrix: Tensor, dim: int) -> Tensor:
        """Return this rank's part of a matrix along a dim."""
        return matrix.tensor_split(self.ranks.size(), dim)[self.number]


class Adapted(nn.Module):
    """A layer of the base, which adds what the adapters of its tokens change."""

    def __init__(self, base: nn.Module, adapters: Adapters, *, is_head: bool) -> None:
        """`is_head`: it reads the tokens that the head reads."""
        super().__init__()
        self.base_layer = base
        self._adapters, self.is_head = adapters, is_head
        self.pairs: dict[str, LoraPair] = {}
        """By adapter. No parameters of the network."""
        self._split = _split_of(cast("Tensor", base.weight))

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the base layer, which other code may read, such as `weight`."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base_layer"), name)

    @property
    def partial(self) -> str:
        """The matrix of a pair that is divided among ranks, `A` or `B`. Empty if none is."""
        return "" if self._split is None else "B" if self._split.columns else "A"

    def forward(self, states: Tensor) -> Tensor:
        """Return [..., out] from [..., in], or from ids, int64[...], for embeddings."""
        result = cast("Tensor", self.base_layer(states))
        uses = self._adapters.uses
        own = uses.head if self.is_head else uses.body
        if not any(name in self.pairs for name, _ in own.parts):
            return result
        if own.blocks is None:
            (name, _), *_ = own.parts
            return (result + self._change(self.pairs[name], states)).to(result.dtype)
        flat = result.flatten(0, -2)
        if len(flat) != own.tokens:
            raise ModelError(
                f"a layer reads {len(flat)} of the {own.tokens} tokens of a pass, and of which adapters is not "
                "known: such a model cannot read rows of several adapters together, so set "
                "policy.share_passes = false, and sample with one adapter at a time"
            )
        is_embedding = isinstance(self.base_layer, nn.Embedding)
        read = states.flatten() if is_embedding else states.flatten(0, -2)
        if is_embedding or not self._is_even(own):
            return self._one_by_one(own, flat, read).view(result.shape)
        change = self._product(*self._stacked(own, own.blocks), own.blocks.gather(read))
        return own.blocks.add(flat, change).view(result.shape)

    def _is_even(self, own: Reading) -> bool:
        """True if matrices of the highest rank for all adapters are at most twice as large as theirs."""
        ranks = [len(self.pairs[name].down) if name in self.pairs else 0 for name, _ in own.parts]
        return max(ranks) * len(ranks) <= 2 * sum(ranks)

    def _change(self, pair: LoraPair, states: Tensor) -> Tensor:
        """Return what an adapter adds to the layer's output for these inputs."""
        base = self.base_layer
        if not isinstance(base, nn.Embedding):
            return self._product(pair.down, pair.up, pair.scale, states)
        after = functional.embedding(states, pair.down.T, base.padding_idx)
        change = (after @ pair.up.T) * pair.scale
        scaled = getattr(base, "embed_scale", None)  # its output is scaled by this
        return change if scaled is None else change * torch.as_tensor(scaled, dtype=change.dtype)

    def _one_by_one(self, own: Reading, result: Tensor, read: Tensor) -> Tensor:
        """Add to the rows of [tokens, out] what each one's adapter makes of what the layer reads."""
        for name, tokens in own.parts:
            if name in self.pairs and tokens is not None:
                change = self._change(self.pairs[name], read.index_select(0, tokens))
                changed = (result.index_select(0, tokens) + change).to(result.dtype)
                result = result.index_copy(0, tokens, changed)
        return result

    def _stacked(self, own: Reading, blocks: Blocks) -> tuple[Tensor, Tensor, float]:
        """Return the matrices of each block's adapter, [blocks, rank, in] and [blocks, out, rank], and their scale.

        Lower ranks have zeros, and so have adapters that leave this layer as it is.
        """
        given = [self.pairs.get(name) for name, _ in own.parts]
        known = next(pair for pair in given if pair is not None)
        rank = max(len(pair.down) for pair in given if pair is not None)
        none = known.down.new_zeros(rank, known.down.shape[1]), known.up.new_zeros(len(known.up), rank)
        downs = [none[0] if each is None else _padded(each.down, rank, 0) for each in given]
        ups = [none[1] if each is None else _padded(each.scaled(known.scale), rank, 1) for each in given]
        down, up = torch.stack(downs), torch.stack(ups)
        if blocks.owners is not None:
            down, up = down.index_select(0, blocks.owners), up.index_select(0, blocks.owners)
        return down, up, known.scale

    def _product(self, down: Tensor, up: Tensor, scale: float, states: Tensor) -> Tensor:
        """Return `scale * states @ down.T @ up.T`. Matrices of blocks multiply the states of their blocks."""
        states, split = states.to(down.dtype), self._split
        if split is None:
            return _times(_times(states, down), up) * scale
        total = cast("Any", _Summed.apply)
        if split.columns:
            low = total(_times(states, down), split.ranks, False)
            return _times(low, split.part(up, -2)) * scale
        low = total(_times(states, split.part(down, -1)), split.ranks, True)
        return _times(low, up) * scale


def _times(states: Tensor, matrix: Tensor) -> Tensor:
    """Return [..., out] of [..., in] and [out, in], or for each block of [blocks, ..., in] and [blocks, out, in]."""
    return functional.linear(states, matrix) if matrix.dim() == 2 else torch.bmm(states, matrix.mT)


def _padded(matrix: Tensor, rank: int, dim: int) -> Tensor:
    """Return a matrix with zeros along a dim up to a rank."""
    lacking = rank - matrix.shape[dim]
    return matrix if not lacking else functional.pad(matrix, (0, lacking) if dim else (0, 0, 0, lacking))


class _Summed(torch.autograd.Function):
    """Sums over ranks in the forward pass, or else the gradient in the backward pass."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, ranks: dist.ProcessGroup, forward: bool) -> Tensor:
        ctx.ranks, ctx.forward_sums = ranks, forward
        return _sum(states, ranks) if forward else states.view_as(states)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0] if ctx.forward_sums else _sum(gradients[0], ctx.ranks), None, None


def _sum(states: Tensor, ranks: dist.ProcessGroup) -> Tensor:
    total = states.contiguous().clone()
    dist.all_reduce(total, group=ranks)
    return total


def _split_of(weight: Tensor) -> _Split | None:
    """Say how a linear layer's weight, [out, in], is split along `tp`. None: it is whole on each rank."""
    if not isinstance(weight, DTensor):
        return None
    mesh = weight.device_mesh
    for name, kind in zip(mesh.mesh_dim_names or (), weight.placements, strict=True):
        if name == TP and kind.is_shard() and mesh[TP].size() > 1:
            return _Split(cast("Any", kind).dim == 0, mesh[TP].get_group(), mesh[TP].get_local_rank())
    return None
