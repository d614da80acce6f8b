"""The backend `torch`: a whole model on one rank, in training or frozen."""

import asyncio
from collections.abc import Callable, Iterable

from torch import Tensor

from meshrl.algo import Loss
from meshrl.data import Batch, Metrics, Weights
from meshrl.errors import ContractError
from meshrl.roles import (
    CriticConfig,
    ModelConfig,
    PolicyConfig,
    ReferenceConfig,
    RewardModelConfig,
    RewardTrainingConfig,
)
from meshrl_torch.checkpoint.boxes import Box
from meshrl_torch.checkpoint.state import TrainingState
from meshrl_torch.model import saving
from meshrl_torch.model.heads import kind_of
from meshrl_torch.model.loading import load
from meshrl_torch.model.lora import published
from meshrl_torch.model.scoring import Passes, one_by_one
from meshrl_torch.train import roles
from meshrl_torch.train.optimizer import Optimizer
from meshrl_torch.train.step import step
from meshrl_torch.weights.transfer import import_weights


class OneRankTrainable(roles.Trainable):
    """A model whose updates let other calls run between micro-batches. Its optimizer is float32 for any dtype."""

    def __init__(self, config: roles.TrainedConfig, role: roles.RoleModel) -> None:
        model, parameters, head = role.model, role.parameters, role.head
        self._adapted = config if isinstance(config, PolicyConfig) and config.lora else None
        self._predict, self._head = role.predict, head
        own = {} if head is None else dict(head.named_parameters(prefix="value_head"))
        tensors = parameters if self._adapted else {**model.tensors(), **own}
        optimizer = Optimizer(config.optimizer, list(parameters.values()))
        stepped = dict(zip(parameters, optimizer.masters, strict=True))
        masters = {f"float32/{name}": each for name, each in stepped.items() if each is not parameters[name]}
        state = TrainingState(role.name, {**tensors, **masters}, stepped, optimizer)
        super().__init__(
            Passes(model, one_by_one(role.predict), config.micro_batch_tokens), optimizer, state, asyncio.Lock()
        )

    async def step(self, batch: Batch, loss: Loss, check: Callable[[], object]) -> Metrics:
        """Make one optimizer step. It may be cancelled between micro-batches, and changes no weight then."""
        return await step(self.optimizer, self.passes, self._predict, batch, loss, check)

    def published(self) -> Iterable[tuple[str, Tensor]]:
        """Return all tensors, or those that `lora.sync` selects."""
        return published(self.passes.model.tensors(), self._adapted.lora if self._adapted else None).items()

    def shards(self) -> Iterable[Box]:
        """Return all tensors."""
        for name, tensor in self.published():
            yield Box(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor)

    def save(self, folder: str) -> None:
        """Write a Hugging Face folder, or the adapters like peft, completely or not at all."""
        model = self.passes.model
        if self._adapted:
            saving.write_adapters(model, folder, model.tensors(), self._adapted)
        else:
            saving.write(model, folder, self._head.state_dict() if self._head else None)


def _load(config: ModelConfig) -> roles.RoleModel:
    return roles.role_model(config, load(config, kind_of(config)))


def _trainable(role: str, config: roles.TrainedConfig) -> tuple[OneRankTrainable, roles.RoleModel]:
    """Load a trained role's model. ContractError if its mesh has several ranks."""
    rank = roles.own_rank()
    if rank.size > 1:
        raise ContractError(
            f"{role} trains on one rank, but its mesh has {rank.size}: set run.meshes.{config.mesh}.ranks = 1"
        )
    model = _load(config)
    return OneRankTrainable(config, model), model


class TorchPolicy(roles.TrainedPolicy):
    """A whole model, trained on one rank."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config, _trainable("TorchPolicy", config)[0])


class TorchCritic(roles.TrainedCritic):
    """A whole model with a value head, trained on one rank."""

    def __init__(self, config: CriticConfig) -> None:
        super().__init__(_trainable("TorchCritic", config)[0])


class TorchRewardModel(roles.TrainedRewardModel):
    """A whole model with a scoring head, trained on one rank."""

    def __init__(self, config: RewardTrainingConfig) -> None:
        trainable, role = _trainable("TorchRewardModel", config)
        super().__init__(role.scorer, trainable)


class TorchReference(roles.FrozenReference):
    """A whole model on each rank."""

    def __init__(self, config: ReferenceConfig) -> None:
        roles.own_rank()
        role = _load(config)
        super().__init__(Passes(role.model, one_by_one(role.predict), config.micro_batch_tokens))

    async def load(self, weights: Weights) -> None:
        """Copy the weights in place."""
        import_weights(self._passes.model.tensors(), weights)


class TorchReward(roles.FrozenReward):
    """A whole model on each rank."""

    def __init__(self, config: RewardModelConfig) -> None:
        roles.own_rank()
        role = _load(config)
        super().__init__(role.scorer, Passes(role.model, one_by_one(role.predict), config.micro_batch_tokens))
