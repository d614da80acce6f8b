"""The reward model of the torch backend: a whole model with a head that scores, trained on one rank."""

from meshrl.data import Batch, Metrics
from meshrl.losses import Loss
from meshrl.roles import RewardModel, RewardTrainingConfig
from meshrl_hf import checkpoint, reward_training
from meshrl_hf.optimizer import Optimizer
from meshrl_hf.scoring import one_by_one
from meshrl_hf.state import TrainingState
from meshrl_torch.one_rank import OneRankTraining


class TorchRewardModel(OneRankTraining, RewardModel):
    """A sequence classifier with one label, all of it trained by AdamW. A new head gives 0 for every text."""

    def __init__(self, config: RewardTrainingConfig) -> None:
        super().__init__(config.mesh)
        self._budget = config.micro_batch_tokens
        self._judge = reward_training.load_learner(config)
        self._parameters = dict(self._judge.model.network.named_parameters())
        self._optimizer = Optimizer(config.optimizer, list(self._parameters.values()))

    async def encode(self, batch: Batch) -> Batch:
        """Add `tokens` and `loss_mask`."""
        return reward_training.encoded(self._judge, batch)

    async def score(self, batch: Batch) -> Batch:
        """Add `rewards` and `reward_error`; a completion that was cut short is judged as one that ends there."""
        async with self._updating:  # so that no score is of a half-done update
            return self._judge.score(one_by_one(self._judge.predicted), batch, self._budget)

    async def token_scores(self, batch: Batch) -> Batch:
        """Add `token_scores`."""
        async with self._updating:
            predict = one_by_one(self._judge.predicted)
            return reward_training.token_scores(self._judge, predict, batch, self._budget)

    async def update(self, batch: Batch, loss: Loss) -> Metrics:
        """One optimizer step, which may be cancelled between micro-batches and then changes no weight.

        DataError if there is nothing to learn or the loss is not of scores; ModelError if the gradient is not finite.
        """
        async with self._updating:  # one at a time: gradients are gathered in the parameters
            predict = self._judge.predicted
            return await reward_training.step(self._judge, self._optimizer, predict, batch, loss, self._budget)

    async def save(self, folder: str) -> None:
        """Write a Hugging Face folder of a sequence classifier, whole or not at all."""
        checkpoint.write(self._judge.model, folder)

    @property
    def _state(self) -> TrainingState:
        return TrainingState("reward model", self._judge.model.tensors(), self._parameters, self._optimizer)
