"""The reward model of the FSDP2 backend: a model with a head that scores, trained and spread over the ranks."""

from functools import partial

import torch
from torch import Tensor

from meshrl.data import Batch, Metrics
from meshrl.losses import Loss
from meshrl.mesh import current_rank
from meshrl.roles import RewardModel, RewardTrainingConfig
from meshrl_fsdp.loading import load_sharded_learner
from meshrl_fsdp.optimizer import ShardedOptimizer
from meshrl_fsdp.state import ShardedState
from meshrl_hf import checkpoint, reward_training
from meshrl_hf.packing import MicroBatch
from meshrl_hf.scoring import one_by_one
from meshrl_hf.spread_training import SpreadTraining


class FsdpRewardModel(SpreadTraining, RewardModel):
    """A sequence classifier with one label, sharded; a new head gives 0 for every text.

    A call runs on all ranks at the same time, from its beginning to its end.
    """

    def __init__(self, config: RewardTrainingConfig) -> None:
        rank = current_rank()
        torch.set_num_threads(rank.threads)
        self._budget = config.micro_batch_tokens
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        self._judge, self._sharded = load_sharded_learner(config, rank)
        self._world = self._sharded.world
        parameters = self._sharded.parameters
        self._optimizer = ShardedOptimizer(config.optimizer, self._sharded, list(parameters.values()))
        self._state = ShardedState("reward model", self._sharded, parameters, self._optimizer)

    async def encode(self, batch: Batch) -> Batch:
        """Add `tokens` and `loss_mask`."""
        return reward_training.encoded(self._judge, batch)

    async def score(self, batch: Batch) -> Batch:
        """Add `rewards` and `reward_error`; a completion that was cut short is judged as one that ends there."""
        return self._judge.score(one_by_one(self._predicted), batch, self._budget, self._world)

    async def token_scores(self, batch: Batch) -> Batch:
        """Add `token_scores`."""
        predict = one_by_one(self._predicted)
        return reward_training.token_scores(self._judge, predict, batch, self._budget, self._world)

    async def update(self, batch: Batch, loss: Loss) -> Metrics:
        """One optimizer step on the rows of all ranks.

        DataError, on all ranks, if there is nothing to learn or the loss is not of scores; ModelError if the gradient
        is not finite. Then no weight has changed.
        """
        judge, optimizer = self._judge, self._optimizer
        return await reward_training.step(judge, optimizer, self._predicted, batch, loss, self._budget, self._world)

    async def save(self, folder: str) -> None:
        """Write a Hugging Face folder of a sequence classifier, whole or not at all; the first rank does."""
        whole = {name: tensor.to(self._dtype) for name, tensor in self._sharded.whole().items()}
        self._world.first(lambda: checkpoint.write(self._judge.model, folder, tensors=whole))

    def _predicted(self, batch: Batch, micro: MicroBatch) -> Tensor:
        return self._sharded(partial(self._judge.predicted, batch, micro))
