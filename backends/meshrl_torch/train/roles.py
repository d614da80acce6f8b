"""The roles, once for all backends that run a Hugging Face model: a backend builds the model, and these answer calls.

If ranks wait for each other, a call runs on all of them from beginning to end. An error of one is raised on all.
"""

import weakref
from collections.abc import Callable
from typing import TypeVar

from meshrl.algo import Gae, Loss, check_predicts, check_sources, with_advantages
from meshrl.data import Batch, Metrics, Source, Weights, WeightSource
from meshrl.mesh import CollectiveActor
from meshrl.roles import Critic, Policy, PolicyConfig, Reference, Reward, RewardModel, Stateful
from meshrl_torch.model.encode import encoded
from meshrl_torch.model.network import LanguageModel
from meshrl_torch.model.reward_head import ScoreModel
from meshrl_torch.model.routing import check_followed
from meshrl_torch.model.scoring import Passes, check_readable, logprobs
from meshrl_torch.model.value_head import values
from meshrl_torch.train import reward_training
from meshrl_torch.train.trainable import Trainable
from meshrl_torch.weights.live_weights import offered, sender
from meshrl_torch.weights.probe import probe
from meshrl_torch.weights.transfer import arrays

T = TypeVar("T")


class Spread(CollectiveActor):
    """A base, next to the role, for actors whose ranks meet in each call."""

    _passes: Passes

    def agree(self, work: Callable[[], T]) -> list[T]:
        """See `RankGroup.agree`."""
        return self._passes.ranks.agree(work)


class Trained(Stateful):
    """A base, next to the role, for trained models."""

    def __init__(self, trainable: Trainable) -> None:
        self._trainable, self._passes = trainable, trainable.passes
        self._model = trainable.passes.model

    async def save(self, folder: str) -> None:
        """Write a Hugging Face folder, completely or not at all. A critic's head and adapters get their own files."""
        self._trainable.save(folder)

    async def checkpoint(self, folder: str, wait: bool = True) -> None:
        """Write the weights, the optimizer's moments and the number of steps, after all earlier updates."""
        async with self._trainable.turn:
            self._trainable.state.write(folder, wait)
        if wait:
            await self.written()

    async def written(self) -> None:
        """Wait until the last checkpoint is written."""
        await self._trainable.state.written()

    async def restore(self, folder: str) -> None:
        """Load what `checkpoint` wrote. Several ranks may have another layout.

        ModelError, and nothing changes, if it belongs to another role or model. If one of several ranks' files cannot
        be read to its end, a part may be loaded, and the error says so.
        """
        async with self._trainable.turn:
            self._change()
            self._trainable.state.read(folder)

    def _change(self) -> None:
        """Called before the weights change."""


class TrainedPolicy(Trained, Policy):
    """A language model that AdamW trains."""

    def __init__(self, config: PolicyConfig, trainable: Trainable) -> None:
        super().__init__(trainable)
        self._source = WeightSource(changes=config.weight_sync == "delta")
        self._sender = sender(config, trainable.passes) if config.weight_sync == "broadcast" else None
        if self._sender:
            weakref.finalize(self, self._sender.leave).atexit = False  # its thread would keep the parameters

    async def encode(self, batch: Batch) -> Batch:
        """Add `tokens` and `loss_mask` from `prompt` and `completion`."""
        return encoded(self._model, batch)

    async def update(self, batch: Batch, loss: Loss) -> Metrics:
        """Make one optimizer step. On one rank it may be cancelled between micro-batches, and changes no weight then.

        DataError if there is nothing to learn, the loss is of another model, or log-probs have the wrong source or are
        of later weights. ModelError if the gradient is not finite. In these cases no weight changes.
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
        """End the offer of the weights, because they change. Readers that have not received them get an error."""
        if self._sender:
            self._sender.end()

    async def logprobs(self, batch: Batch) -> Batch:
        """Add `logprobs`, of the version after all earlier updates."""
        async with self._trainable.turn:
            source = Source.trainer(self._trainable.optimizer.steps)
            return batch.assign(logprobs=logprobs(self._passes, batch, source, self.check_rows))

    @staticmethod
    def check_rows(model: LanguageModel, batch: Batch) -> None:
        """Raise DataError if the model cannot read a batch's rows, or follow the experts in them."""
        check_readable(model, batch)
        check_followed(model.routers, batch)

    async def weights(self) -> Weights:
        """Return this rank's part of the weights, after all earlier updates, with adapters as `lora.sync` says."""
        async with self._trainable.turn:
            version = self._trainable.optimizer.steps
            asked = probe(self._passes, version)
            if self._sender:
                return offered(self._sender, version, asked, self._trainable.shards())
            return self._source.weights(version, arrays(self._trainable.published()), asked)


class TrainedCritic(Trained, Critic):
    """The policy's architecture with a linear head instead of its last layer. A new head returns 0 for every state."""

    async def advantages(self, batch: Batch, gae: Gae) -> Batch:
        """Add `values`, `advantages` and `returns`."""
        async with self._trainable.turn:  # so that no value comes from a half-done update
            found = values(self._passes, batch)
        return with_advantages(batch, found, gae)

    async def update(self, batch: Batch, loss: Loss) -> Metrics:
        """Make one optimizer step. On one rank it may be cancelled between micro-batches, and changes no weight then.

        DataError if there is nothing to learn, the loss is of another model, or log-probs have the wrong source.
        ModelError if the gradient is not finite. In these cases no weight changes.
        """

        def check() -> None:
            check_predicts(loss, "values")
            check_sources(batch, loss)
            self._model.check_rows(batch)

        async with self._trainable.turn:
            return await self._trainable.step(batch, loss, check)


class TrainedRewardModel(Trained, RewardModel):
    """A sequence classifier with one label. A new head returns 0 for every text."""

    def __init__(self, judge: ScoreModel, trainable: Trainable) -> None:
        super().__init__(trainable)
        self._judge = judge

    async def encode(self, batch: Batch) -> Batch:
        """Add `tokens` and `loss_mask`."""
        return reward_training.encoded(self._judge, batch)

    async def score(self, batch: Batch) -> Batch:
        """Add `rewards` and `reward_error`. A truncated completion is scored as if it ended there."""
        async with self._trainable.turn:  # so that no score comes from a half-done update
            return self._judge.score(self._passes, batch)

    async def token_scores(self, batch: Batch) -> Batch:
        """Add `token_scores`."""
        async with self._trainable.turn:
            return reward_training.token_scores(self._judge, self._passes, batch)

    async def update(self, batch: Batch, loss: Loss) -> Metrics:
        """Make one optimizer step. On one rank it may be cancelled between micro-batches, and changes no weight then.

        DataError if there is nothing to learn or the loss is not of scores. ModelError if the gradient is not finite.
        In these cases no weight changes.
        """
        async with self._trainable.turn:
            return await reward_training.step(self._judge, self._trainable, batch, loss)


class FrozenReference(Reference):
    """A frozen model, which gets new weights only from a policy."""

    def __init__(self, passes: Passes) -> None:
        self._passes = passes

    async def logprobs(self, batch: Batch) -> Batch:
        """Add `reference_logprobs`."""
        return batch.assign(reference_logprobs=logprobs(self._passes, batch, Source("reference")))


class FrozenReward(Reward):
    """A frozen model that scores texts."""

    def __init__(self, judge: ScoreModel, passes: Passes) -> None:
        self._judge, self._passes = judge, passes

    async def score(self, batch: Batch) -> Batch:
        """Add `rewards` and `reward_error`. A truncated completion is scored as if it ended there."""
        return self._judge.score(self._passes, batch)
