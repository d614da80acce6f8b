"""Load models onto the ranks: each reads its part of the files, if they have the model's names, or of new weights."""

from dataclasses import replace
from typing import TYPE_CHECKING, Final, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshrl.data import Weights
from meshrl.mesh import Array, Rank
from meshrl.roles import ModelConfig, options_of
from meshrl_torch.model.attention import chosen
from meshrl_torch.model.files import ModelFiles
from meshrl_torch.model.heads import kind_of
from meshrl_torch.model.layout import PACKED
from meshrl_torch.model.loading import load, outline, packing_of
from meshrl_torch.model.network import LanguageModel, as_its_values_allow, with_layout
from meshrl_torch.model.proof import why_not_packed
from meshrl_torch.options import FsdpConfig
from meshrl_torch.train.fsdp.sharded import Sharded, local, rectangle, shard
from meshrl_torch.train.fsdp.world import World
from meshrl_torch.train.trainable import RoleModel, role_model
from meshrl_torch.weights.transfer import TensorSpec, check_weights, copy_into
from meshrl_torch.wire.wide import dtype_in

if TYPE_CHECKING:
    from meshrl.errors import ModelError

_NETWORK: Final = "parts.0."
"""The prefix of a model's parameters in a `Root`."""


def load_sharded(config: ModelConfig, rank: Rank) -> tuple[RoleModel, Sharded]:
    """Load the model in a role's table onto the ranks of its mesh, which call it together, with its head or adapters.

    An error of one rank is raised on all.
    """
    layout = options_of(config, FsdpConfig)
    world = World.of(rank, layout)
    whole = config.model_copy(update={"dtype": "float32"})

    def read() -> tuple[LanguageModel, ModelFiles | None]:
        """Return the model in float32, whole, or without values but with their files."""
        kernel, kind = chosen(layout.attention, world.device), kind_of(config)
        outlined = outline(whole, kind)
        model, files = outlined or (load(whole, kind), None)
        if outlined:
            model = with_layout(model, packing_of(config))
        return replace(model, kernel=kernel), files

    model, files = world.together(read)
    role = world.together(lambda: role_model(config, model))
    dtype = cast("torch.dtype", getattr(torch, config.dtype))
    sharded = shard(role.model, world, layout, dtype, [role.head] if role.head else [])
    if files is not None:
        device = torch.device("cpu") if layout.cpu_offload else world.device
        world.agree(lambda: _fill(sharded, files, device))
    if role.model.layout is PACKED:
        return _as_its_values_allow(config, role, sharded)
    return role, sharded


def _fill(sharded: Sharded, files: ModelFiles, device: torch.device) -> None:
    """Load the values of the parameters: each rank reads only its shards."""
    root = sharded.root
    real = {name: each for name, each in root.named_parameters() if not each.is_meta}
    values = {name: local(each).clone() for name, each in {**real, **dict(root.named_buffers())}.items()}
    root.to_empty(device=device)
    with torch.no_grad():
        for name, each in [*root.named_parameters(), *root.named_buffers()]:
            if name in values:
                local(each).copy_(values[name])
    absent = {name: each for name, each in sharded.parameters.items() if f"{_NETWORK}{name}" not in values}
    files.read(box for name, each in absent.items() for box in rectangle(name, each, local(each)))


@torch.no_grad()
def _as_its_values_allow(config: ModelConfig, role: RoleModel, sharded: Sharded) -> tuple[RoleModel, Sharded]:
    """Let a model pad rows, on all ranks, if packed ones see each other with its values in the dtype of passes."""
    found: list[ModelError | None] = []

    def check() -> Tensor:
        found.append(why_not_packed(role.model))
        return torch.zeros(())

    sharded(check)
    fault = next(filter(None, sharded.world.agree(found.pop)), None)
    model = sharded.world.together(lambda: as_its_values_allow(role.model, fault, packing_of(config)))
    return replace(role, model=model), replace(sharded, model=model)


def take(sharded: Sharded, weights: Weights, dtype: str) -> None:
    """Copy weights, whole tensors of a model of `dtype`, into a model's shards. All ranks call it together.

    ModelError on all ranks, and nothing is copied, if they are of another model or differ from the sent bytes.
    """
    sharded.reshard()
    own = sharded.saved
    network, wanted = sharded.model.network, cast("torch.dtype", getattr(torch, dtype))
    forms = {
        name: TensorSpec(str(dtype_in(network, name, wanted)).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in own.items()
    }
    sharded.world.agree(lambda: check_weights(forms, weights))
    with torch.no_grad():
        for name, tensor in own.items():
            _copy(tensor, weights.tensors[name])


def _copy(tensor: Tensor, whole: Array) -> None:
    if not isinstance(tensor, DTensor):
        copy_into(tensor.detach(), whole)
        return
    for box in rectangle("", tensor, local(tensor)):
        copy_into(box.tensor, whole[tuple(slice(start, end) for start, end in box.ranges)])
