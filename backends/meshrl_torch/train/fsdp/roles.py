"""The roles of the backend `fsdp`: a model sharded over its ranks, which call each method together."""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshrl.data import DEFAULT_ADAPTER
from meshrl.roles import OptimizerConfig, ReferenceConfig, RewardModelConfig, options_of
from meshrl_torch.checkpoint.boxes import Box
from meshrl_torch.model import saving
from meshrl_torch.model.adapted import Adapter
from meshrl_torch.model.loading import opens
from meshrl_torch.options import FsdpConfig
from meshrl_torch.ranks.process_group import own_rank
from meshrl_torch.train import roles
from meshrl_torch.train.fsdp.loading import load_sharded, take
from meshrl_torch.train.fsdp.optimizer import AdapterOptimizer, AdapterState, ShardedOptimizer, ShardedState
from meshrl_torch.train.fsdp.sharded import Sharded, gathered, is_first, local, rectangle
from meshrl_torch.train.trainable import RoleModel, Slot, Trainable, TrainedConfig


class ShardedTrainable(Trainable):
    """A model with sharded float32 parameters and optimizer. It computes in the dtype of its table."""

    def __init__(self, config: TrainedConfig, role: RoleModel, sharded: Sharded) -> None:
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        self._config, self._role, self._sharded = config, role, sharded
        self._predict = sharded.predicting(role.predict)
        whole = {} if role.model.adapters else {DEFAULT_ADAPTER: self._whole(role.parameters)}
        super().__init__(sharded.passes(role.predict, config.micro_batch_tokens), whole)
        self.device = sharded.world.device

    def _whole(self, parameters: Mapping[str, nn.Parameter]) -> Slot:
        offload = options_of(self._config, FsdpConfig).offload_moments
        sharded, optimizer = self._sharded, self._config.optimizer
        made = ShardedOptimizer(optimizer, sharded, list(parameters.values()), offload=offload)
        return Slot(made, ShardedState(self._role.name, sharded, parameters, made))

    def placed(self, adapter: Adapter, optimizer: OptimizerConfig) -> Slot:
        """Return an adapter with its optimizer and its state."""
        world = self._sharded.world
        made = AdapterOptimizer(optimizer, world, adapter)
        return Slot(made, AdapterState(self._role.name, world, adapter.parameters, made), adapter)

    def _begin(self, last: bool) -> None:
        self._sharded.begin(last)

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Yield all tensors, whole."""
        return self._sharded.tensors()

    def published(self, adapter: Adapter | None) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's share, in the table's dtype, with about as many bytes as the others'."""
        loads = [0] * dist.get_world_size()
        for name, tensor in super().published(adapter):
            lightest = loads.index(min(loads))
            loads[lightest] += tensor.numel()
            if lightest == self._sharded.world.number:
                yield name, tensor.detach().to(self._dtype)

    def shards(self) -> Iterator[Box]:
        """Yield this rank's shards, in float32. Of ranks with the same shard, the first has it."""
        self._sharded.reshard()
        for name, tensor in self._sharded.saved.items():
            if is_first(tensor):
                yield from rectangle(name, tensor, local(tensor))

    def save(self, folder: str, adapters: Mapping[str, Adapter]) -> None:
        """Write a Hugging Face folder in the dtype of the table, or the adapters like peft, on the first rank."""
        role, sharded = self._role, self._sharded
        base = opens(self._config.model) if adapters else None
        tensors = {} if base else {name: tensor.to(self._dtype) for name, tensor in sharded.whole().items()}
        if adapters:
            sharded.world.first(lambda: saving.write_adapters(role.model, folder, adapters, base, tensors))
            return
        head = {name: gathered(each).cpu() for name, each in role.head.named_parameters()} if role.head else None
        sharded.world.first(lambda: saving.write(role.model, folder, head, tensors))


class ShardedOverRanks(roles.PlacedTogether):
    """Shards a model over the ranks of a mesh. It computes in the dtype of its table, and in float32 in its head."""

    def _train(self, config: TrainedConfig) -> ShardedTrainable:
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
