"""The roles of the backend `megatron`: a model split over its ranks, which call each method together."""

import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from safetensors.torch import load_file, save_file
from torch import Tensor

from meshrl.algo import Predicts
from meshrl.data import DEFAULT_ADAPTER, Batch, Weights, masked_spans
from meshrl.errors import ConfigError, DataError
from meshrl.roles import PolicyConfig, ReferenceConfig, RewardModelConfig
from meshrl_megatron.model import Model, build, slices_of
from meshrl_megatron.optimizer import MegatronOptimizer, MegatronState
from meshrl_megatron.passes import Pipeline
from meshrl_torch.checkpoint.boxes import Box
from meshrl_torch.model import saving
from meshrl_torch.model.adapted import Adapter
from meshrl_torch.model.heads import predicts_of
from meshrl_torch.model.network import LanguageModel
from meshrl_torch.model.packing import MicroBatch
from meshrl_torch.model.routing import COLUMN
from meshrl_torch.model.scoring import check_readable
from meshrl_torch.ranks.process_group import own_rank
from meshrl_torch.train import roles
from meshrl_torch.train.step import StepLoss
from meshrl_torch.train.trainable import Slot, Trainable, TrainedConfig
from meshrl_torch.weights.transfer import TensorSpec, check_weights, copy_into

_HEAD: Final = "value_head."
_ROLES: Final[Mapping[Predicts, tuple[str, str]]] = {
    "logprobs": ("policy", "model"),
    "values": ("critic", "body"),
    "scores": ("reward model", "model"),
}
"""The role's name and the prefix of its decoder's tensors in checkpoints."""


class PipelinedTrainable(Trainable):
    """A model in the dtype of its table, split along its mesh's axes. Its optimizer is float32."""

    def __init__(self, config: TrainedConfig) -> None:
        self._model = build(config, own_rank())
        name, body = _ROLES[predicts_of(config)]
        optimizer = MegatronOptimizer(config.optimizer, self._model)
        self._pipeline = Pipeline(optimizer.stages, self._model)
        passes = self._pipeline.passes(config.micro_batch_tokens)
        slot = Slot(optimizer, MegatronState(name, optimizer, self._model, body))
        super().__init__(passes, {DEFAULT_ADAPTER: slot})

    async def _backward(self, batch: Batch, micros: Sequence[MicroBatch], losses: StepLoss) -> None:
        self._pipeline.run(batch, micros, lambda output, micro: losses(output, micro, self._model.world))

    def on_every_rank(self, values: Tensor) -> Tensor:
        """Return those of the last stage."""
        return self._pipeline.from_last(values.to(self._model.world.device)).cpu()

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Return this rank's part, in the table's dtype."""
        return self._model.tensors()

    def shards(self) -> Iterator[Box]:
        """Yield this rank's parts of tensors, in the table's dtype. Of ranks with the same part, one has it."""
        return self._model.shards()

    def save(self, folder: str, adapters: Mapping[str, Adapter]) -> None:
        """Write a Hugging Face folder in the dtype of the table, and a critic's head in its own file.

        Each rank writes its share to a folder next to it, and the first rank reads from there as it writes. So no rank
        holds all of the model in memory.
        """
        model, world, target = self._model, self._model.world, Path(folder).expanduser()

        def make() -> str:
            if world.number:
                return ""
            target.parent.mkdir(parents=True, exist_ok=True)
            return tempfile.mkdtemp(prefix=f".{target.name}-parts-", dir=target.parent)

        def write() -> None:
            dtype = model.config.params_dtype
            tensors = {name: each.to(dtype) for name, each in model.unused().items()}
            for file in sorted(parts.glob("*.safetensors")):
                tensors |= load_file(file)  # mapped
            head = {name.removeprefix(_HEAD): tensors.pop(name) for name in list(tensors) if name.startswith(_HEAD)}
            tensors = dict(sorted(tensors.items()))  # the first one says the folder's dtype, and is no router's bias
            saving.write(model.words, folder, head or None, tensors)

        parts = Path(world.agree(make)[0])
        try:
            own = {name: tensor.cpu().contiguous() for name, tensor in model.tensors()}
            world.agree(lambda: save_file(own, parts / f"{world.number}.safetensors"))
            world.first(write)
        finally:
            if world.number == 0:
                shutil.rmtree(parts, ignore_errors=True)


class SplitOverRanks(roles.PlacedTogether):
    """Splits a model in the dtype of its table along the axes of a mesh."""

    def _train(self, config: TrainedConfig) -> PipelinedTrainable:
        """Load the model. ConfigError if it has adapters."""
        if isinstance(config, PolicyConfig) and config.is_adapted:
            key = "lora" if config.lora else "adapters"
            raise ConfigError(f"the backend 'megatron' has no adapters: use backend = \"fsdp\", or remove {key}")
        return PipelinedTrainable(config)

    def _freeze(self, config: ReferenceConfig | RewardModelConfig) -> roles.Frozen:
        model = build(config, own_rank())
        passes = Pipeline(model.stages, model).passes(config.micro_batch_tokens)
        return roles.Frozen(passes, partial(_load, model))


def _load(model: Model, weights: Weights) -> None:
    """Copy this rank's parts of the weights in place."""
    agree = model.world.agree
    boxes = [box for held in model.held for box in model.boxes(held, held.parameter.detach())]
    own = {box.name: TensorSpec(str(box.tensor.dtype).removeprefix("torch."), box.size) for box in boxes}
    forms = {name: form for each in agree(lambda: own) for name, form in each.items()}
    agree(lambda: check_weights(forms, weights))
    for box in boxes:
        copy_into(box.tensor, weights.tensors[box.name][slices_of(box)])


def _check_unmasked(batch: Batch, table: str) -> None:
    if any(masked_spans(batch)):
        raise DataError(
            "rows were drawn under constraints, and the backend 'megatron' computes log-probs without their masks: "
            f'use {table}.backend = "fsdp", or let the program ask for answers without a constraint'
        )


class MegatronPolicy(SplitOverRanks, roles.TrainedPolicy):
    """A model split over its ranks, and trained by them together."""

    @staticmethod
    def check_rows(model: LanguageModel, batch: Batch) -> None:
        """Raise DataError if the model cannot read a batch's rows."""
        check_readable(model, batch)
        _check_unmasked(batch, "policy")
        if COLUMN in batch:
            raise DataError(
                f"`{COLUMN}` has the experts that a sampler chose, which the backend 'megatron' cannot use: "
                'remove sampler.record_experts, or use backend = "fsdp"'
            )


class MegatronCritic(SplitOverRanks, roles.TrainedCritic):
    """A model with a value head, split over its ranks and trained by them together."""


class MegatronRewardModel(SplitOverRanks, roles.TrainedRewardModel):
    """A model with a scoring head, split over its ranks and trained by them together."""


class MegatronReference(SplitOverRanks, roles.FrozenReference):
    """A model split over its ranks."""

    @staticmethod
    def check_rows(model: LanguageModel, batch: Batch) -> None:
        """Raise DataError if the model cannot read a batch's rows."""
        check_readable(model, batch)
        _check_unmasked(batch, "reference")


class MegatronReward(SplitOverRanks, roles.FrozenReward):
    """A sequence classifier with one label, split over its ranks."""
