"""The critic of the torch backend: a whole model with a value head, trained on one rank."""

from meshrl.data import Batch, Metrics
from meshrl.losses import Loss, check_predicts, check_sources
from meshrl.objectives import Gae, with_advantages
from meshrl.roles import Critic, CriticConfig
from meshrl_hf import checkpoint, training
from meshrl_hf.optimizer import Optimizer
from meshrl_hf.scoring import one_by_one
from meshrl_hf.state import TrainingState
from meshrl_hf.value_head import load_valued, values
from meshrl_torch.one_rank import OneRankTraining


class TorchCritic(OneRankTraining, Critic):
    """The policy's architecture with a linear head in place of its last layer, all of it trained by AdamW.

    A new head gives 0 for every state.
    """

    def __init__(self, config: CriticConfig) -> None:
        super().__init__(config.mesh)
        self._budget = config.micro_batch_tokens
        self._valued = load_valued(config)
        self._optimizer = Optimizer(config.optimizer, list(self._valued.parameters.values()))

    async def advantages(self, batch: Batch, gae: Gae) -> Batch:
        """Add `values`, `advantages` and `returns`."""
        async with self._updating:  # so that no value is of a half-done update
            found = values(self._valued.model, one_by_one(self._valued.predicted), batch, self._budget)
        return with_advantages(batch, found, gae)

    async def update(self, batch: Batch, loss: Loss) -> Metrics:
        """One optimizer step, which may be cancelled between micro-batches and then changes no weight.

        DataError if there is nothing to learn, the loss is a policy's, or log-probs come from elsewhere than it says;
        ModelError if the gradient is not finite.
        """

        def check() -> None:
            check_predicts(loss, "values")
            check_sources(batch, loss)
            self._valued.model.check_rows(batch)

        async with self._updating:  # one at a time: gradients are gathered in the parameters
            return await training.step(self._optimizer, self._valued.predicted, batch, loss, self._budget, check)

    async def save(self, folder: str) -> None:
        """Write a Hugging Face folder with a `value_head.safetensors`, whole or not at all."""
        checkpoint.write(self._valued.model, folder, self._valued.head.state_dict())

    @property
    def _state(self) -> TrainingState:
        head = self._valued.head.named_parameters(prefix="value_head")
        tensors = {**self._valued.model.tensors(), **dict(head)}
        return TrainingState("critic", tensors, self._valued.parameters, self._optimizer)
