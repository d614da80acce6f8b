"""The reference of the FSDP2 backend: a frozen model that is spread over the ranks."""

from functools import partial

import torch
from torch import Tensor

from meshrl.data import Batch, Source
from meshrl.mesh import current_rank
from meshrl.roles import Reference, ReferenceConfig, options_of
from meshrl.weights import Weights
from meshrl_fsdp.loading import load_sharded
from meshrl_fsdp.options import FsdpConfig
from meshrl_fsdp.transfer import take
from meshrl_hf.packing import MicroBatch
from meshrl_hf.ranks import Spread
from meshrl_hf.scoring import logprobs, one_by_one, predicted


class FsdpReference(Spread, Reference):
    """A model whose parameters are sharded; it computes in the dtype of its table."""

    def __init__(self, config: ReferenceConfig) -> None:
        rank = current_rank()
        torch.set_num_threads(rank.threads)
        self._config = config
        self._sharded = load_sharded(config, options_of(config, FsdpConfig), rank)
        self._world = self._sharded.world

    async def logprobs(self, batch: Batch) -> Batch:
        """Add `reference_logprobs`."""
        model, budget = self._sharded.model, self._config.micro_batch_tokens
        values = logprobs(model, one_by_one(self._predicted), batch, budget, Source("reference"), self._world)
        return batch.assign(reference_logprobs=values)

    async def load(self, weights: Weights) -> None:
        """Copy this rank's shards of the weights in place."""
        take(self._sharded, weights, self._config.dtype)

    def _predicted(self, batch: Batch, micro: MicroBatch) -> Tensor:
        return self._sharded(partial(predicted, self._sharded.model, batch, micro))
