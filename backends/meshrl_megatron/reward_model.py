"""The reward model of the Megatron backend: a model with a head that scores, trained and split over the ranks."""

import torch

from meshrl.data import Batch, Metrics
from meshrl.losses import Loss
from meshrl.mesh import current_rank
from meshrl.roles import RewardModel, RewardTrainingConfig, options_of
from meshrl_hf import reward_training
from meshrl_hf.reward_head import ScoreModel
from meshrl_hf.spread_training import SpreadTraining
from meshrl_megatron import training
from meshrl_megatron.export import save
from meshrl_megatron.model import build
from meshrl_megatron.optimizer import Trained
from meshrl_megatron.options import MegatronConfig
from meshrl_megatron.passes import Pipeline
from meshrl_megatron.state import State


class MegatronRewardModel(SpreadTraining, RewardModel):
    """A sequence classifier with one label, split as its mesh's axes say; a new head gives 0 for every text.

    A call runs on all ranks at the same time, from its beginning to its end.
    """

    def __init__(self, config: RewardTrainingConfig) -> None:
        rank = current_rank()
        torch.set_num_threads(rank.threads)
        self._budget = config.micro_batch_tokens
        self._model = build(config, options_of(config, MegatronConfig), rank, predicts="scores")
        self._world = self._model.world
        self._judge = ScoreModel(self._model.words, config)
        self._trained = Trained(config.optimizer, self._model)
        self._pipeline = Pipeline(self._trained.stages, self._model, valued=True)
        self._state = State("reward model", self._trained, self._world)

    async def encode(self, batch: Batch) -> Batch:
        """Add `tokens` and `loss_mask`."""
        return reward_training.encoded(self._judge, batch)

    async def score(self, batch: Batch) -> Batch:
        """Add `rewards` and `reward_error`; a completion that was cut short is judged as one that ends there."""
        pipeline = self._pipeline
        return self._judge.score(pipeline, batch, self._budget, self._world, pipeline.split)

    async def token_scores(self, batch: Batch) -> Batch:
        """Add `token_scores`."""
        pipeline = self._pipeline
        return reward_training.token_scores(self._judge, pipeline, batch, self._budget, self._world, pipeline.split)

    async def update(self, batch: Batch, loss: Loss) -> Metrics:
        """One optimizer step on the rows of all ranks.

        DataError, on all ranks, if there is nothing to learn or the loss is not of scores; ModelError if the gradient
        is not finite. Then no weight has changed.
        """
        world = self._model.world
        ready = reward_training.prepared(self._judge, batch, loss, world)
        told = training.step(self._trained, self._pipeline, ready, loss, self._budget, lambda: None, world)
        return reward_training.counted(told, batch, world)

    async def save(self, folder: str) -> None:
        """Write a Hugging Face folder of a sequence classifier, whole or not at all."""
        save(self._model, folder)
