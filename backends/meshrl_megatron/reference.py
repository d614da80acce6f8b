"""The reference of the Megatron backend: a frozen model that is split over the ranks."""

import torch

from meshrl.data import Batch, Source
from meshrl.mesh import current_rank
from meshrl.roles import Reference, ReferenceConfig, options_of
from meshrl.weights import Weights
from meshrl_hf.ranks import Spread
from meshrl_hf.scoring import logprobs
from meshrl_hf.transfer import Form, check_weights, copy_into
from meshrl_megatron.model import build
from meshrl_megatron.options import MegatronConfig
from meshrl_megatron.passes import Pipeline


class MegatronReference(Spread, Reference):
    """A model in the dtype of its table, split as its mesh's axes say."""

    def __init__(self, config: ReferenceConfig) -> None:
        rank = current_rank()
        torch.set_num_threads(rank.threads)
        self._budget, self._dtype = config.micro_batch_tokens, config.dtype
        self._model = build(config, options_of(config, MegatronConfig), rank)
        self._world = self._model.world
        self._pipeline = Pipeline(self._model.stages, self._model, valued=False)

    async def logprobs(self, batch: Batch) -> Batch:
        """Add `reference_logprobs`."""
        source, pipeline = Source("reference"), self._pipeline
        found = logprobs(self._model.words, pipeline, batch, self._budget, source, self._world, pipeline.split)
        return batch.assign(reference_logprobs=found)

    async def load(self, weights: Weights) -> None:
        """Copy this rank's parts of the weights in place."""
        boxes = [box for held in self._model.held for box in self._model.boxes(held, held.parameter.detach())]
        told = self._world.agree(lambda: {box.name: box.size for box in boxes})
        forms = {name: Form(self._dtype, size) for each in told for name, size in each.items()}
        self._world.agree(lambda: check_weights(forms, weights))
        for box in boxes:
            spans = tuple(slice(start, end) for start, end in box.ranges)
            copy_into(box.tensor, weights.tensors[box.name][spans])
