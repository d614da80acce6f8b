"""Load models onto the ranks: each reads its part of the files, if they have the model's names, or of new weights."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshrl.data import Weights
from meshrl.errors import ConfigError
from meshrl.mesh import Array, Rank
from meshrl.roles import ModelConfig, PolicyConfig, options_of
from meshrl_torch.checkpoint.boxes import Boxes
from meshrl_torch.model.kernels import chosen
from meshrl_torch.model.loading import GENERATOR, Kind, load, outline
from meshrl_torch.model.lora import own_name, prepare
from meshrl_torch.model.network import LanguageModel, check_packing
from meshrl_torch.model.reward_head import ScoreModel
from meshrl_torch.model.value_head import ValueModel, with_head
from meshrl_torch.options import FsdpConfig
from meshrl_torch.train.fsdp.parts import local, rectangle
from meshrl_torch.train.fsdp.sharded import Sharded, shard
from meshrl_torch.train.fsdp.world import World
from meshrl_torch.train.reward_training import kind_of, with_score
from meshrl_torch.weights.transfer import Form, check_weights, copy_into

_NETWORK: Final = "parts.0."
"""The prefix of a model's parameters in a `Root`."""


def load_sharded(config: ModelConfig, rank: Rank) -> Sharded:
    """Load the model in a role's table onto the ranks of its mesh, which call it together.

    A policy's model has its adapters.
    """
    layout = options_of(config, FsdpConfig)
    world = World.of(rank, layout)
    lora = config.lora if isinstance(config, PolicyConfig) else None
    if lora and world.tensors.size() > 1:
        raise ConfigError("the backend 'fsdp' has no adapters on a mesh with an axis tp: set tp = 1, or remove lora")
    model, folder = _model(world, config)
    if isinstance(config, PolicyConfig):
        world.agree(lambda: prepare(model, config))
    return _spread(model, folder, world, config, layout)


def load_sharded_valued(config: ModelConfig, rank: Rank) -> tuple[ValueModel, Sharded]:
    """The same for a critic."""
    layout = options_of(config, FsdpConfig)
    world = World.of(rank, layout)
    model, folder = _model(world, config)
    kept: list[ValueModel] = []
    world.agree(lambda: kept.append(with_head(model, config)))
    valued = kept[0]
    return valued, _spread(model, folder, world, config, layout, [valued.head])


def load_sharded_judge(config: ModelConfig, rank: Rank) -> tuple[ScoreModel, Sharded]:
    """The same for a reward, and for a trained reward model."""
    layout = options_of(config, FsdpConfig)
    world = World.of(rank, layout)
    kinds: list[Kind] = []
    world.agree(lambda: kinds.append(kind_of(config)))
    model, folder = _model(world, config, kinds[0])
    kept: list[ScoreModel] = []
    world.agree(lambda: kept.append(with_score(model, config)))
    return kept[0], _spread(kept[0].model, folder, world, config, layout)


def _model(world: World, config: ModelConfig, kind: Kind = GENERATOR) -> tuple[LanguageModel, Path | None]:
    """Return the model in float32, whole, or without values but with their folder. A rank's error is raised on all."""
    whole = config.model_copy(update={"dtype": "float32"})
    kept: list[tuple[LanguageModel, Path | None]] = []

    def read() -> None:
        kernel = chosen(options_of(config, FsdpConfig).attention, world.device)
        found = outline(whole, kind)
        model, folder = (found.model, found.folder) if found else (load(whole, kind), None)
        kept.append((replace(model, kernel=kernel), folder))

    world.agree(read)
    return kept[0]


def _spread(
    model: LanguageModel,
    folder: Path | None,
    world: World,
    config: ModelConfig,
    layout: FsdpConfig,
    extra: Sequence[nn.Module] = (),
) -> Sharded:
    dtype = cast("torch.dtype", getattr(torch, config.dtype))
    sharded = shard(model, world, layout, dtype, extra)
    if folder is not None:
        device = torch.device("cpu") if layout.cpu_offload else world.device
        world.agree(lambda: _fill(sharded, folder, device))
        with torch.no_grad():
            sharded(lambda: _checked(model))
    return sharded


def _fill(sharded: Sharded, folder: Path, device: torch.device) -> None:
    """Load the values of the parameters: each rank reads only its shards."""
    root = sharded.root
    real = {name: each for name, each in root.named_parameters() if not each.is_meta}
    kept = {name: local(each).clone() for name, each in {**real, **dict(root.named_buffers())}.items()}
    root.to_empty(device=device)
    with torch.no_grad():
        for name, each in [*root.named_parameters(), *root.named_buffers()]:
            if name in kept:
                local(each).copy_(kept[name])
    absent = {name: each for name, each in sharded.parameters.items() if f"{_NETWORK}{name}" not in kept}
    Boxes(folder).read(box for name, each in absent.items() for box in rectangle(own_name(name), each, local(each)))


def _checked(model: LanguageModel) -> Tensor:
    check_packing(model)
    return torch.zeros(())


def take(sharded: Sharded, weights: Weights, dtype: str) -> None:
    """Copy weights, whole tensors of `dtype`, into a model's shards. All ranks call it together.

    ModelError on all ranks, and nothing is copied, if they are of another model or differ from the sent bytes.
    """
    sharded.reshard()
    own = sharded.saved
    forms = {name: Form(dtype, tuple(tensor.shape)) for name, tensor in own.items()}
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
