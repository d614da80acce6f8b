"""The roles of the backend `fsdp`: a model sharded over its ranks, which call each method together."""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from meshrl.algo import Loss
from meshrl.data import Batch, Metrics, Weights
from meshrl.roles import (
    CriticConfig,
    PolicyConfig,
    ReferenceConfig,
    RewardModelConfig,
    RewardTrainingConfig,
    options_of,
)
from meshrl_torch.checkpoint.boxes import Box
from meshrl_torch.model import saving
from meshrl_torch.model.lora import published
from meshrl_torch.options import FsdpConfig
from meshrl_torch.train import roles
from meshrl_torch.train.fsdp.loading import load_sharded, take
from meshrl_torch.train.fsdp.optimizer import ShardedOptimizer, ShardedState
from meshrl_torch.train.fsdp.sharded import Sharded, gathered, is_first, local, rectangle
from meshrl_torch.train.step import step


class ShardedTrainable(roles.Trainable):
    """A model with sharded float32 parameters and optimizer. It computes in the dtype of its table."""

    def __init__(self, config: roles.TrainedConfig, role: roles.RoleModel, sharded: Sharded) -> None:
        self._adapted = config if isinstance(config, PolicyConfig) and config.lora else None
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        self._sharded, self._head = sharded, role.head
        self._predict, parameters = sharded.predicting(role.predict), role.parameters
        offload = options_of(config, FsdpConfig).offload_moments
        optimizer = ShardedOptimizer(config.optimizer, sharded, list(parameters.values()), offload=offload)
        passes = sharded.passes(role.predict, config.micro_batch_tokens)
        super().__init__(passes, optimizer, ShardedState(role.name, sharded, parameters, optimizer))

    async def step(self, batch: Batch, loss: Loss, check: Callable[[], object]) -> Metrics:
        """Make one optimizer step on the rows of all ranks."""
        begin = self._sharded.begin
        return await step(self.optimizer, self.passes, self._predict, batch, loss, check, begin)

    def published(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's share, in the table's dtype, with about as many bytes as the others'."""
        sharded, adapted = self._sharded, self._adapted
        tensors = published(sharded.whole(), adapted.lora).items() if adapted else sharded.tensors()
        loads = [0] * dist.get_world_size()
        for name, tensor in tensors:
            lightest = loads.index(min(loads))
            loads[lightest] += tensor.numel()
            if lightest == sharded.world.number:
                yield name, tensor.to(self._dtype)

    def shards(self) -> Iterator[Box]:
        """Yield this rank's shards, in float32. Of ranks with the same shard, the first has it."""
        self._sharded.reshard()
        for name, tensor in self._sharded.saved.items():
            if is_first(tensor):
                yield from rectangle(name, tensor, local(tensor))

    def save(self, folder: str) -> None:
        """Write a Hugging Face folder in the dtype of the table, or the adapters like peft, on the first rank."""
        model, world = self.passes.model, self._sharded.world
        tensors = {name: tensor.to(self._dtype) for name, tensor in self._sharded.whole().items()}
        head = {name: gathered(each).cpu() for name, each in self._head.named_parameters()} if self._head else None

        def write() -> None:
            if self._adapted:
                saving.write_adapters(model, folder, tensors, self._adapted)
            else:
                saving.write(model, folder, head, tensors)

        world.first(write)


class FsdpPolicy(roles.CollectiveRole, roles.TrainedPolicy):
    """A model sharded over its ranks, and trained by them together."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config, ShardedTrainable(config, *load_sharded(config, roles.own_rank())))


class FsdpCritic(roles.CollectiveRole, roles.TrainedCritic):
    """A model with a value head, sharded over its ranks and trained by them together."""

    def __init__(self, config: CriticConfig) -> None:
        super().__init__(ShardedTrainable(config, *load_sharded(config, roles.own_rank())))


class FsdpRewardModel(roles.CollectiveRole, roles.TrainedRewardModel):
    """A model with a scoring head, sharded over its ranks and trained by them together."""

    def __init__(self, config: RewardTrainingConfig) -> None:
        role, sharded = load_sharded(config, roles.own_rank())
        super().__init__(role.scorer, ShardedTrainable(config, role, sharded))


class FsdpReference(roles.CollectiveRole, roles.FrozenReference):
    """A sharded model, which computes in the dtype of its table."""

    def __init__(self, config: ReferenceConfig) -> None:
        role, self._sharded = load_sharded(config, roles.own_rank())
        self._dtype = config.dtype
        super().__init__(self._sharded.passes(role.predict, config.micro_batch_tokens))

    async def load(self, weights: Weights) -> None:
        """Copy this rank's shards of the weights in place."""
        take(self._sharded, weights, self._dtype)


class FsdpReward(roles.CollectiveRole, roles.FrozenReward):
    """A sharded model, which computes in the dtype of its table, and in float32 in its head."""

    def __init__(self, config: RewardModelConfig) -> None:
        role, sharded = load_sharded(config, roles.own_rank())
        super().__init__(role.scorer, sharded.passes(role.predict, config.micro_batch_tokens))
