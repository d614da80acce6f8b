"""The backend `torch`: a whole model on one rank, in training or frozen."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from torch import Tensor, nn

from meshrl.algo import Loss
from meshrl.data import Batch, Metrics, Weights
from meshrl.errors import ContractError
from meshrl.roles import CriticConfig, PolicyConfig, ReferenceConfig, RewardModelConfig, RewardTrainingConfig
from meshrl_torch.checkpoint.boxes import Box
from meshrl_torch.checkpoint.state import TrainingState
from meshrl_torch.model import saving as checkpoint
from meshrl_torch.model.loading import load
from meshrl_torch.model.lora import prepare, published, trained
from meshrl_torch.model.network import LanguageModel
from meshrl_torch.model.scoring import Passes, Predict, one_by_one, predicted
from meshrl_torch.model.value_head import load_valued
from meshrl_torch.train import step as training
from meshrl_torch.train.optimizer import Optimizer
from meshrl_torch.train.reward_training import load_judge
from meshrl_torch.train.roles import FrozenReference, FrozenReward, TrainedCritic, TrainedPolicy, TrainedRewardModel
from meshrl_torch.train.trainable import Trainable, own_rank
from meshrl_torch.weights.transfer import import_weights


class OneRank(Trainable):
    """A model whose updates let other calls run between micro-batches. Its optimizer is float32 for any dtype."""

    def __init__(
        self,
        config: PolicyConfig | CriticConfig | RewardTrainingConfig,
        model: LanguageModel,
        predict: Predict,
        parameters: Mapping[str, nn.Parameter],
        role: str,
        head: nn.Linear | None = None,
    ) -> None:
        """`parameters`: the trained ones. `head`: a critic's, which is not part of the model."""
        self._adapted = config if isinstance(config, PolicyConfig) and config.lora else None
        self._predict, self._head = predict, head
        own = {} if head is None else dict(head.named_parameters(prefix="value_head"))
        kept = parameters if self._adapted else {**model.tensors(), **own}
        optimizer = Optimizer(config.optimizer, list(parameters.values()))
        stepped = dict(zip(parameters, optimizer.masters, strict=True))
        masters = {f"float32/{name}": each for name, each in stepped.items() if each is not parameters[name]}
        state = TrainingState(role, {**kept, **masters}, stepped, optimizer)
        super().__init__(
            Passes(model, one_by_one(predict), config.micro_batch_tokens), optimizer, state, asyncio.Lock()
        )

    async def step(self, batch: Batch, loss: Loss, check: Callable[[], object]) -> Metrics:
        """Make one optimizer step. It may be cancelled between micro-batches, and changes no weight then."""
        return await training.step(self.optimizer, self.passes, self._predict, batch, loss, check)

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
            checkpoint.write_adapters(model, folder, model.tensors(), self._adapted)
        else:
            checkpoint.write(model, folder, self._head.state_dict() if self._head else None)


def check_alone(role: str, mesh: str) -> None:
    """Raise ContractError if the mesh of this name has several ranks. Sets torch's number of threads."""
    rank = own_rank()
    if rank.size > 1:
        raise ContractError(f"{role} trains on one rank, but its mesh has {rank.size}: set run.meshes.{mesh}.ranks = 1")


class TorchPolicy(TrainedPolicy):
    """A whole model, trained on one rank."""

    def __init__(self, config: PolicyConfig) -> None:
        check_alone("TorchPolicy", config.mesh)
        model = load(config)
        prepare(model, config)
        super().__init__(
            config, OneRank(config, model, partial(predicted, model, follows=True), trained(model), "policy")
        )


class TorchCritic(TrainedCritic):
    """A whole model with a value head, trained on one rank."""

    def __init__(self, config: CriticConfig) -> None:
        check_alone("TorchCritic", config.mesh)
        valued = load_valued(config)
        super().__init__(OneRank(config, valued.model, valued.predicted, valued.parameters, "critic", valued.head))
        self._valued = valued


class TorchRewardModel(TrainedRewardModel):
    """A whole model with a scoring head, trained on one rank."""

    def __init__(self, config: RewardTrainingConfig) -> None:
        check_alone("TorchRewardModel", config.mesh)
        judge = load_judge(config)
        trainable = OneRank(config, judge.model, judge.predicted, trained(judge.model), "reward model")
        super().__init__(judge, trainable)


class TorchReference(FrozenReference):
    """A whole model on each rank."""

    def __init__(self, config: ReferenceConfig) -> None:
        own_rank()
        model = load(config)
        super().__init__(Passes(model, one_by_one(partial(predicted, model)), config.micro_batch_tokens))

    async def load(self, weights: Weights) -> None:
        """Copy the weights in place."""
        import_weights(self._passes.model.tensors(), weights)


class TorchReward(FrozenReward):
    """A whole model on each rank."""

    def __init__(self, config: RewardModelConfig) -> None:
        own_rank()
        judge = load_judge(config)
        super().__init__(judge, Passes(judge.model, one_by_one(judge.predicted), config.micro_batch_tokens))
