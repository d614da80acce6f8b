"""A model in training, split over the ranks, and its optimizer step through the pipeline."""

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from torch import Tensor

from meshrl.algo import Loss, Predicts
from meshrl.data import Batch, Metrics
from meshrl.roles import CriticConfig, PolicyConfig, RewardTrainingConfig, options_of
from meshrl_megatron.export import save
from meshrl_megatron.model import build
from meshrl_megatron.optimizer import Trained
from meshrl_megatron.options import MegatronConfig
from meshrl_megatron.passes import Pipeline
from meshrl_megatron.state import State
from meshrl_torch.checkpoint.boxes import Box
from meshrl_torch.train.step import prepared, stepped
from meshrl_torch.train.trainable import Trainable, own_rank

_ROLES: Final = {"logprobs": "policy", "values": "critic", "scores": "reward model"}


class Pipelined(Trainable):
    """A model in the dtype of its table, split along its mesh's axes. Its optimizer is float32."""

    def __init__(self, config: PolicyConfig | CriticConfig | RewardTrainingConfig, predicts: Predicts) -> None:
        recompute = isinstance(config, PolicyConfig) and config.activation_checkpointing
        layout = options_of(config, MegatronConfig)
        self._model = build(config, layout, own_rank(), predicts=predicts, recompute=recompute)
        trained = Trained(config.optimizer, self._model)
        self._pipeline = Pipeline(trained.stages, self._model, valued=predicts != "logprobs")
        body = "body" if predicts == "values" else "model"
        state = State(_ROLES[predicts], trained, self._model.world, body)
        super().__init__(self._pipeline.passes(config.micro_batch_tokens), trained, state)

    async def step(self, batch: Batch, loss: Loss, check: Callable[[], object]) -> Metrics:
        """Make one optimizer step on the rows of all ranks."""
        world = self._model.world
        ready = prepared(self.passes, batch, loss, check)
        self.optimizer.forget()
        self._pipeline.train(batch, ready.micros, lambda said, micro: ready.judge(said, micro, world))
        told = world.agree(ready.judge.told)[world.last]
        return stepped(self.optimizer, loss.predicts, told, batch, world)

    def published(self) -> Iterable[tuple[str, Tensor]]:
        """Return this rank's part, in the table's dtype."""
        return self._model.tensors()

    def shards(self) -> Iterator[Box]:
        """Yield this rank's parts of tensors, in the table's dtype. Of ranks with the same part, one has it."""
        return self._model.shards()

    def save(self, folder: str) -> None:
        """Write a Hugging Face folder in the dtype of the table, completely or not at all."""
        save(self._model, folder)
