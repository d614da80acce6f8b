"""The critic of the torch backend: a whole model with a value head, trained on one rank."""

import asyncio

import torch

from meshrl.actor import current_rank
from meshrl.advantages import Gae
from meshrl.critic import with_advantages
from meshrl.data import Batch
from meshrl.errors import ContractError
from meshrl.losses import Loss, check_predicts, check_sources
from meshrl.metrics import Metrics
from meshrl.role_config import CriticConfig
from meshrl.roles import Critic
from meshrl_hf import checkpoint, training
from meshrl_hf.optimizer import Optimizer
from meshrl_hf.scoring import one_by_one
from meshrl_hf.state import TrainingState
from meshrl_hf.value_head import load_valued, values
from meshrl_hf.writing import Writing


class TorchCritic(Critic):
    """The policy's architecture with a linear head in place of its last layer, all of it trained by AdamW.

    A new head gives 0 for every state.
    """

    def __init__(self, config: CriticConfig) -> None:
        rank = current_rank()
        if rank.size > 1:
            raise ContractError(
                f"TorchCritic trains on one rank, and its mesh has {rank.size}: set run.meshes.{config.mesh}.ranks = 1"
            )
        torch.set_num_threads(rank.threads)
        self._budget = config.micro_batch_tokens
        self._valued = load_valued(config)
        self._optimizer = Optimizer(config.optimizer, list(self._valued.parameters.values()))
        self._updating = asyncio.Lock()
        self._writing = Writing()

    async def advantages(self, batch: Batch, gae: Gae) -> Batch:
        """Add `values`, `advantages` and `returns`."""
        async with self._updating:  # so that no value is of a half-done update
            found = values(self._valued.model, one_by_one(self._valued.predicted), batch, self._budget)
        return with_advantages(batch, found, gae)

    async def update(self, batch: Batch, loss: Loss) -> Metrics:
        """One optimizer step, which may be cancelled between micro-batches and then changes no weight.

        DataError if there is nothing to learn, the loss is a policy's, or log-probs come from elsewhere than it says;
        ModelError if the gradient is not finite.
        """

        def check() -> None:
            check_predicts(loss, "values")
            check_sources(batch, loss)
            self._valued.model.check_rows(batch)

        async with self._updating:  # one at a time: gradients are gathered in the parameters
            return await training.step(self._optimizer, self._valued.predicted, batch, loss, self._budget, check)

    async def save(self, folder: str) -> None:
        """Write a Hugging Face folder with a `value_head.safetensors`, whole or not at all."""
        checkpoint.write(self._valued.model, folder, self._valued.head.state_dict())

    async def checkpoint(self, folder: str, wait: bool = True) -> None:
        """Write the weights, the optimizer's moments and the number of steps, after the updates that were called."""
        async with self._updating:
            self._writing.begin(self._state.copied(folder))
        if wait:
            await self._writing.written()

    async def written(self) -> None:
        """Wait until the last checkpoint is written."""
        await self._writing.written()

    async def restore(self, folder: str) -> None:
        """Take them; ModelError, and nothing taken, where they are of another role or model."""
        async with self._updating:
            self._state.read(folder)

    @property
    def _state(self) -> TrainingState:
        head = self._valued.head.named_parameters(prefix="value_head")
        tensors = {**self._valued.model.tensors(), **dict(head)}
        return TrainingState("critic", tensors, self._valued.parameters, self._optimizer)
