"""Load models onto the ranks: each reads its part of the files, if they have the model's names, or of new weights."""

from dataclasses import replace
from typing import Final, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshrl.data import Weights
from meshrl.mesh import Array, Rank
from meshrl.roles import ModelConfig, options_of
from meshrl_torch.model.attention import chosen
from meshrl_torch.model.files import ModelFiles
from meshrl_torch.model.heads import kind_of
from meshrl_torch.model.loading import load, outline, packing_of
from meshrl_torch.model.network import LanguageModel, check_packing, with_layout
from meshrl_torch.options import FsdpConfig
from meshrl_torch.train.fsdp.sharded import Sharded, local, rectangle, shard
from meshrl_torch.train.fsdp.world import World
from meshrl_torch.train.trainable import RoleModel, role_model
from meshrl_torch.weights.transfer import TensorSpec, check_weights, copy_into

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
    with torch.no_grad():  # in the dtype of passes
        sharded(lambda: _checked(role.model))
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


def _checked(model: LanguageModel) -> Tensor:
    check_packing(model)
    return torch.zeros(())


def take(sharded: Sharded, weights: Weights, dtype: str) -> None:
    """Copy weights, whole tensors of `dtype`, into a model's shards. All ranks call it together.

    ModelError on all ranks, and nothing is copied, if they are of another model or differ from the sent bytes.
    """
    sharded.reshard()
    own = sharded.saved
    forms = {name: TensorSpec(dtype, tuple(tensor.shape)) for name, tensor in own.items()}
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
