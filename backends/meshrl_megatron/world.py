"""The place of a rank among those that share a Megatron model, and their agreements."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from meshrl.errors import ConfigError
from meshrl.mesh import Rank
from meshrl_megatron.core import ProcessGroupCollection
from meshrl_megatron.groups import AXES, Grid
from meshrl_torch.ranks.process_group import join
from meshrl_torch.ranks.rank_group import RankGroup, Share


@dataclass(frozen=True)
class World(RankGroup):
    """The ranks of a mesh as Megatron sees them: `dp x pp x cp x tp`."""

    grid: Grid
    groups: ProcessGroupCollection
    device: torch.device
    multiple: int
    """Passes come in multiples of this: the pipeline's length with virtual stages, else 1."""

    @classmethod
    def of(cls, rank: Rank, virtual_stages: int, experts: int) -> "World":
        """Meet the other ranks. ConfigError if the mesh's axes are unknown, or `experts` does not divide dp."""
        unknown = {axis: size for axis, size in rank.shape.items() if axis not in AXES and size > 1}
        if unknown:
            raise ConfigError(f"the backend 'megatron' supports the axes {', '.join(AXES)}, but its mesh has {unknown}")
        shape = {axis: size for axis, size in rank.shape.items() if axis in AXES} or {"dp": 1}
        if shape.get("dp", 1) % experts:
            raise ConfigError(
                f"megatron.experts = {experts} does not divide the mesh's dp = {shape.get('dp', 1)}: experts are "
                "divided among that many neighbours along dp"
            )
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        join(rank, device, "megatron")
        grid = Grid(shape, rank.index, experts)
        multiple = grid.sizes["pp"] if virtual_stages > 1 else 1
        groups = grid.collection(rank.index)
        return cls(grid.sizes["dp"], (grid.place["dp"],), grid, groups, device, multiple)

    @property
    def last(self) -> int:
        """The rank with the last stage of this one's pipeline."""
        return self.grid.rank(pp=self.grid.sizes["pp"] - 1)

    @property
    def is_last_stage(self) -> bool:
        """True if this rank has the last stage of its pipeline."""
        return self.grid.place["pp"] == self.grid.sizes["pp"] - 1

    def total(self, share: Callable[[], Share]) -> Share:
        """Combine the shares of all ranks. An error of one rank is raised on all."""
        total = super().total(share)
        return replace(total, passes=-(-total.passes // self.multiple) * self.multiple)
