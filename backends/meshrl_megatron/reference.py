"""The reference of the Megatron backend."""

from meshrl.roles import ReferenceConfig, options_of
from meshrl.weights import Weights
from meshrl_hf.roles import FrozenReference, Spread
from meshrl_hf.trainable import own_rank
from meshrl_hf.transfer import Form, check_weights, copy_into
from meshrl_megatron.model import build
from meshrl_megatron.options import MegatronConfig
from meshrl_megatron.passes import Pipeline


class MegatronReference(Spread, FrozenReference):
    """A model in the dtype of its table, split along its mesh's axes."""

    def __init__(self, config: ReferenceConfig) -> None:
        self._dtype = config.dtype
        self._model = build(config, options_of(config, MegatronConfig), own_rank())
        super().__init__(Pipeline(self._model.stages, self._model, valued=False).passes(config.micro_batch_tokens))

    async def load(self, weights: Weights) -> None:
        """Copy this rank's parts of the weights in place."""
        boxes = [box for held in self._model.held for box in self._model.boxes(held, held.parameter.detach())]
        told = self.agree(lambda: {box.name: box.size for box in boxes})
        forms = {name: Form(self._dtype, size) for each in told for name, size in each.items()}
        self.agree(lambda: check_weights(forms, weights))
        for box in boxes:
            spans = tuple(slice(start, end) for start, end in box.ranges)
            copy_into(box.tensor, weights.tensors[box.name][spans])
