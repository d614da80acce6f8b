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


class Reading(NamedTuple):
    """Which adapter reads each token. Tokens of no adapter are read by the base alone."""

    parts: Sequence[tuple[str, Tensor | None]] = ()
    """The adapters by name, each with the numbers of its tokens, int64[tokens]. None: all are its own."""
    tokens: int = 0
    """Number of all tokens, if adapters share them."""


class LoraPair(NamedTuple):
    """The matrices of an adapter in one layer: the output changes by `scale * states @ down.T @ up.T`."""

    down: nn.Parameter
    """[rank, in]."""
    up: nn.Parameter
    """[out, rank]."""
    scale: float
    is_linear: bool
    """True if the layer's weight is [out, in], False if it is [in, out]."""


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
    if len(names) == 1:
        return Reading([(str(name), None) for name in names if name != BASE])
    places = [moved(torch.from_numpy(np.flatnonzero(numbers == number)), device) for number in range(len(names))]
    return Reading([(str(name), own) for name, own in zip(names, places, strict=True) if name != BASE], len(tokens))


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
        for name, tokens in own.parts:
            pair = self.pairs.get(name)
            if pair is None:
                continue
            if tokens is None:
                result = (result + self._change(pair, states)).to(result.dtype)
                continue
            flat = result.flatten(0, -2)
            if len(flat) != own.tokens:
                raise ModelError(
                    f"a layer reads {len(flat)} of the {own.tokens} tokens of a pass, and of which adapters is not "
                    "known: such a model cannot read rows of several adapters together, so set "
                    "policy.share_passes = false, and sample with one adapter at a time"
                )
            read = states.flatten() if isinstance(self.base_layer, nn.Embedding) else states.flatten(0, -2)
            changed = flat.index_select(0, tokens) + self._change(pair, read.index_select(0, tokens))
            result = flat.index_copy(0, tokens, changed.to(flat.dtype)).view(result.shape)
        return result

    def _change(self, pair: LoraPair, states: Tensor) -> Tensor:
        """Return what an adapter adds to the layer's output for these inputs."""
        base = self.base_layer
        if isinstance(base, nn.Embedding):
            after = functional.embedding(states, pair.down.T, base.padding_idx)
            change = (after @ pair.up.T) * pair.scale
            scaled = getattr(base, "embed_scale", None)  # its output is scaled by this
            return change if scaled is None else change * torch.as_tensor(scaled, dtype=change.dtype)
        states = states.to(pair.down.dtype)
        split = self._split
        if split is None:
            return functional.linear(functional.linear(states, pair.down), pair.up) * pair.scale
        total = cast("Any", _Summed.apply)
        if split.columns:
            low = total(functional.linear(states, pair.down), split.ranks, False)
            return functional.linear(low, split.part(pair.up, 0)) * pair.scale
        low = total(functional.linear(states, split.part(pair.down, 1)), split.ranks, True)
        return functional.linear(low, pair.up) * pair.scale


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
