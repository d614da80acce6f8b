"""The reference of the FSDP2 backend."""

from functools import partial

from meshrl.roles import ReferenceConfig
from meshrl.weights import Weights
from meshrl_fsdp.loading import load_sharded
from meshrl_fsdp.transfer import take
from meshrl_hf.roles import FrozenReference, Spread
from meshrl_hf.scoring import predicted
from meshrl_hf.trainable import own_rank


class FsdpReference(Spread, FrozenReference):
    """A sharded model, which computes in the dtype of its table."""

    def __init__(self, config: ReferenceConfig) -> None:
        self._sharded, self._dtype = load_sharded(config, own_rank()), config.dtype
        predict = partial(predicted, self._sharded.model)
        super().__init__(self._sharded.passes(predict, config.micro_batch_tokens))

    async def load(self, weights: Weights) -> None:
        """Copy this rank's shards of the weights in place."""
        take(self._sharded, weights, self._dtype)
