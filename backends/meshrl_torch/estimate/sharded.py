"""The memory of a role's rank, of the backend `fsdp`: its own code, rehearsed without the other ranks."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final, cast

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from meshrl.errors import BackendError
from meshrl.roles import MemoryEstimate, ModelConfig, Workload, options_of
from meshrl_torch.estimate import rehearsal
from meshrl_torch.estimate.memory import Layout, budget_of, figures, knobs
from meshrl_torch.model.network import LanguageModel
from meshrl_torch.options import FsdpConfig
from meshrl_torch.train.fsdp.optimizer import ShardedOptimizer
from meshrl_torch.train.fsdp.sharded import shard
from meshrl_torch.train.fsdp.world import World, grid_of
from meshrl_torch.train.roles import TrainedConfig, role_model

_OFFLOADED: Final = ("parameters", "moments", "gradients")
"""Kept in the host's memory with `cpu_offload`."""


def held(config: ModelConfig, work: Workload) -> MemoryEstimate:
    """Estimate the memory of the first rank of the backend `fsdp`, whose shards are the largest.

    BackendError for unsupported cases, ConfigError if the process is in a process group already.
    """
    layout = options_of(config, FsdpConfig)
    trains = isinstance(config, TrainedConfig)
    if trains and layout.gradient_sync == "last":
        raise BackendError('gradient_sync = "last" keeps whole gradients, which are not counted yet')
    whole, grid = config.model_copy(update={"dtype": "float32"}), grid_of(work.axes, layout)
    with rehearsal.rehearsed_alone(0, grid.numel()):
        world = World.on(grid, torch.device("cpu"))
        measured = figures(whole, work, budget_of(config), partial(_sharded, config, layout, world))
    terms = measured.terms("update" if trains else "score", host=not work.gpu)
    if layout.cpu_offload and work.gpu:
        terms = [replace(each, host=each.name in _OFFLOADED) for each in terms]
    offload = [] if layout.cpu_offload or not work.gpu else ["fsdp.cpu_offload=true"]
    return MemoryEstimate(terms, [*knobs(config), *offload])


def _sharded(config: ModelConfig, layout: FsdpConfig, world: World, model: LanguageModel) -> Layout:
    role, dtype = role_model(config, model), cast("torch.dtype", getattr(torch, config.dtype))
    on_gpu = layout.model_copy(update={"cpu_offload": False, "compile": False})
    sharded = shard(role.model, world, on_gpu, dtype, [role.head] if role.head else [])
    predict = sharded.predicting(role.predict)
    apart = [each for each in sharded.root.modules() if isinstance(each, FSDPModule) and id(each) != id(sharded.root)]
    own = {id(parameter) for each in apart for parameter in each.parameters()}
    gathered = sum(each.numel() for each in sharded.root.parameters() if id(each) not in own) * dtype.itemsize
    if not isinstance(config, TrainedConfig):
        return Layout(sharded.root, predict, gathered=gathered)
    optimizer = config.optimizer

    def masters() -> Sequence[Tensor]:
        return ShardedOptimizer(optimizer, sharded, list(role.parameters.values())).masters

    return Layout(sharded.root, predict, masters, gathered)
