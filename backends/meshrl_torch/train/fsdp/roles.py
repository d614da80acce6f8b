"""The roles of the backend `fsdp`: a model sharded over its ranks, which call each method together."""

from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from meshrl.roles import ReferenceConfig, RewardModelConfig, options_of
from meshrl_torch.checkpoint.boxes import Box
from meshrl_torch.model import saving
from meshrl_torch.options import FsdpConfig
from meshrl_torch.ranks.process_group import own_rank
from meshrl_torch.train import roles
from meshrl_torch.train.fsdp.loading import load_sharded, take
from meshrl_torch.train.fsdp.optimizer import ShardedOptimizer, ShardedState
from meshrl_torch.train.fsdp.sharded import Sharded, gathered, is_first, local, rectangle
from meshrl_torch.wire.wide import dtype_in


class ShardedTrainable(roles.Trainable):
    """A model with sharded float32 parameters and optimizer. It computes in the dtype of its table."""

    def __init__(self, config: roles.TrainedConfig, role: roles.RoleModel, sharded: Sharded) -> None:
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        self._role, self._sharded, parameters = role, sharded, role.parameters
        offload = options_of(config, FsdpConfig).offload_moments
        optimizer = ShardedOptimizer(config.optimizer, sharded, list(parameters.values()), offload=offload)
        state = ShardedState(role.name, sharded, parameters, optimizer)
        self._predict = sharded.predicting(role.predict)
        super().__init__(sharded.passes(role.predict, config.micro_batch_tokens), optimizer, state)

    def _begin(self, last: bool) -> None:
        self._sharded.begin(last)

    def published(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's share, in the dtypes of the table's model, with about as many bytes as the others'."""
        sharded, role = self._sharded, self._role
        tensors = role.published(sharded.whole()).items() if role.adapted else sharded.tensors()
        loads = [0] * dist.get_world_size()
        for name, tensor in tensors:
            lightest = loads.index(min(loads))
            loads[lightest] += tensor.numel()
            if lightest == sharded.world.number:
                yield name, self._as_sent(name, tensor)

    def _as_sent(self, name: str, tensor: Tensor) -> Tensor:
        return tensor.to(dtype_in(self._role.model.network, name, self._dtype))

    def shards(self) -> Iterator[Box]:
        """Yield this rank's shards, in float32. Of ranks with the same shard, the first has it."""
        self._sharded.reshard()
        for name, tensor in self._sharded.saved.items():
            if is_first(tensor):
                yield from rectangle(name, tensor, local(tensor))

    def save(self, folder: str) -> None:
        """Write a Hugging Face folder in the dtype of the table, or the adapters like peft, on the first rank."""
        role, sharded = self._role, self._sharded
        tensors = {name: self._as_sent(name, tensor) for name, tensor in sharded.whole().items()}
        head = {name: gathered(each).cpu() for name, each in role.head.named_parameters()} if role.head else None
        sharded.world.first(lambda: saving.write(role.model, folder, head, tensors, role.adapted))


class ShardedOverRanks(roles.PlacedTogether):
    """Shards a model over the ranks of a mesh. It computes in the dtype of its table, and in float32 in its head."""

    def _train(self, config: roles.TrainedConfig) -> ShardedTrainable:
        return ShardedTrainable(config, *load_sharded(config, own_rank()))

    def _freeze(self, config: ReferenceConfig | RewardModelConfig) -> roles.Frozen:
        role, sharded = load_sharded(config, own_rank())
        passes = sharded.passes(role.predict, config.micro_batch_tokens)
        return roles.Frozen(passes, partial(take, sharded, dtype=config.dtype))


class FsdpPolicy(ShardedOverRanks, roles.TrainedPolicy):
    """A model sharded over its ranks, and trained by them together."""


class FsdpCritic(ShardedOverRanks, roles.TrainedCritic):
    """A model with a value head, sharded over its ranks and trained by them together."""


class FsdpRewardModel(ShardedOverRanks, roles.TrainedRewardModel):
    """A model with a scoring head, sharded over its ranks and trained by them together."""


class FsdpReference(ShardedOverRanks, roles.FrozenReference):
    """A sharded model."""


class FsdpReward(ShardedOverRanks, roles.FrozenReward):
    """A sharded model that scores texts."""
