"""The optimizer of a rank: over its shards, with the norm of the whole gradient."""

from collections.abc import Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshrl.algo import Predicts
from meshrl.roles import OptimizerConfig
from meshrl_torch.checkpoint.spread_state import MOMENTS
from meshrl_torch.model.devices import moved
from meshrl_torch.train.fsdp.parts import is_split, local
from meshrl_torch.train.fsdp.sharded import Sharded
from meshrl_torch.train.fsdp.world import SHARD, TP
from meshrl_torch.train.optimizer import Optimizer


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

    def step(self, predicts: Predicts) -> float:
        """Make a step like the base. All ranks call it together."""
        for parameter in self._sharded.partial:
            if parameter.grad is not None:  # a view of the gradient, which is summed in place
                dist.all_reduce(local(parameter.grad), group=self._sharded.world.tensors.get_group())
        for shard, spread in zip(self.shards, self._spread, strict=True):
            gradient = spread.grad
            shard.grad = None if gradient is None else local(gradient)
        for stepped, kept in self._adamw.state.items():
            kept.update({name: moved(kept[name], stepped.device) for name in MOMENTS})
        try:
            return super().step(predicts)
        finally:
            if self._offload:
                self._to_host()

    def forget(self) -> None:
        """Drop the gradients."""
        super().forget()
        for parameter in self._spread:
            parameter.grad = None

    def moments(self, name: str) -> list[Tensor]:
        """Return AdamW's state of this name for each shard, as views."""
        state = self._adamw.state  # a parameter without a gradient so far has none
        return [state[shard][name] if shard in state else torch.zeros_like(shard) for shard in self.shards]

    def begin(self, steps: int) -> None:
        """Set the number of steps, with moments to be filled in."""
        self.steps = steps
        if not steps:
            self._adamw.state.clear()
        for shard in self.shards if steps else ():
            kept = self._adamw.state[shard]
            kept["step"] = torch.tensor(float(steps), device=shard.device)
            for name in MOMENTS:
                if name not in kept:
                    kept[name] = torch.zeros_like(shard)

    def _to_host(self) -> None:
        """Move the moments to the host's memory, each to a buffer that is made once. Waits for the copies."""
        for shard, kept in self._adamw.state.items():
            for name in MOMENTS:
                if (shard, name) not in self._hosts:
                    pinned = shard.device.type == "cuda"
                    self._hosts[shard, name] = torch.empty_like(kept[name], device="cpu", pin_memory=pinned)
                kept[name] = self._hosts[shard, name].copy_(kept[name])

    def _total_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the norm over all shards of all ranks, float32[]."""
        squares = torch.stack([torch.linalg.vector_norm(each) for each in gradients]).double().square()
        there = [split for split, shard in zip(self._is_split, self.shards, strict=True) if shard.grad is not None]
        split = torch.tensor(there, device=squares.device)
        mesh = self._sharded.world.mesh
        own, apart = squares[~split].sum(), squares[split].sum()
        dist.all_reduce(apart, group=mesh[TP].get_group())
        total = own + apart
        dist.all_reduce(total, group=mesh[SHARD].get_group())
        return total.sqrt().float()
