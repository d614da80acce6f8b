"""The reference of the torch backend."""

from functools import partial

from meshrl.roles import ReferenceConfig
from meshrl.weights import Weights
from meshrl_hf.loading import load
from meshrl_hf.roles import FrozenReference
from meshrl_hf.scoring import Passes, one_by_one, predicted
from meshrl_hf.trainable import own_rank
from meshrl_hf.transfer import import_weights


class TorchReference(FrozenReference):
    """A whole model on each rank."""

    def __init__(self, config: ReferenceConfig) -> None:
        own_rank()
        model = load(config)
        super().__init__(Passes(model, one_by_one(partial(predicted, model)), config.micro_batch_tokens))

    async def load(self, weights: Weights) -> None:
        """Copy the weights in place."""
        import_weights(self._passes.model.tensors(), weights)
