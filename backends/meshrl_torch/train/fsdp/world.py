"""The place of a rank among those that share its model."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Final

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from meshrl.errors import ConfigError
from meshrl.mesh import Rank
from meshrl_torch.options import FsdpConfig
from meshrl_torch.ranks.process_group import RankGroup, SharedGroups, join, own_device

REPLICATE: Final = "replicate"
SHARD: Final = "shard"
TP: Final = "tp"

_meshes: Final[SharedGroups[DeviceMesh]] = SharedGroups()
"""By device and grid of ranks, because roles with the same layout share process groups."""


@dataclass(frozen=True)
class World(RankGroup):
    """The ranks of a mesh as FSDP sees them: `replicate x shard x tp`. The first two are the mesh's axis `dp`."""

    mesh: DeviceMesh
    device: torch.device

    @classmethod
    def of(cls, rank: Rank, config: FsdpConfig) -> "World":
        """Meet the other ranks. ConfigError if the mesh's axes do not fit."""
        grid = grid_of(rank.shape, config)
        device = own_device()
        if config.cpu_offload and device.type == "cpu":
            raise ConfigError(
                "fsdp.cpu_offload keeps parameters out of a GPU's memory, and this rank has none: leave it out"
            )
        join(rank, device, "fsdp")
        return cls.on(grid, device)

    @classmethod
    def on(cls, grid: Tensor, device: torch.device) -> "World":
        """Return this rank's place in a grid of the default group's ranks, int64[replicate, shard, tp].

        All ranks call it together. The mesh of a grid is made once in a process.
        """
        key = device.type, *grid.shape, *grid.flatten().tolist()
        mesh = _meshes.get(key, lambda: DeviceMesh(device.type, grid, mesh_dim_names=(REPLICATE, SHARD, TP)))
        here = mesh.get_coordinate() or (0, 0, 0)
        place = tuple(here[:2])  # ranks along tp have the same rows
        return cls(grid.shape[0] * grid.shape[1], place, mesh, device)

    @property
    def sharding(self) -> DeviceMesh:
        """The mesh that parameters are sharded over: one axis, or two with replicas."""
        return self.mesh[REPLICATE, SHARD] if self.mesh[REPLICATE].size() > 1 else self.mesh[SHARD]

    @property
    def tensors(self) -> DeviceMesh:
        """The mesh that matrices are split over."""
        return self.mesh[TP]


def grid_of(axes: Mapping[str, int], config: FsdpConfig) -> Tensor:
    """Arrange a mesh's ranks as int64[replicate, shard, tp]. ConfigError if its axes do not fit."""
    unknown = {axis: size for axis, size in axes.items() if axis not in ("dp", "tp") and size > 1}
    if unknown:
        raise ConfigError(f"the backend 'fsdp' supports the axes dp and tp, but its mesh has {unknown}")
    dp, tp = axes.get("dp", 1), axes.get("tp", 1)
    if dp % config.replicate:
        raise ConfigError(f"fsdp.replicate = {config.replicate} does not divide the {dp} ranks of the axis dp")
    shards, neighbours = dp // config.replicate, config.reshard_after_forward
    if not isinstance(neighbours, bool) and shards % neighbours:
        raise ConfigError(
            f"fsdp.reshard_after_forward = {neighbours} does not divide the {shards} ranks that share parameters"
        )
    numbers = torch.arange(prod(axes.values())).reshape(tuple(axes.values()))
    order = [list(axes).index(axis) for axis in ("dp", "tp") if axis in axes]
    others = [index for index in range(numbers.dim()) if index not in order]
    return numbers.permute(*order, *others).reshape(config.replicate, dp // config.replicate, tp)
