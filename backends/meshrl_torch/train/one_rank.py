"""The backend `torch`: a whole model on one rank, in training or frozen."""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import Tensor, nn

from meshrl.data import DEFAULT_ADAPTER
from meshrl.errors import ContractError
from meshrl.roles import ModelConfig, OptimizerConfig, ReferenceConfig, RewardModelConfig
from meshrl_torch.checkpoint.boxes import Box
from meshrl_torch.checkpoint.state import TrainingState
from meshrl_torch.model import saving
from meshrl_torch.model.adapted import Adapter
from meshrl_torch.model.heads import kind_of
from meshrl_torch.model.loading import load, opens
from meshrl_torch.model.scoring import Passes, one_by_one
from meshrl_torch.ranks.process_group import SINGLE_RANK, own_rank
from meshrl_torch.train import roles
from meshrl_torch.train.optimizer import Optimizer
from meshrl_torch.train.trainable import RoleModel, Slot, Trainable, TrainedConfig, role_model
from meshrl_torch.weights.transfer import import_weights


class OneRankTrainable(Trainable):
    """A model whose updates let other calls run between micro-batches. Its optimizer is float32 for any dtype."""

    def __init__(self, config: TrainedConfig, role: RoleModel) -> None:
        self._config, self._role, self._predict = config, role, role.predict
        whole = {} if role.model.adapters else {DEFAULT_ADAPTER: self._slot(role.parameters, config.optimizer)}
        super().__init__(_passes(config, role), whole, asyncio.Lock())

    def placed(self, adapter: Adapter, optimizer: OptimizerConfig) -> Slot:
        """Return an adapter with its optimizer and its state."""
        return replace(self._slot(adapter.parameters, optimizer), adapter=adapter)

    def _slot(self, parameters: Mapping[str, nn.Parameter], config: OptimizerConfig) -> Slot:
        optimizer = Optimizer(config, list(parameters.values()))
        return Slot(optimizer, TrainingState(self._role.name, SINGLE_RANK, parameters, optimizer))

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Return all tensors."""
        return self._role.model.tensors().items()

    def shards(self) -> Iterable[Box]:
        """Return all tensors."""
        for name, tensor in self.tensors():
            yield Box(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor)

    def save(self, folder: str, adapters: Mapping[str, Adapter]) -> None:
        """Write a Hugging Face folder, or the adapters like peft, completely or not at all."""
        role = self._role
        if adapters:
            saving.write_adapters(role.model, folder, adapters, opens(self._config.model), role.model.tensors())
        else:
            tensors = role.model.tensors() if role.model.adapters else None
            saving.write(role.model, folder, role.head.state_dict() if role.head else None, tensors)


def _load(config: ModelConfig) -> RoleModel:
    return role_model(config, load(config, kind_of(config)))


def _passes(config: TrainedConfig | ReferenceConfig | RewardModelConfig, role: RoleModel) -> Passes:
    return Passes(role.model, one_by_one(role.predict), config.micro_batch_tokens, split=role.model.split)


class OneRank(roles.Placed):
    """Places a whole model on each rank. A trained one has only one rank."""

    def _train(self, config: TrainedConfig) -> OneRankTrainable:
        """Load the model. ContractError if the mesh has several ranks."""
        if (size := own_rank().size) > 1:
            raise ContractError(
                f"{type(self).__name__} trains on one rank, but its mesh has {size}: set "
                f"run.meshes.{config.mesh}.ranks = 1"
            )
        return OneRankTrainable(config, _load(config))

    def _freeze(self, config: ReferenceConfig | RewardModelConfig) -> roles.Frozen:
        own_rank()
        role = _load(config)
        return roles.Frozen(_passes(config, role), lambda weights: import_weights(role.model.tensors(), weights))


class TorchPolicy(OneRank, roles.TrainedPolicy):
    """A whole model, trained on one rank."""


class TorchCritic(OneRank, roles.TrainedCritic):
    """A whole model with a value head, trained on one rank."""


class TorchRewardModel(OneRank, roles.TrainedRewardModel):
    """A whole model with a scoring head, trained on one rank."""


class TorchReference(OneRank, roles.FrozenReference):
    """A whole model on each rank."""


class TorchReward(OneRank, roles.FrozenReward):
    """A whole model on each rank."""
