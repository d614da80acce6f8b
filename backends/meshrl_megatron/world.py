"""The ranks that share a Megatron model: their places along a mesh's axes, process groups and agreements."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Final, cast

import torch
import torch.distributed as dist

from meshrl.errors import ConfigError
from meshrl.mesh import Rank, visible_gpus
from meshrl_megatron import AXES, cpu
from meshrl_megatron.core import ProcessGroupCollection
from meshrl_torch.ranks.process_group import RankGroup, Share, SharedGroups, join, own_device

_AXES: Final = AXES["Policy"]
_PLACES: Final = ("apart", "ep", *_AXES[1:])
"""The same with dp in two parts: ranks along `ep` divide experts among them, those along `apart` hold the same ones."""

_groups: Final[SharedGroups[object]] = SharedGroups()
"""By ranks. Groups of other ranks are known too, so that no rank makes one again."""


class Grid:
    """The ranks of a mesh by their places along the axes, and this rank's place."""

    def __init__(self, shape: Mapping[str, int], rank: int, experts: int = 1) -> None:
        """`shape`: the mesh's axes, all of the backend's, the last one fastest. `rank`: this one's number.

        `experts`: number of neighbours along dp that divide the experts among them. It divides dp.
        """
        numbers = torch.arange(prod(shape.values())).reshape(tuple(shape.values()))
        order = [list(shape).index(axis) for axis in _AXES if axis in shape]
        sizes = [shape.get(axis, 1) for axis in _AXES]
        self._ranks: Final = numbers.permute(*order).reshape(sizes)
        self._places: Final = self._ranks.reshape(sizes[0] // experts, experts, *sizes[1:])
        self.sizes: Final[Mapping[str, int]] = dict(zip(_AXES, sizes, strict=True))
        self.experts: Final = experts
        here = (self._ranks == rank).nonzero()[0].tolist()
        self.place: Final[Mapping[str, int]] = dict(zip(_AXES, map(int, here), strict=True))

    def along(self, *axes: str) -> list[list[int]]:
        """Return the ranks that differ only in these axes, one list for each place on the others.

        In addition to the mesh's there are `ep` and `apart`, which make up dp.
        """
        wanted = {*axes, *(_PLACES[:2] if "dp" in axes else ())}
        inner = [index for index, axis in enumerate(_PLACES) if axis in wanted]
        outer = [index for index in range(len(_PLACES)) if index not in inner]
        ranks = self._places.permute(*outer, *inner)
        count = prod(self._places.shape[index] for index in inner)
        return [list(map(int, each)) for each in ranks.reshape(-1, count).tolist()]

    def rank(self, **place: int) -> int:
        """Return the rank with this one's place, except along the given axes."""
        return int(self._ranks[tuple({**self.place, **place}[axis] for axis in _AXES)])

    def collection(self, rank: int) -> ProcessGroupCollection:
        """Return all groups that Megatron asks for. All ranks make them together."""

        def own(lists: Sequence[Sequence[int]]) -> dist.ProcessGroup:
            """Return the group of these that contains this rank."""
            groups = {tuple(each): _groups.get(tuple(each), partial(dist.new_group, list(each))) for each in lists}
            return cast("dist.ProcessGroup", next(group for ranks, group in groups.items() if rank in ranks))

        pipelines = self.along("pp")
        ends = [[each[0], each[-1]] if len(each) > 1 else each for each in pipelines]
        inside = [[each] for pipeline in pipelines for each in pipeline[1:-1]]
        data, model = own(self.along("dp", "cp")), own(self.along("pp", "tp"))
        tensors, experts, everyone = own(self.along("tp")), own(self.along("ep", "tp")), own(self.along(*_AXES))
        copies = own(self.along("apart", "cp"))  # of experts
        return ProcessGroupCollection(
            tp=tensors,
            pp=own(pipelines),
            cp=own(self.along("cp")),
            dp=own(self.along("dp")),
            mp=model,
            dp_cp=data,
            tp_cp=own(self.along("tp", "cp")),
            tp_dp_cp=own(self.along("tp", "dp", "cp")),
            embd=own([*ends, *inside]),
            pos_embd=own([[each] for pipeline in pipelines for each in pipeline]),
            intra_dp_cp=data,
            intra_dist_opt=everyone,
            inter_dist_opt=None,
            ep=experts,
            expt_tp=own(self.along()),
            tp_ep=experts,
            tp_ep_pp=own(self.along("ep", "pp", "tp")),
            expt_dp=copies,
            intra_expt_dp=copies,
        )


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
        unknown = {axis: size for axis, size in rank.shape.items() if axis not in _AXES and size > 1}
        if unknown:
            raise ConfigError(
                f"the backend 'megatron' supports the axes {', '.join(_AXES)}, but its mesh has {unknown}"
            )
        shape = {axis: size for axis, size in rank.shape.items() if axis in _AXES} or {"dp": 1}
        if shape.get("dp", 1) % experts:
            raise ConfigError(
                f"megatron.experts = {experts} does not divide the mesh's dp = {shape.get('dp', 1)}: experts are "
                "divided among that many neighbours along dp"
            )
        if visible_gpus():  # which does not ask CUDA: it reads this first
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # kernels start in order, NCCL's beside them
        device = own_device()
        join(rank, device, "megatron")
        if device.type == "cpu" and not cpu.is_installed():
            raise ConfigError(
                "Megatron-Core was imported for the GPUs of this machine, and this rank has none: set gpus = 1 for the "
                "mesh, or start the run with CUDA_VISIBLE_DEVICES= to compute on CPUs"
            )
        grid = Grid(shape, rank.index, experts)
        multiple = grid.sizes["pp"] if virtual_stages > 1 else 1
        groups = grid.collection(rank.index)
        return cls(grid.sizes["dp"], (grid.place["dp"],), grid, groups, device, multiple)

    @property
    def last(self) -> int:
        """The rank with the last stage of this one's pipeline, which computes the loss."""
        return self.grid.rank(pp=self.grid.sizes["pp"] - 1)

    def totals(self, shares: Callable[[], Mapping[str, Share]]) -> Mapping[str, Share]:
        """Combine the shares of all ranks by name, with passes for whole turns of the pipeline."""
        return {
            name: total._replace(passes=-(-total.passes // self.multiple) * self.multiple)
            for name, total in super().totals(shares).items()
        }
