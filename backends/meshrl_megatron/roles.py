"""The roles of the backend `megatron`: a model split over its ranks, which call each method together."""

import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

from safetensors.torch import load_file, save_file
from torch import Tensor

from meshrl.algo import Loss, Predicts
from meshrl.data import Batch, Metrics, Weights
from meshrl.errors import ConfigError, DataError
from meshrl.roles import CriticConfig, PolicyConfig, ReferenceConfig, RewardModelConfig, RewardTrainingConfig
from meshrl_megatron.model import build
from meshrl_megatron.optimizer import MegatronOptimizer, MegatronState
from meshrl_megatron.passes import Pipeline
from meshrl_torch.checkpoint.boxes import Box
from meshrl_torch.model import saving
from meshrl_torch.model.heads import ScoreModel
from meshrl_torch.model.network import LanguageModel
from meshrl_torch.model.routing import COLUMN
from meshrl_torch.model.scoring import check_readable
from meshrl_torch.train import roles
from meshrl_torch.train.step import prepared, stepped
from meshrl_torch.weights.transfer import TensorSpec, check_weights, copy_into

_HEAD: Final = "value_head."
_ROLES: Final = {"logprobs": "policy", "values": "critic", "scores": "reward model"}


class PipelinedTrainable(roles.Trainable):
    """A model in the dtype of its table, split along its mesh's axes. Its optimizer is float32."""

    def __init__(self, config: roles.TrainedConfig, predicts: Predicts) -> None:
        recompute = isinstance(config, PolicyConfig) and config.activation_checkpointing
        self._model = build(config, roles.own_rank(), predicts=predicts, recompute=recompute)
        optimizer = MegatronOptimizer(config.optimizer, self._model)
        self._pipeline = Pipeline(optimizer.stages, self._model, valued=predicts != "logprobs")
        body = "body" if predicts == "values" else "model"
        state = MegatronState(_ROLES[predicts], optimizer, self._model, body)
        super().__init__(self._pipeline.passes(config.micro_batch_tokens), optimizer, state)

    async def step(self, batch: Batch, loss: Loss, check: Callable[[], object]) -> Metrics:
        """Make one optimizer step on the rows of all ranks."""
        world = self._model.world
        micros, losses = prepared(self.passes, batch, loss, check)
        self.optimizer.forget()
        self._pipeline.run(batch, micros, lambda output, micro: losses(output, micro, world))
        sums = world.agree(losses.sums)[world.last]
        return stepped(self.optimizer, loss.predicts, sums, batch, world)

    def published(self) -> Iterable[tuple[str, Tensor]]:
        """Return this rank's part, in the table's dtype."""
        return self._model.tensors()

    def shards(self) -> Iterator[Box]:
        """Yield this rank's parts of tensors, in the table's dtype. Of ranks with the same part, one has it."""
        return self._model.shards()

    def save(self, folder: str) -> None:
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
            tensors = dict(model.unused())
            for file in sorted(parts.glob("*.safetensors")):
                tensors |= load_file(file)  # mapped
            head = {name.removeprefix(_HEAD): tensors.pop(name) for name in list(tensors) if name.startswith(_HEAD)}
            dtype = model.config.params_dtype
            tensors = {name: each.to(dtype) for name, each in tensors.items()}  # drops what is float32
            saving.write(model.words, folder, head or None, tensors)

        parts = Path(world.agree(make)[0])
        try:
            own = {name: tensor.cpu().contiguous() for name, tensor in model.tensors()}
            world.agree(lambda: save_file(own, parts / f"{world.number}.safetensors"))
            world.first(write)
        finally:
            if world.number == 0:
                shutil.rmtree(parts, ignore_errors=True)


class MegatronPolicy(roles.CollectiveRole, roles.TrainedPolicy):
    """A model split over its ranks, and trained by them together."""

    def __init__(self, config: PolicyConfig) -> None:
        if config.lora is not None:
            raise ConfigError("the backend 'megatron' has no adapters: use backend = \"fsdp\", or remove lora")
        super().__init__(config, PipelinedTrainable(config, "logprobs"))

    @staticmethod
    def check_rows(model: LanguageModel, batch: Batch) -> None:
        """Raise DataError if the model cannot read a batch's rows."""
        check_readable(model, batch)
        if COLUMN in batch:
            raise DataError(
                f"`{COLUMN}` has the experts that a sampler chose, which the backend 'megatron' cannot use: "
                'remove sampler.record_experts, or use backend = "fsdp"'
            )


class MegatronCritic(roles.CollectiveRole, roles.TrainedCritic):
    """A model with a value head, split over its ranks and trained by them together."""

    def __init__(self, config: CriticConfig) -> None:
        super().__init__(PipelinedTrainable(config, "values"))


class MegatronRewardModel(roles.CollectiveRole, roles.TrainedRewardModel):
    """A model with a scoring head, split over its ranks and trained by them together."""

    def __init__(self, config: RewardTrainingConfig) -> None:
        trainable = PipelinedTrainable(config, "scores")
        super().__init__(ScoreModel(trainable.passes.model, config), trainable)


class MegatronReference(roles.CollectiveRole, roles.FrozenReference):
    """A model in the dtype of its table, split along its mesh's axes."""

    def __init__(self, config: ReferenceConfig) -> None:
        self._dtype = config.dtype
        self._model = build(config, roles.own_rank())
        super().__init__(Pipeline(self._model.stages, self._model, valued=False).passes(config.micro_batch_tokens))

    async def load(self, weights: Weights) -> None:
        """Copy this rank's parts of the weights in place."""
        boxes = [box for held in self._model.held for box in self._model.boxes(held, held.parameter.detach())]
        sizes = self.agree(lambda: {box.name: box.size for box in boxes})
        forms = {name: TensorSpec(self._dtype, size) for each in sizes for name, size in each.items()}
        self.agree(lambda: check_weights(forms, weights))
        for box in boxes:
            spans = tuple(slice(start, end) for start, end in box.ranges)
            copy_into(box.tensor, weights.tensors[box.name][spans])


class MegatronReward(roles.CollectiveRole, roles.FrozenReward):
    """A sequence classifier with one label in the dtype of its table, split along its mesh's axes."""

    def __init__(self, config: RewardModelConfig) -> None:
        model = build(config, roles.own_rank(), predicts="scores")
        passes = Pipeline(model.stages, model, valued=True).passes(config.micro_batch_tokens)
        super().__init__(ScoreModel(model.words, config), passes)
