"""The roles, once for every backend that runs a Hugging Face model: one builds the model, these are what it answers.

Where ranks wait for each other, a call runs on all of them at the same time, from its beginning to its end. What one
raises, all raise.
"""

import weakref
from collections.abc import Callable
from typing import TypeVar

from meshrl.data import Batch, Metrics, Source
from meshrl.losses import Loss, check_predicts, check_sources
from meshrl.mesh import CollectiveActor
from meshrl.objectives import Gae, with_advantages
from meshrl.roles import Critic, Policy, PolicyConfig, Reference, Reward, RewardModel, Stateful
from meshrl.weights import Weights, WeightSource
from meshrl_hf import reward_training
from meshrl_hf.encoding import encoded
from meshrl_hf.live_weights import offered, sender
from meshrl_hf.model import LanguageModel
from meshrl_hf.probe import probe
from meshrl_hf.reward_head import ScoreModel
from meshrl_hf.routing import check_followed
from meshrl_hf.scoring import Passes, check_readable, logprobs
from meshrl_hf.trainable import Trainable
from meshrl_hf.transfer import arrays
from meshrl_hf.value_head import values

T = TypeVar("T")


class Spread(CollectiveActor):
    """Base, beside its role, of what is spread over ranks that meet in each call."""

    _passes: Passes

    def agree(self, work: Callable[[], T]) -> list[T]:
        """As `RankGroup.agree`."""
        return self._passes.ranks.agree(work)


class Trained(Stateful):
    """Base, beside its role, of what is trained."""

    def __init__(self, trainable: Trainable) -> None:
        self._trainable, self._passes = trainable, trainable.passes
        self._model = trainable.passes.model

    async def save(self, folder: str) -> None:
        """Write a Hugging Face folder, whole or not at all: a critic's head, or adapters as peft does, in own files."""
        self._trainable.save(folder)

    async def checkpoint(self, folder: str, wait: bool = True) -> None:
        """Write the weights, the optimizer's moments and the number of steps, after the updates that were called."""
        async with self._trainable.turn:
            self._trainable.state.write(folder, wait)
        if wait:
            await self.written()

    async def written(self) -> None:
        """Wait until the last checkpoint is written."""
        await self._trainable.state.written()

    async def restore(self, folder: str) -> None:
        """Take what `checkpoint` wrote, of several ranks also in another layout.

        ModelError, and nothing taken, where it is of another role or model; where a file of several ranks cannot be
        read to its end, a part may be taken, and it says so.
        """
        async with self._trainable.turn:
            self._change()
            self._trainable.state.read(folder)

    def _change(self) -> None:
        """The weights are about to change."""


class TrainedPolicy(Trained, Policy):
    """A language model that AdamW trains."""

    def __init__(self, config: PolicyConfig, trainable: Trainable) -> None:
        super().__init__(trainable)
        self._source = WeightSource(changes=config.weight_sync == "delta")
        self._sender = sender(config, trainable) if config.weight_sync == "broadcast" else None
        if self._sender:
            weakref.finalize(self, self._sender.leave).atexit = False  # its thread would keep the parameters

    async def encode(self, batch: Batch) -> Batch:
        """Add `tokens` and `loss_mask` from `prompt` and `completion`."""
        return encoded(self._model, batch)

    async def update(self, batch: Batch, loss: Loss) -> Metrics:
        """One optimizer step; on one rank it may be cancelled between micro-batches, and then changes no weight.

        DataError if there is nothing to learn, the loss is a critic's, or log-probs come from elsewhere than it says or
        from later weights; ModelError if the gradient is not finite. Then no weight has changed.
        """
        trainable = self._trainable

        def check() -> None:
            check_predicts(loss, "logprobs")
            check_sources(batch, loss, trainable.optimizer.steps)
            self.check_rows(self._model, batch)

        async with trainable.turn:
            self._change()
            return await trainable.step(batch, loss, check)

    def _change(self) -> None:
        """Nobody reads the weights in their place any more; what readers have not taken is gone."""
        if self._sender:
            self._sender.end()

    async def logprobs(self, batch: Batch) -> Batch:
        """Add `logprobs`, of the version after the updates that were called before."""
        async with self._trainable.turn:
            source = Source.trainer(self._trainable.optimizer.steps)
            return batch.assign(logprobs=logprobs(self._passes, batch, source, self.check_rows))

    @staticmethod
    def check_rows(model: LanguageModel, batch: Batch) -> None:
        """DataError where the model cannot read a batch's rows, or not by the experts that they tell."""
        check_readable(model, batch)
        check_followed(model.routers, batch)

    async def weights(self) -> Weights:
        """This rank's part of the weights, after the updates that were called before; adapted as `lora.sync` says."""
        async with self._trainable.turn:
            version = self._trainable.optimizer.steps
            asked = probe(self._passes, version)
            if self._sender:
                return offered(self._sender, version, asked, self._trainable.shards())
            return self._source.weights(version, arrays(self._trainable.published()), asked)


class TrainedCritic(Trained, Critic):
    """The policy's architecture with a linear head in place of its last layer; a new head gives 0 for every state."""

    async def advantages(self, batch: Batch, gae: Gae) -> Batch:
        """Add `values`, `advantages` and `returns`."""
        async with self._trainable.turn:  # so that no value is of a half-done update
            found = values(self._passes, batch)
        return with_advantages(batch, found, gae)

    async def update(self, batch: Batch, loss: Loss) -> Metrics:
        """One optimizer step; on one rank it may be cancelled between micro-batches, and then changes no weight.

        DataError if there is nothing to learn, the loss is a policy's, or log-probs come from elsewhere than it says;
        ModelError if the gradient is not finite. Then no weight has changed.
        """

        def check() -> None:
            check_predicts(loss, "values")
            check_sources(batch, loss)
            self._model.check_rows(batch)

        async with self._trainable.turn:
            return await self._trainable.step(batch, loss, check)


class TrainedRewardModel(Trained, RewardModel):
    """A sequence classifier with one label; a new head gives 0 for every text."""

    def __init__(self, judge: ScoreModel, trainable: Trainable) -> None:
        super().__init__(trainable)
        self._judge = judge

    async def encode(self, batch: Batch) -> Batch:
        """Add `tokens` and `loss_mask`."""
        return reward_training.encoded(self._judge, batch)

    async def score(self, batch: Batch) -> Batch:
        """Add `rewards` and `reward_error`; a completion that was cut short is judged as one that ends there."""
        async with self._trainable.turn:  # so that no score is of a half-done update
            return self._judge.score(self._passes, batch)

    async def token_scores(self, batch: Batch) -> Batch:
        """Add `token_scores`."""
        async with self._trainable.turn:
            return reward_training.token_scores(self._judge, self._passes, batch)

    async def update(self, batch: Batch, loss: Loss) -> Metrics:
        """One optimizer step; on one rank it may be cancelled between micro-batches, and then changes no weight.

        DataError if there is nothing to learn or the loss is not of scores; ModelError if the gradient is not finite.
        Then no weight has changed.
        """
        async with self._trainable.turn:
            return await reward_training.step(self._judge, self._trainable, batch, loss)


class FrozenReference(Reference):
    """A model whose weights come from a policy alone."""

    def __init__(self, passes: Passes) -> None:
        self._passes = passes

    async def logprobs(self, batch: Batch) -> Batch:
        """Add `reference_logprobs`."""
        return batch.assign(reference_logprobs=logprobs(self._passes, batch, Source("reference")))


class FrozenReward(Reward):
    """A model that judges."""

    def __init__(self, judge: ScoreModel, passes: Passes) -> None:
        self._judge, self._passes = judge, passes

    async def score(self, batch: Batch) -> Batch:
        """Add `rewards` and `reward_error`; a completion that was cut short is judged as one that ends there."""
        return self._judge.score(self._passes, batch)
