"""The reference of the torch backend: a frozen model."""

from functools import partial

import torch

from meshrl.data import Batch, Source
from meshrl.mesh import current_rank
from meshrl.roles import Reference, ReferenceConfig
from meshrl.weights import Weights
from meshrl_hf.loading import load
from meshrl_hf.scoring import logprobs, one_by_one, predicted
from meshrl_hf.transfer import import_weights


class TorchReference(Reference):
    """A whole model on each rank."""

    def __init__(self, config: ReferenceConfig) -> None:
        torch.set_num_threads(current_rank().threads)
        self._config = config
        self._model = load(config)

    async def logprobs(self, batch: Batch) -> Batch:
        """Add `reference_logprobs`."""
        predict = one_by_one(partial(predicted, self._model))
        values = logprobs(self._model, predict, batch, self._config.micro_batch_tokens, Source("reference"))
        return batch.assign(reference_logprobs=values)

    async def load(self, weights: Weights) -> None:
        """Copy the weights in place."""
        import_weights(self._model.tensors(), weights)
