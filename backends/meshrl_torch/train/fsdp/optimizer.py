"""The optimizer of a rank, over its shards, and the checkpoint of a sharded model."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshrl.algo import Predicts
from meshrl.roles import OptimizerConfig
from meshrl_torch.checkpoint.boxes import Box
from meshrl_torch.checkpoint.state import TrainingState
from meshrl_torch.model.adapted import Adapter
from meshrl_torch.model.attention import moved
from meshrl_torch.train.fsdp.sharded import Sharded, is_split, local, rectangle
from meshrl_torch.train.fsdp.world import REPLICATE, SHARD, TP, World
from meshrl_torch.train.optimizer import MOMENTS, Optimizer


class ShardedOptimizer(Optimizer):
    """AdamW on each rank's shards as plain tensors. It works element by element, so shards are independent."""

    def __init__(
        self, config: OptimizerConfig, sharded: Sharded, parameters: Sequence[nn.Parameter], *, offload: bool = False
    ) -> None:
        """`offload`: keep the moments in the host's memory between steps."""
        self._sharded: Final = sharded
        self._hosts: Final[dict[tuple[Tensor, str], Tensor]] = {}
        """Their place between steps, by shard and name. Pinned for a GPU."""
        self._offload: Final = offload
        self._spread: Final = parameters
        self.shards: Final = [nn.Parameter(local(parameter)) for parameter in self._spread]
        self._is_split: Final = [is_split(each) for each in self._spread]
        super().__init__(config, self.shards, self._total_norm)

    def step(self, predicts: Predicts, settings: OptimizerConfig, scale: float = 1.0) -> float:
        """Make a step like the base. All ranks call it together."""
        for parameter in self._sharded.partial:
            if parameter.grad is not None:  # a view of the gradient, which is summed in place
                dist.all_reduce(local(parameter.grad), group=self._sharded.world.tensors.get_group())
        for shard, spread in zip(self.shards, self._spread, strict=True):
            gradient = spread.grad
            shard.grad = None if gradient is None else local(gradient)
        for stepped, state in self._adamw.state.items():
            state.update({name: moved(state[name], stepped.device) for name in MOMENTS})
        try:
            return super().step(predicts, settings, scale)
        finally:
            if self._offload:
                self._to_host()

    def forget(self) -> None:
        """Drop the gradients."""
        super().forget()
        for parameter in self._spread:
            parameter.grad = None

    def _to_host(self) -> None:
        """Move the moments to the host's memory, each to a buffer that is made once. Waits for the copies."""
        for shard, state in self._adamw.state.items():
            for name in MOMENTS:
                if (shard, name) not in self._hosts:
                    pinned = shard.device.type == "cuda"
                    self._hosts[shard, name] = torch.empty_like(state[name], device="cpu", pin_memory=pinned)
                state[name] = self._hosts[shard, name].copy_(state[name])

    def _total_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the norm over all shards of all ranks, float32[]."""
        squares = torch.stack([torch.linalg.vector_norm(each) for each in gradients]).double().square()
        splits = [split for split, shard in zip(self._is_split, self.shards, strict=True) if shard.grad is not None]
        split = moved(torch.tensor(splits), squares.device)
        mesh = self._sharded.world.mesh
        own, apart = squares.where(~split, 0).sum(), squares.where(split, 0).sum()
        dist.all_reduce(apart, group=mesh[TP].get_group())
        total = own + apart
        dist.all_reduce(total, group=mesh[SHARD].get_group())
        return total.sqrt().float()


class ShardedState(TrainingState):
    """A model in training, whose parameters are DTensors."""

    def __init__(
        self, role: str, sharded: Sharded, parameters: Mapping[str, nn.Parameter], optimizer: ShardedOptimizer
    ) -> None:
        super().__init__(role, sharded.world, parameters, optimizer)
        self._sharded = sharded

    def _boxes(self, kinds: Sequence[str], names: Collection[str]) -> Iterator[Box]:
        self._sharded.reshard()
        return super()._boxes(kinds, names)

    def _placed(self, name: str, parameter: Tensor, part: Tensor) -> Iterator[Box]:
        return rectangle(name, parameter, part)

    def _written_here(self) -> Collection[str]:
        """Return the names. Of ranks with the same part one writes it, and replicas share the work."""
        mesh = self._sharded.world.mesh
        loads = [0] * mesh[REPLICATE].size()
        names: set[str] = set()
        for name, parameter in self._parameters.items():
            lightest = loads.index(min(loads))
            loads[lightest] += parameter.numel()
            alone = is_split(parameter) or mesh.get_local_rank(TP) == 0
            if alone and lightest == mesh.get_local_rank(REPLICATE):
                names.add(name)
        return names


class AdapterOptimizer(Optimizer):
    """AdamW over an adapter's matrices, which each rank holds whole. All ranks make the same step."""

    def __init__(self, config: OptimizerConfig, world: World, adapter: Adapter) -> None:
        self._world: Final = world
        self._partial: Final = [name in adapter.partial for name in adapter.parameters]
        super().__init__(config, list(adapter.parameters.values()))

    def step(self, predicts: Predicts, settings: OptimizerConfig, scale: float = 1.0) -> float:
        """Sum the gradients over the ranks and make a step like the base. All ranks call it together."""
        counts_here = self._world.mesh.get_local_rank(TP) == 0  # ranks along tp have the same rows
        pieces: list[Tensor] = []
        for master, is_partial in zip(self.masters, self._partial, strict=True):
            gradient = master.grad
            pieces.append(torch.zeros_like(master) if gradient is None or not (is_partial or counts_here) else gradient)
        total = torch.cat([each.flatten() for each in pieces])
        dist.all_reduce(total)
        for master, own in zip(self.masters, total.split([each.numel() for each in pieces]), strict=True):
            master.grad = own.view_as(master)
        return super().step(predicts, settings, scale)


class AdapterState(TrainingState):
    """An adapter in training, whose matrices each rank holds whole and writes some of."""

    def _written_here(self) -> Collection[str]:
        names = list(self._parameters)
        return names[self._ranks.number :: dist.get_world_size()]
