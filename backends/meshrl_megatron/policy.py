"""The policy of the Megatron backend: packed training of a model that is split over the ranks."""

import torch

from meshrl.data import Batch, Metrics, Source
from meshrl.errors import ConfigError
from meshrl.losses import Loss, check_predicts, check_sources
from meshrl.mesh import current_rank
from meshrl.roles import Policy, PolicyConfig, options_of
from meshrl.weights import Weights, WeightSource
from meshrl_hf.encoding import encoded
from meshrl_hf.probe import probe
from meshrl_hf.scoring import check_readable, logprobs
from meshrl_hf.spread_training import SpreadTraining
from meshrl_hf.transfer import arrays
from meshrl_megatron import training
from meshrl_megatron.export import save
from meshrl_megatron.model import build
from meshrl_megatron.optimizer import Trained
from meshrl_megatron.options import MegatronConfig
from meshrl_megatron.passes import Pipeline
from meshrl_megatron.state import State


class MegatronPolicy(SpreadTraining, Policy):
    """A model in the dtype of its table, whose optimizer keeps float32; split as its mesh's axes say.

    A call runs on all ranks at the same time, from its beginning to its end.
    """

    def __init__(self, config: PolicyConfig) -> None:
        rank = current_rank()
        torch.set_num_threads(rank.threads)
        if config.lora is not None:
            raise ConfigError("the backend 'megatron' has no adapters: take backend = \"fsdp\", or leave lora out")
        self._config = config
        self._model = build(config, options_of(config, MegatronConfig), rank, recompute=config.activation_checkpointing)
        self._world = self._model.world
        self._trained = Trained(config.optimizer, self._model)
        self._pipeline = Pipeline(self._trained.stages, self._model, valued=False)
        self._sender = WeightSource(changes=config.delta_sync)
        self._state = State("policy", self._trained, self._world)

    async def encode(self, batch: Batch) -> Batch:
        """Add `tokens` and `loss_mask` from `prompt` and `completion`."""
        return encoded(self._model.words, batch)

    async def update(self, batch: Batch, loss: Loss) -> Metrics:
        """One optimizer step on the rows of all ranks.

        DataError, on all ranks, if there is nothing to learn, the loss is a critic's, or log-probs come from elsewhere
        than it says or from later weights; ModelError if the gradient is not finite. Then no weight has changed.
        """

        def check() -> None:
            check_predicts(loss, "logprobs")
            check_sources(batch, loss, self._trained.steps)
            check_readable(self._model.words, batch)

        budget = self._config.micro_batch_tokens
        return training.step(self._trained, self._pipeline, batch, loss, budget, check, self._model.world)

    async def logprobs(self, batch: Batch) -> Batch:
        """Add `logprobs`, of the version after the updates that were called before."""
        source, budget = Source.trainer(self._trained.steps), self._config.micro_batch_tokens
        words, pipeline = self._model.words, self._pipeline
        return batch.assign(logprobs=logprobs(words, pipeline, batch, budget, source, self._world, pipeline.split))

    async def weights(self) -> Weights:
        """This rank's part of the weights, whole tensors in the table's dtype."""
        version = self._trained.steps
        asked = probe(self._model.words, self._pipeline, version, self._config.micro_batch_tokens, self._world)
        return self._sender.weights(version, arrays(self._model.tensors()), asked)

    async def save(self, folder: str) -> None:
        """Write a Hugging Face folder in the dtype of the table, whole or not at all."""
        save(self._model, folder)
