"""A model spread over the ranks: split along `tp`, sharded along `dp`, with a forward pass under FSDP2's hooks."""

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Final, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from meshrl.errors import ModelError
from meshrl_torch.checkpoint.boxes import Box
from meshrl_torch.model.adapted import own_name
from meshrl_torch.model.network import LanguageModel
from meshrl_torch.model.scoring import Passes, Predict, one_by_one
from meshrl_torch.model.vision import vision_modules
from meshrl_torch.options import FsdpConfig
from meshrl_torch.train.fsdp.world import TP, World

_STYLES: Final[Mapping[str, Callable[[], ParallelStyle]]] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
_SHARED: Final = "replicated_with_grad_allreduce"
"""transformers' name for a module that each rank holds whole and uses for its own heads."""

logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
"""Silences advice against gathering shards of shards in two hops, which is how they were made."""


class _Chunked(Protocol):
    """The interface of spread tensors for torch.distributed.checkpoint."""

    def __create_chunk_list__(self) -> Sequence[ChunkStorageMetadata]:
        """Return the place of this rank's part in the whole."""
        ...


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part, as a view, or a whole tensor as it is."""
    return cast("DTensor", tensor.detach()).to_local() if isinstance(tensor, DTensor) else tensor.detach()


def rectangle(name: str, tensor: Tensor, part: Tensor) -> Iterator[Box]:
    """Yield this rank's part of a tensor, or another of its shape, with its place. Nothing if it is empty."""
    if not part.numel():
        return
    if not isinstance(tensor, DTensor):
        yield Box(name, tuple(tensor.shape), (0,) * tensor.dim(), part)
    else:
        (chunk,) = cast("_Chunked", tensor).__create_chunk_list__()
        yield Box(name, tuple(tensor.shape), tuple(chunk.offsets), part)


def is_split(tensor: Tensor) -> bool:
    """True if each rank along `tp` has another part of a DTensor. A bias may be whole on all."""
    spread = cast("DTensor", tensor)
    names = spread.device_mesh.mesh_dim_names or ()
    return any(name == TP and kind.is_shard() for name, kind in zip(names, spread.placements, strict=True))


def is_first(tensor: Tensor) -> bool:
    """True if no rank before this one has the same part."""
    if not isinstance(tensor, DTensor):
        return dist.get_rank() == 0
    mesh, kinds = tensor.device_mesh, tensor.placements
    return all(kind.is_shard() or mesh.get_local_rank(dim) == 0 for dim, kind in enumerate(kinds))


class Root(nn.Module):
    """Holds everything sharded. Computations inside its forward pass see whole parameters."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)

    def forward(self, compute: Callable[[], Tensor]) -> Tensor:
        """Return the result of `compute`."""
        return compute().clone()  # FSDP marks the result, which must not be a view


@dataclass(frozen=True)
class Sharded:
    """A model whose parameters are spread over the ranks."""

    root: Root
    model: LanguageModel
    world: World
    shared: Sequence[str]
    """Names of modules that each rank along `tp` holds whole, and uses only for its heads."""
    sums_late: bool
    """True if gradients are summed over the ranks only after the last pass of a step."""

    def __call__(self, compute: Callable[[], Tensor]) -> Tensor:
        """Compute with the model. All ranks call it together."""
        done = False
        try:
            result = cast("Tensor", self.root(compute))
            done = torch.is_grad_enabled()  # then the backward pass frees whole parameters
        finally:
            if not done:
                self.reshard()
        return result

    def predicting(self, predict: Predict) -> Predict:
        """Wrap a prediction so that it computes with the model."""
        return lambda batch, micro: self(partial(predict, batch, micro))

    def begin(self, last: bool) -> None:
        """Start a training pass. FSDP waits for sums only at the end of the last one."""
        root = cast("FSDPModule", self.root)
        root.set_is_last_backward(last)
        root.set_requires_gradient_sync(last or not self.sums_late)

    def passes(self, predict: Predict, budget: int) -> Passes:
        """Return the passes of `predict`, without gradients."""
        split = self.model.split
        return Passes(self.model, one_by_one(self.predicting(predict)), budget, self.world, split)

    def reshard(self) -> None:
        """Free all whole parameters, which would miss changes of the shards."""
        for module in self.root.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @property
    def partial(self) -> list[nn.Parameter]:
        """Parameters of the shared modules, whose gradients cover only this rank's heads."""
        ends = tuple(f".{name}.{kind}" for name in self.shared for kind in ("weight", "bias"))
        return [each for name, each in self.parameters.items() if ends and name.endswith(ends)]

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Parameters by their names in the unsharded model, tied ones once. Each is a DTensor. Without adapters."""
        named = self.model.network.named_parameters()
        return {own_name(name): each for name, each in named} if self.model.adapters else dict(named)

    @property
    def saved(self) -> Mapping[str, Tensor]:
        """The parameters, and the saved buffers, which each rank holds whole."""
        network = self.model.network
        buffers = {name: network.get_buffer(name) for name in self._saved_buffers}
        return {**self.parameters, **buffers}

    @cached_property
    def _saved_buffers(self) -> Sequence[str]:
        network = self.model.network
        return sorted(network.state_dict().keys() & dict(network.named_buffers()).keys())

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all saved tensors, whole, one after another. All ranks call it together."""
        self.reshard()
        for name, tensor in self.saved.items():
            yield name, gathered(tensor)

    def whole(self) -> dict[str, Tensor]:
        """Copy all of these to the host's memory. All ranks call it together."""
        return {name: tensor.cpu() for name, tensor in self.tensors()}


def shard(
    model: LanguageModel, world: World, config: FsdpConfig, dtype: torch.dtype, extra: Sequence[nn.Module] = ()
) -> Sharded:
    """Spread a float32 model that every rank holds whole, or without values. Its passes compute in `dtype`.

    `extra` modules compute in float32. ModelError if the model cannot be split over the mesh's axis `tp`.
    """
    network = model.network
    shared = _split(model, world) if world.tensors.size() > 1 else ()
    if model.device.type != "meta":
        nn.Module.to(network, world.device)
    offload = CPUOffloadPolicy() if config.cpu_offload else OffloadPolicy()
    place = partial(fully_shard, mesh=world.sharding, offload_policy=offload)
    # Inputs keep their dtype, because temperatures and positions are not states. Gradients are summed, not averaged, in
    # float32.
    mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    blocks = _blocks(model)
    for block in blocks:
        if config.compile:
            _compile(block)
        place(block, mp_policy=mixed, reshard_after_forward=config.reshard_after_forward)
    for module in extra:
        place(module.to(world.device))
    root = Root([network, *extra])
    place(root, mp_policy=mixed, reshard_after_forward=False)
    for module in (*blocks, *extra, root):
        cast("FSDPModule", module).set_gradient_divide_factor(1.0)
        cast("FSDPModule", module).set_force_sum_reduction_for_comms(enable=True)  # gloo does not scale
    for number, block in enumerate(blocks):
        ahead = cast("list[FSDPModule]", blocks[number + 1 : number + 1 + config.prefetch])
        cast("FSDPModule", block).set_modules_to_forward_prefetch(ahead)
    return Sharded(root, model, world, shared, config.gradient_sync == "last")


def _compile(block: nn.Module) -> None:
    """Compile a block's operations for any number of tokens.

    FSDP's hooks stay outside, and so does activation checkpointing: torch compiles nothing below it if attention, which
    is not compiled, is in between.
    """
    plain = cast("Callable[..., Tensor]", inspect.unwrap(type(block).forward))
    forward = torch.compile(plain.__get__(block), dynamic=True)
    recomputes = block.training and getattr(block, "gradient_checkpointing", False)
    block.forward = partial(checkpoint, forward, use_reentrant=False) if recomputes else forward


def _blocks(model: LanguageModel) -> list[nn.Module]:
    """Return the model's layers, by transformers' names of modules that must not be split.

    What sees is gathered with the rest, because in a pass some ranks may have no image.
    """
    network = model.network
    names = cast("Iterable[str]", getattr(network, "_no_split_modules", None) or ())
    eyes = vision_modules(network).values() if model.vision is not None else ()
    apart = {each for module in eyes for each in module.modules()}
    return [each for each in network.modules() if type(each).__name__ in names and each not in apart]


def _split(model: LanguageModel, world: World) -> tuple[str, ...]:
    """Split matrices along `tp` by transformers' plan for the model. Returns the modules that stay whole on each."""
    network, count = model.network, world.tensors.size()
    name = type(network).__name__
    config = network.config.get_text_config()
    plan = cast("Mapping[str, str]", getattr(config, "base_model_tp_plan", None) or {})
    strange = sorted({style for style in plan.values() if style not in _STYLES and style != _SHARED})
    if not plan or strange:
        what = f"a plan with {', '.join(strange)}" if strange else "no plan"
        raise ModelError(f"{name} has {what} for tensor parallelism, which this backend does not support: set tp = 1")
    heads = {key: int(getattr(config, key)) for key in ("num_attention_heads", "num_key_value_heads")}
    if wrong := {key: number for key, number in heads.items() if number % count}:
        raise ModelError(f"{name} has {wrong}, which the mesh's tp = {count} does not divide")
    styles: dict[str, ParallelStyle] = {
        pattern: _STYLES[style]() for pattern, style in plan.items() if style in _STYLES
    }
    parallelize_module(model.body, world.tensors, styles)
    return tuple({pattern.rpartition(".")[2] for pattern, style in plan.items() if style == _SHARED})


def gathered(parameter: Tensor) -> Tensor:
    """Return a whole parameter. All ranks call it together."""
    whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return whole.detach()
