"""The reward of the Megatron backend: a frozen model that judges and is split over the ranks."""

import torch

from meshrl.data import Batch
from meshrl.mesh import current_rank
from meshrl.roles import Reward, RewardModelConfig, options_of
from meshrl_hf.ranks import Spread
from meshrl_hf.reward_head import ScoreModel
from meshrl_megatron.model import build
from meshrl_megatron.options import MegatronConfig
from meshrl_megatron.passes import Pipeline


class MegatronReward(Spread, Reward):
    """A sequence classifier with one label in the dtype of its table, split as its mesh's axes say."""

    def __init__(self, config: RewardModelConfig) -> None:
        rank = current_rank()
        torch.set_num_threads(rank.threads)
        self._budget = config.micro_batch_tokens
        self._model = build(config, options_of(config, MegatronConfig), rank, predicts="scores")
        self._world = self._model.world
        self._judge = ScoreModel(self._model.words, config)
        self._pipeline = Pipeline(self._model.stages, self._model, valued=True)

    async def score(self, batch: Batch) -> Batch:
        """Add `rewards` and `reward_error`; a completion that was cut short is judged as one that ends there."""
        pipeline = self._pipeline
        return self._judge.score(pipeline, batch, self._budget, self._world, pipeline.split)
