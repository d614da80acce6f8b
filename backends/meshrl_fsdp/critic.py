"""The critic of the FSDP2 backend: a model with a value head that is spread over the ranks."""

from functools import partial

import torch
from torch import Tensor

from meshrl.data import Batch, Metrics
from meshrl.losses import Loss, check_predicts, check_sources
from meshrl.mesh import current_rank
from meshrl.objectives import Gae, with_advantages
from meshrl.roles import Critic, CriticConfig, options_of
from meshrl_fsdp.loading import load_sharded_valued
from meshrl_fsdp.optimizer import ShardedOptimizer
from meshrl_fsdp.options import FsdpConfig
from meshrl_fsdp.sharded import gathered
from meshrl_fsdp.state import ShardedState
from meshrl_hf import checkpoint, training
from meshrl_hf.packing import MicroBatch
from meshrl_hf.scoring import one_by_one
from meshrl_hf.spread_training import SpreadTraining
from meshrl_hf.value_head import values


class FsdpCritic(SpreadTraining, Critic):
    """The policy's architecture with a linear head in place of its last layer, sharded; a new head gives 0.

    A call runs on all ranks at the same time, from its beginning to its end.
    """

    def __init__(self, config: CriticConfig) -> None:
        rank = current_rank()
        torch.set_num_threads(rank.threads)
        self._budget = config.micro_batch_tokens
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        self._valued, self._sharded = load_sharded_valued(config, options_of(config, FsdpConfig), rank)
        self._world = self._sharded.world
        self._optimizer = ShardedOptimizer(config.optimizer, self._sharded, list(self._valued.parameters.values()))
        self._state = ShardedState("critic", self._sharded, self._valued.parameters, self._optimizer)

    async def advantages(self, batch: Batch, gae: Gae) -> Batch:
        """Add `values`, `advantages` and `returns`."""
        predict = one_by_one(self._predicted)
        found = values(self._valued.model, predict, batch, self._budget, self._world)
        return with_advantages(batch, found, gae)

    async def update(self, batch: Batch, loss: Loss) -> Metrics:
        """One optimizer step on the rows of all ranks.

        DataError, on all ranks, if there is nothing to learn, the loss is a policy's, or log-probs come from elsewhere
        than it says; ModelError if the gradient is not finite. Then no weight has changed.
        """

        def check() -> None:
            check_predicts(loss, "values")
            check_sources(batch, loss)
            self._valued.model.check_rows(batch)

        return await training.step(self._optimizer, self._predicted, batch, loss, self._budget, check, self._world)

    async def save(self, folder: str) -> None:
        """Write a Hugging Face folder with a `value_head.safetensors`, whole or not at all; the first rank does."""
        whole = {name: tensor.to(self._dtype) for name, tensor in self._sharded.whole().items()}
        head = {name: gathered(parameter).cpu() for name, parameter in self._valued.head.named_parameters()}
        self._world.first(lambda: checkpoint.write(self._valued.model, folder, head, whole))

    def _predicted(self, batch: Batch, micro: MicroBatch) -> Tensor:
        return self._sharded(partial(self._valued.predicted, batch, micro))
