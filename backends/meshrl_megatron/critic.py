"""The critic of the Megatron backend: a model with a value head that is split over the ranks."""

import torch

from meshrl.data import Batch, Metrics
from meshrl.losses import Loss, check_predicts, check_sources
from meshrl.mesh import current_rank
from meshrl.objectives import Gae, with_advantages
from meshrl.roles import Critic, CriticConfig, options_of
from meshrl_hf.spread_training import SpreadTraining
from meshrl_hf.value_head import values
from meshrl_megatron import training
from meshrl_megatron.export import save
from meshrl_megatron.model import build
from meshrl_megatron.optimizer import Trained
from meshrl_megatron.options import MegatronConfig
from meshrl_megatron.passes import Pipeline
from meshrl_megatron.state import State


class MegatronCritic(SpreadTraining, Critic):
    """The policy's architecture with a linear head in place of its last layer; a new head gives 0.

    A call runs on all ranks at the same time, from its beginning to its end.
    """

    def __init__(self, config: CriticConfig) -> None:
        rank = current_rank()
        torch.set_num_threads(rank.threads)
        self._budget = config.micro_batch_tokens
        self._model = build(config, options_of(config, MegatronConfig), rank, predicts="values")
        self._world = self._model.world
        self._trained = Trained(config.optimizer, self._model)
        self._pipeline = Pipeline(self._trained.stages, self._model, valued=True)
        self._state = State("critic", self._trained, self._world, body="body")

    async def advantages(self, batch: Batch, gae: Gae) -> Batch:
        """Add `values`, `advantages` and `returns`."""
        pipeline = self._pipeline
        found = values(self._model.words, pipeline, batch, self._budget, self._world, pipeline.split)
        return with_advantages(batch, found, gae)

    async def update(self, batch: Batch, loss: Loss) -> Metrics:
        """One optimizer step on the rows of all ranks.

        DataError, on all ranks, if there is nothing to learn, the loss is a policy's, or log-probs come from elsewhere
        than it says; ModelError if the gradient is not finite. Then no weight has changed.
        """

        def check() -> None:
            check_predicts(loss, "values")
            check_sources(batch, loss)
            self._model.words.check_rows(batch)

        return training.step(self._trained, self._pipeline, batch, loss, self._budget, check, self._model.world)

    async def save(self, folder: str) -> None:
        """Write a Hugging Face folder with a `value_head.safetensors`, whole or not at all."""
        save(self._model, folder)
