"""A whole model in training, on one rank."""

import asyncio
from collections.abc import Callable, Iterable, Mapping

from torch import Tensor, nn

from meshrl.data import Batch, Metrics
from meshrl.errors import ContractError
from meshrl.losses import Loss
from meshrl.roles import CriticConfig, PolicyConfig, RewardTrainingConfig
from meshrl_hf import checkpoint, training
from meshrl_hf.boxes import Box
from meshrl_hf.lora import published
from meshrl_hf.model import LanguageModel
from meshrl_hf.optimizer import Optimizer
from meshrl_hf.scoring import Passes, Predict, one_by_one
from meshrl_hf.state import TrainingState
from meshrl_hf.trainable import Trainable, own_rank


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
