"""A model spread over the ranks: split along `tp`, sharded along `dp`, its forward pass under FSDP2's hooks."""

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from meshrl.errors import ModelError
from meshrl_fsdp.options import FsdpConfig
from meshrl_fsdp.world import World
from meshrl_hf.model import LanguageModel
from meshrl_hf.scoring import Passes, Predict, one_by_one

_STYLES: Final[Mapping[str, Callable[[], ParallelStyle]]] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
_SHARED: Final = "replicated_with_grad_allreduce"
"""What transformers calls a module that each rank has whole and uses for its own heads."""


logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
"""It advises against gathering shards of shards in two hops, which is how they were made."""


class Root(nn.Module):
    """Holds all that is sharded. Whatever is computed inside its forward pass finds parameters whole."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)

    def forward(self, compute: Callable[[], Tensor]) -> Tensor:
        """What is computed."""
        return compute().clone()  # FSDP marks what is returned, which may be no view


@dataclass(frozen=True)
class Sharded:
    """A model whose parameters are spread over the ranks."""

    root: Root
    model: LanguageModel
    world: World
    shared: Sequence[str]
    """Names of modules that each rank along `tp` has whole, and uses for its own heads alone."""
    sums_late: bool
    """Whether gradients are summed over the ranks after the last pass of a step alone."""

    def __call__(self, compute: Callable[[], Tensor]) -> Tensor:
        """Compute with the model: every rank at the same time."""
        done = False
        try:
            result = cast("Tensor", self.root(compute))
            done = torch.is_grad_enabled()  # then the backward pass frees what is whole
        finally:
            if not done:
                self.reshard()
        return result

    def predicting(self, predict: Predict) -> Predict:
        """What computes the same with the model."""
        return lambda batch, micro: self(partial(predict, batch, micro))

    def begin(self, last: bool) -> None:
        """Before a pass that is trained on, the last of a step or not: FSDP waits for no sum before the last ends."""
        root = cast("FSDPModule", self.root)
        root.set_is_last_backward(last)
        root.set_requires_gradient_sync(last or not self.sums_late)

    def passes(self, predict: Predict, budget: int) -> Passes:
        """Those of what `predict` says, without gradients."""
        return Passes(self.model, one_by_one(self.predicting(predict)), budget, self.world)

    def reshard(self) -> None:
        """Free all whole parameters, which would not change with the shards."""
        for module in self.root.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @property
    def partial(self) -> list[nn.Parameter]:
        """Parameters of the shared modules: their gradients are of this rank's heads alone."""
        ends = tuple(f".{name}.{kind}" for name in self.shared for kind in ("weight", "bias"))
        return [each for name, each in self.parameters.items() if ends and name.endswith(ends)]

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """By the names that the unsharded model gives them, a tied one once; each a DTensor."""
        return dict(self.model.network.named_parameters())

    @property
    def saved(self) -> Mapping[str, Tensor]:
        """The parameters, and the buffers that are saved with them, which each rank has whole."""
        buffers = dict(self.model.network.named_buffers())
        kept = sorted(self.model.network.state_dict().keys() & buffers.keys())
        return {**self.parameters, **{name: buffers[name] for name in kept}}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All that is saved, whole one after another: every rank at the same time."""
        self.reshard()
        for name, tensor in self.saved.items():
            yield name, gathered(tensor)

    def whole(self) -> dict[str, Tensor]:
        """Copies of all of these in the host's memory: every rank at the same time."""
        return {name: tensor.cpu() for name, tensor in self.tensors()}


def shard(
    model: LanguageModel, world: World, config: FsdpConfig, dtype: torch.dtype, extra: Sequence[nn.Module] = ()
) -> Sharded:
    """Spread a model in float32 that every rank has whole, or without values; its passes compute in `dtype`.

    `extra` modules compute in float32. ModelError where the model cannot be split over the mesh's axis `tp`.
    """
    network = model.network
    shared = _split(model, world) if world.tensors.size() > 1 else ()
    if model.device.type != "meta":
        nn.Module.to(network, world.device)
    offload = CPUOffloadPolicy() if config.cpu_offload else OffloadPolicy()
    place = partial(fully_shard, mesh=world.sharding, offload_policy=offload)
    # What goes in stays as it is: temperatures and positions are no states. Reduced in float32, summed, not averaged.
    mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    blocks = _blocks(network)
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
        cast("FSDPModule", module).set_force_sum_reduction_for_comms(enable=True)  # gloo scales nothing
    for number, block in enumerate(blocks):
        ahead = cast("list[FSDPModule]", blocks[number + 1 : number + 1 + config.prefetch])
        cast("FSDPModule", block).set_modules_to_forward_prefetch(ahead)
    return Sharded(root, model, world, shared, config.gradient_sync == "last")


def _compile(block: nn.Module) -> None:
    """Compile a block's own operations for any number of tokens.

    What FSDP does before and after stays outside, and so does what computes activations again: torch compiles nothing
    below it where attention, which is not compiled, is in between.
    """
    plain = cast("Callable[..., Tensor]", inspect.unwrap(type(block).forward))
    forward = torch.compile(plain.__get__(block), dynamic=True)
    recomputes = block.training and getattr(block, "gradient_checkpointing", False)
    block.forward = partial(checkpoint, forward, use_reentrant=False) if recomputes else forward


def _blocks(network: nn.Module) -> list[nn.Module]:
    """The model's layers, by the names that transformers gives as not to be split."""
    names = cast("Iterable[str]", getattr(network, "_no_split_modules", None) or ())
    return [module for module in network.modules() if type(module).__name__ in names]


def _split(model: LanguageModel, world: World) -> tuple[str, ...]:
    """Split matrices along `tp` as transformers' plan for the model says; the modules that stay whole for each."""
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
    parallelize_module(network.base_model, world.tensors, styles)
    return tuple({pattern.rpartition(".")[2] for pattern, style in plan.items() if style == _SHARED})


def gathered(parameter: Tensor) -> Tensor:
    """A parameter, whole: every rank at the same time."""
    whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return whole.detach()
