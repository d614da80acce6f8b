"""Where a rank stands among those that share its model, and what they agree on."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Final, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshrl.actor import Rank, Together
from meshrl.errors import ConfigError, DataError, MeshrlError, ModelError
from meshrl.layout import FsdpConfig
from meshrl_hf.group import join
from meshrl_hf.peers import Share

T = TypeVar("T")

REPLICATE: Final = "replicate"
SHARD: Final = "shard"
TP: Final = "tp"


@dataclass(frozen=True)
class World:
    """The ranks of a mesh as FSDP sees them: `replicate x shard x tp`; the first two are the mesh's axis `dp`."""

    mesh: DeviceMesh
    host: DeviceMesh
    """The same ranks, for tensors in the host's memory."""
    device: torch.device
    size: int
    """Ranks with rows of their own."""
    interruptible: Final = False

    @classmethod
    def of(cls, rank: Rank, config: FsdpConfig) -> "World":
        """Meet the other ranks. ConfigError where the mesh's axes do not fit."""
        unknown = {axis: size for axis, size in rank.shape.items() if axis not in ("dp", "tp") and size > 1}
        if unknown:
            raise ConfigError(f"the backend 'fsdp' knows the axes dp and tp, and its mesh has {unknown}")
        dp, tp = rank.shape.get("dp", 1), rank.shape.get("tp", 1)
        if dp % config.replicate:
            raise ConfigError(f"fsdp.replicate = {config.replicate} does not divide the {dp} ranks of the axis dp")
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        if config.cpu_offload and device.type == "cpu":
            raise ConfigError(
                "fsdp.cpu_offload keeps parameters out of a GPU's memory, and this rank has none: leave it out"
            )
        join(rank, device, "fsdp")
        numbers = torch.arange(prod(rank.shape.values())).reshape(tuple(rank.shape.values()))
        order = [list(rank.shape).index(axis) for axis in ("dp", "tp") if axis in rank.shape]
        others = [index for index in range(numbers.dim()) if index not in order]
        grid = numbers.permute(*order, *others).reshape(config.replicate, dp // config.replicate, tp)
        meshes = {kind: DeviceMesh(kind, grid, mesh_dim_names=(REPLICATE, SHARD, TP)) for kind in ("cpu", device.type)}
        return cls(meshes[device.type], meshes["cpu"], device, dp)

    @property
    def number(self) -> int:
        """This rank's, among all."""
        return dist.get_rank()

    @property
    def sharding(self) -> DeviceMesh:
        """The mesh that parameters are sharded over: of one axis, or, with replicas, of two."""
        return self.mesh[REPLICATE, SHARD] if self.mesh[REPLICATE].size() > 1 else self.mesh[SHARD]

    @property
    def tensors(self) -> DeviceMesh:
        """The mesh that matrices are split over."""
        return self.mesh[TP]

    def total(self, share: Callable[[], Share]) -> Share:
        """The shares of all ranks together. What one of them raises, all raise."""
        here = self.mesh.get_coordinate() or (0, 0, 0)
        shares = self.agree(lambda: (here, share()))
        different = {place[:2]: each for place, each in shares}.values()  # ranks along tp have the same rows
        return Share(
            max(each.passes for each in different),
            sum(each.tokens for each in different),
            sum(each.rows for each in different),
        )

    def first(self, work: Callable[[], None]) -> None:
        """Do on one rank what is to be done once. Where it raises, all raise; all have waited for it."""
        self.agree(work if self.number == 0 else lambda: None)

    def agree(self, work: Callable[[], T]) -> list[T]:
        """What `work` gives on each rank, on all of them. Where it raises on one, all raise.

        So no rank waits in a collective for one that has left.
        """
        if dist.get_world_size() == 1:
            return [work()]
        failure: Exception | None = None
        outcome: T | Failed
        try:
            outcome = work()
        except Exception as error:  # noqa: BLE001 -- it is raised when the others know of it
            failure, outcome = error, Failed.of(error)
        outcomes: list[T | Failed] = [outcome] * dist.get_world_size()
        dist.all_gather_object(outcomes, outcome)
        if failure is not None:
            raise failure
        for rank, each in enumerate(outcomes):
            if isinstance(each, Failed):
                raise each.kind(f"{each.text} (on rank {rank})")
        return cast("list[T]", outcomes)


class Spread(Together):
    """Base of the roles of this backend: their ranks meet in each call."""

    _world: World

    def agree(self, work: Callable[[], T]) -> list[T]:
        """As `World.agree`."""
        return self._world.agree(work)


class Failed(NamedTuple):
    """What the other ranks are told of an exception."""

    kind: type[MeshrlError]
    text: str

    @classmethod
    def of(cls, error: Exception) -> "Failed":
        """A plain error of meshrl's keeps its kind."""
        if type(error) in (ConfigError, DataError, ModelError):
            return cls(cast("type[MeshrlError]", type(error)), str(error))
        return cls(ModelError, f"{type(error).__name__}: {error}")
