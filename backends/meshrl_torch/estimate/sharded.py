"""The memory of a rank of the fsdp backend: its code, rehearsed in a group without other ranks."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Final, cast

import torch
from torch.distributed.fsdp import FSDPModule

from meshrl.errors import BackendError
from meshrl.roles import CriticConfig, Memory, ModelConfig, PolicyConfig, RewardTrainingConfig, Work, options_of
from meshrl_torch.estimate.memory import Cast, figures, knobs, part_of, rehearsed_alone
from meshrl_torch.model.network import LanguageModel
from meshrl_torch.options import FsdpConfig
from meshrl_torch.train.fsdp.optimizer import ShardedOptimizer
from meshrl_torch.train.fsdp.sharded import shard
from meshrl_torch.train.fsdp.world import World, grid_of

_OFFLOADED: Final = ("parameters", "moments", "gradients")
"""Kept in the host's memory with `cpu_offload`."""


def held(config: ModelConfig, work: Work) -> Memory:
    """Estimate the memory of a role's first rank, whose shards are the largest.

    BackendError for unsupported cases, ConfigError if the process is in a process group already.
    """
    layout = options_of(config, FsdpConfig)
    dtype = cast("torch.dtype", getattr(torch, config.dtype))
    trains = isinstance(config, PolicyConfig | CriticConfig | RewardTrainingConfig)
    if trains and layout.gradient_sync == "last":
        raise BackendError('gradient_sync = "last" keeps whole gradients, which are not counted yet')
    whole = config.model_copy(update={"dtype": "float32"})
    with _alone(work.axes, layout) as world:
        budget = int(getattr(config, "micro_batch_tokens", 1))
        found = figures(whole, work, budget, partial(_laid_out, config, layout, dtype, world))
    terms = found.terms("update" if trains else "score", host=not work.gpu)
    if layout.cpu_offload and work.gpu:
        terms = [replace(each, host=each.name in _OFFLOADED) for each in terms]
    tried = [] if layout.cpu_offload or not work.gpu else ["fsdp.cpu_offload=true"]
    return Memory(terms, [*knobs(config), *tried])


def _laid_out(config: ModelConfig, layout: FsdpConfig, dtype: torch.dtype, world: World, model: LanguageModel) -> Cast:
    part = part_of(config, model)
    on_gpu = layout.model_copy(update={"cpu_offload": False, "compile": False})
    sharded = shard(part.model, world, on_gpu, dtype, part.extra)
    predict, parameters = sharded.predicting(part.predict), part.parameters
    apart = [each for each in sharded.root.modules() if isinstance(each, FSDPModule) and id(each) != id(sharded.root)]
    own = {id(parameter) for each in apart for parameter in each.parameters()}
    gathered = sum(each.numel() for each in sharded.root.parameters() if id(each) not in own) * dtype.itemsize
    if parameters is None or not isinstance(config, PolicyConfig | CriticConfig | RewardTrainingConfig):
        return Cast(sharded.root, predict, gathered=gathered)
    optimizer = config.optimizer
    return Cast(sharded.root, predict, lambda: ShardedOptimizer(optimizer, sharded, parameters()).masters, gathered)


@contextmanager
def _alone(axes: Mapping[str, int], layout: FsdpConfig) -> Generator[World]:
    """The first rank of a mesh with these axes, without the other ranks."""
    grid = grid_of(axes, layout)
    with rehearsed_alone(0, grid.numel()):
        yield World.on(grid, torch.device("cpu"))
