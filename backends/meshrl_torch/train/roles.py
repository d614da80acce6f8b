"""The roles, once for all backends that run a Hugging Face model: a backend lays the model out, and these answer calls.

If ranks wait for each other, a call runs on all of them from beginning to end. An error of one is raised on all.
"""

import asyncio
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeAlias, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from meshrl.algo import Gae, Loss, check_predicts, check_sources, with_advantages
from meshrl.data import Batch, LossResult, Metrics, Ragged, Source, Weights, WeightSource, check_lengths
from meshrl.errors import ConfigError, DataError
from meshrl.mesh import CollectiveActor
from meshrl.roles import (
    Critic,
    CriticConfig,
    ModelConfig,
    Policy,
    PolicyConfig,
    Reference,
    ReferenceConfig,
    Reward,
    RewardModel,
    RewardModelConfig,
    RewardTrainingConfig,
    Stateful,
    Step,
)
from meshrl_torch.checkpoint.boxes import Box
from meshrl_torch.checkpoint.state import State
from meshrl_torch.model.heads import ScoreModel, predicted_values, value_head, values, with_score
from meshrl_torch.model.lora import adapters, merged, prepare, trained
from meshrl_torch.model.network import LanguageModel
from meshrl_torch.model.packing import MicroBatch, learned
from meshrl_torch.model.routing import check_followed
from meshrl_torch.model.rows import encoded
from meshrl_torch.model.scoring import Passes, Predict, check_readable, logprobs, predicted, score
from meshrl_torch.train.optimizer import Stepper
from meshrl_torch.train.step import Added, StepLoss, prepared
from meshrl_torch.weights.live_weights import make_sender, offer_weights
from meshrl_torch.weights.transfer import arrays, make_probe

T = TypeVar("T")

TrainedConfig: TypeAlias = PolicyConfig | CriticConfig | RewardTrainingConfig
"""The table of a trained role."""


@dataclass(frozen=True)
class RoleModel:
    """A role's model: its predictions, and its trained parameters."""

    name: str
    """The role, for messages."""
    model: LanguageModel
    predict: Predict
    head: nn.Linear | None = None
    """A critic's head, which is not part of the model."""
    adapted: PolicyConfig | None = None
    """The table of a policy with adapters."""

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The trained parameters by name: those of a critic's body and head, and else those that need gradients."""
        if self.head is None:
            return trained(self.model)
        body = self.model.body.named_parameters(prefix="body")
        return dict(body) | dict(self.head.named_parameters(prefix="value_head"))

    def published(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Select the model's tensors for samplers: all, or those that `lora.sync` selects."""
        if self.adapted is None or self.adapted.lora is None:
            return tensors
        lora = self.adapted.lora
        return adapters(tensors) if lora.sync == "adapters" else merged(self.model.network, tensors, lora)


def role_model(config: ModelConfig, model: LanguageModel) -> RoleModel:
    """Return what a table's role does with a model, after adding the role's head or adapters to it.

    ConfigError if its role has no model.
    """
    if isinstance(config, PolicyConfig):
        model = prepare(model, config)
        adapted = config if config.lora else None
        return RoleModel("policy", model, partial(predicted, model, follows=True), adapted=adapted)
    if isinstance(config, CriticConfig):
        head = value_head(model, config)
        return RoleModel("critic", model, partial(predicted_values, model, head), head)
    if isinstance(config, RewardModelConfig | RewardTrainingConfig):
        scorer = with_score(model, config)
        return RoleModel("reward model", scorer.model, scorer.predicted)
    if isinstance(config, ReferenceConfig):
        return RoleModel("reference", model, partial(predicted, model))
    raise ConfigError(f"a {type(config).__name__} is not the table of a role whose memory is known")


class Trainable(ABC):
    """A model, its predictions and its optimizer, in the layout of a backend. All ranks call its methods together."""

    _predict: Predict
    """A pass that keeps gradients, if passes come one by one."""

    def __init__(
        self,
        passes: Passes,
        optimizer: Stepper,
        state: State,
        turn: AbstractAsyncContextManager[object] = nullcontext(),  # noqa: B008 -- stateless
    ) -> None:
        """`turn`: held while weights are read or changed, if calls may run between the passes of another call."""
        self.passes, self.optimizer, self.state, self.turn = passes, optimizer, state, turn
        self.added: Added | None = None
        """The rows whose gradients are in the parameters."""

    async def add(
        self, batch: Batch, loss: Loss, check: Callable[[], object], *, keeps: bool = False
    ) -> tuple[Added, StepLoss]:
        """Add the gradients of the rows of all ranks, with the same number of passes on each. Returns what was added.

        `check` raises if this rank's rows do not fit, and nothing changes then. If peers allow it, the call may be
        cancelled between two micro-batches. After that, or another error, all gradients are dropped. DataError if there
        is nothing to learn, the loss does not fit earlier ones, or a metric of it has a name of the step's. `keeps`: as
        in `StepLoss`.
        """
        ranks, before = self.passes.ranks, self.added
        micros, losses = prepared(self.passes, batch, loss, check, before)
        losses.keeps = keeps
        try:
            await self._backward(batch, micros, losses)
            own = losses.added(ranks.agree(losses.sums)[ranks.last])
        except BaseException as error:
            self.forget()
            if before:
                error.add_note(
                    f"The gradients of {before.total.rows} rows that were added since the last step are dropped with "
                    "those of this call: call forward_backward for all of them again"
                )
            raise
        self.added = before + own if before else own
        return own, losses

    def step(self, chosen: Step | None = None) -> Metrics:
        """Make one step on all rows that were added. ModelError, and no step, if the gradient is not finite."""
        added, self.added = cast("Added", self.added), None
        settings = self.optimizer.settings(chosen)
        norm = self.optimizer.step(added.loss.predicts, settings, added.scale)
        return added.metrics(self.passes.ranks, grad_norm=norm, lr=settings.lr)

    def require(self, *, added: bool) -> None:
        """Raise DataError on all ranks unless gradients were added on each, or on none."""

        def check() -> None:
            if added and self.added is None:
                raise DataError(
                    "nothing to step on: no gradients were added since the last step, or they were dropped when a call "
                    "of forward_backward failed or was cancelled; call it first"
                )
            if not added and self.added is not None:
                raise DataError(
                    f"the gradients of {self.added.total.rows} rows wait for a step, and a checkpoint does not hold "
                    "gradients: call `step` before it"
                )

        self.passes.ranks.agree(check)

    def forget(self) -> None:
        """Drop the gradients of all rows that were added."""
        self.added = None
        self.optimizer.forget()

    def on_every_rank(self, values: Tensor) -> Tensor:
        """Return this, float32[any] in the host's memory, of the rank that computed this one's loss."""
        return values

    async def _backward(self, batch: Batch, micros: Sequence[MicroBatch], losses: StepLoss) -> None:
        """Add the gradients of the summed loss to those in the parameters."""
        ranks = self.passes.ranks
        for left, micro in zip(reversed(range(len(micros))), micros, strict=True):
            self._begin(left == 0)
            losses(self._predict(batch, micro), micro, ranks).backward()
            if ranks.interruptible:
                await asyncio.sleep(0)  # a cancelled call ends here

    def _begin(self, last: bool) -> None:  # noqa: B027 -- most have nothing to do
        """Called before each pass of a step."""

    @abstractmethod
    def published(self) -> Iterable[tuple[str, Tensor]]:
        """Return this rank's tensors for samplers: whole ones, by their Hugging Face names."""

    @abstractmethod
    def shards(self) -> Iterable[Box]:
        """Return this rank's parts of the tensors for samplers, as views. Each part comes from only one rank."""

    @abstractmethod
    def save(self, folder: str) -> None:
        """Write a Hugging Face folder, completely or not at all."""


class Frozen(NamedTuple):
    """A model without an optimizer, in the layout of a backend."""

    passes: Passes
    load: Callable[[Weights], None]
    """Copies weights in place. All ranks call it together."""


class Placed(ABC):
    """What a backend adds to the roles: it places a table's model on the ranks."""

    @abstractmethod
    def _train(self, config: TrainedConfig) -> Trainable:
        """Load the model, to be trained."""

    @abstractmethod
    def _freeze(self, config: ReferenceConfig | RewardModelConfig) -> Frozen:
        """Load the model, to be read."""


class PlacedTogether(Placed, CollectiveActor):
    """`Placed` on several ranks, whose endpoints run collectives."""

    _passes: Passes

    def agree(self, work: Callable[[], T]) -> list[T]:
        """See `RankGroup.agree`."""
        return self._passes.ranks.agree(work)


class Trained(Placed, Stateful):
    """A base, next to the role, for trained models."""

    def __init__(self, config: TrainedConfig) -> None:
        self._trainable = self._train(config)
        self._passes = self._trainable.passes
        self._model = self._passes.model

    async def update(self, batch: Batch, loss: Loss) -> Metrics:
        """Make one optimizer step. On one rank it may be cancelled between micro-batches, and changes no weight then.

        DataError if there is nothing to learn, the loss is of another model, or log-probs have the wrong source or are
        of later weights than a policy's. ModelError if the gradient is not finite. In these cases no weight changes.
        """
        async with self._trainable.turn:
            await self._trainable.add(batch, loss, partial(self._check, batch, loss))
            return self._step()

    @abstractmethod
    def _check(self, batch: Batch, loss: Loss) -> object:
        """Raise DataError if the loss or this rank's rows do not fit the model."""

    async def save(self, folder: str) -> None:
        """Write a Hugging Face folder, completely or not at all. A critic's head and adapters get their own files."""
        self._trainable.save(folder)

    async def checkpoint(self, folder: str, wait: bool = True) -> None:
        """Write the weights, the optimizer's moments and the number of steps, after all earlier updates.

        DataError, and nothing is written, if gradients wait for a step.
        """
        async with self._trainable.turn:
            self._trainable.require(added=False)
            self._trainable.state.write(folder, wait)
            try:
                if wait:
                    await self.written()
            except asyncio.CancelledError:
                await self._trainable.state.ended()  # until then it reads the weights
                raise

    async def written(self) -> None:
        """Wait until the last checkpoint is written."""
        await self._trainable.state.written()

    async def restore(self, folder: str) -> None:
        """Load what `checkpoint` wrote. Several ranks may have another layout.

        ModelError, and nothing changes, if it belongs to another role or model. If a file cannot be read to its end, or
        is damaged (Damaged), a part may be loaded.
        """
        async with self._trainable.turn:
            self._change()
            self._trainable.state.read(folder)
            self._trainable.forget()

    def _step(self, chosen: Step | None = None) -> Metrics:
        self._change()
        return self._trainable.step(chosen)

    def _change(self) -> None:
        """Called before the weights change."""
        self._trainable.state.keep()


class TrainedPolicy(Trained, Policy):
    """A language model that AdamW trains."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        self._source = WeightSource(changes=config.weight_sync == "delta")
        self._sender = make_sender(config, self._passes) if config.weight_sync == "broadcast" else None
        if self._sender:
            weakref.finalize(self, self._sender.leave).atexit = False  # its thread would keep the parameters

    async def encode(self, batch: Batch) -> Batch:
        """Add `tokens` and `loss_mask` from `prompt` and `completion`."""
        return encoded(self._model, batch)

    def _check(self, batch: Batch, loss: Loss) -> None:
        check_predicts(loss, "logprobs")
        check_sources(batch, loss, self._trainable.optimizer.steps)
        self.check_rows(self._model, batch)

    def _change(self) -> None:
        """End the offer of the weights, because they change. Readers that have not received them get an error."""
        super()._change()
        if self._sender:
            self._sender.end()

    async def forward_backward(self, batch: Batch, loss: Loss) -> LossResult:
        """Add the gradients of a batch. On one rank it may be cancelled between micro-batches, and drops them all then.

        DataError, and nothing changes, where `update` raises it, or if an earlier loss of the step is normalised
        otherwise.
        """
        async with self._trainable.turn:
            source = Source.trainer(self._trainable.optimizer.steps)
            own, losses = await self._trainable.add(batch, loss, partial(self._check, batch, loss), keeps=True)
            logprobs, values = self._trainable.on_every_rank(losses.values()).numpy()
            offsets = batch.tokens.offsets
            columns = {"logprobs": Ragged(logprobs, offsets, source=source), "losses": Ragged(values, offsets)}
            return LossResult(batch.only().assign(**columns), own.metrics(self._passes.ranks))

    async def step(self, optimizer: Step | None = None) -> Metrics:
        """Make one optimizer step with all gradients since the last one. DataError if there are none."""
        async with self._trainable.turn:
            self._trainable.require(added=True)
            return self._step(optimizer)

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
            probe = make_probe(self._passes, version)
            if self._sender:
                weights: Weights = offer_weights(self._sender, version, probe, self._trainable.shards())
            else:
                weights = self._source.weights(version, arrays(self._trainable.published()), probe)
            if self._passes.model.device.type == "cuda":
                torch.cuda.empty_cache()  # an engine on the same GPU may wake next, to take them
            return weights


class TrainedCritic(Trained, Critic):
    """The policy's architecture with a linear head instead of its last layer. A new head returns 0 for every state."""

    async def advantages(self, batch: Batch, gae: Gae) -> Batch:
        """Add `values`, `advantages` and `returns`."""
        async with self._trainable.turn:  # so that no value comes from a half-done update
            estimates = values(self._passes, batch)
        return with_advantages(batch, estimates, gae)

    def _check(self, batch: Batch, loss: Loss) -> None:
        check_predicts(loss, "values")
        check_sources(batch, loss)
        self._model.check_rows(batch)


class TrainedRewardModel(Trained, RewardModel):
    """A sequence classifier with one label. A new head returns 0 for every text."""

    def __init__(self, config: RewardTrainingConfig) -> None:
        super().__init__(config)
        self._scorer = ScoreModel(self._model, config)

    async def encode(self, batch: Batch) -> Batch:
        """Add `tokens` and `loss_mask`."""
        return self._scorer.encode(batch)

    async def score(self, batch: Batch) -> Batch:
        """Add `rewards` and `reward_error`. A truncated completion is scored as if it ended there."""
        async with self._trainable.turn:  # so that no score comes from a half-done update
            return self._scorer.score(self._passes, batch)

    async def token_scores(self, batch: Batch) -> Batch:
        """Add `token_scores`: the score at each token where `loss_mask` is True, 0 elsewhere."""
        async with self._trainable.turn:
            shifted = self._passes.ranks.together(lambda: _shifted(self._model, batch, ()))
            tokens, mask = shifted.tokens, shifted.loss_mask
            native = self._model.native_tokens + 1  # shifted rows have one more token
            scores = score(self._passes, shifted, lambda: learned(tokens, mask, native=native), mask)
            return batch.assign(token_scores=Ragged(np.delete(scores, tokens.offsets[:-1]), batch.tokens.offsets))

    async def update(self, batch: Batch, loss: Loss) -> Metrics:
        """Make one optimizer step. On one rank it may be cancelled between micro-batches, and changes no weight then.

        DataError on all ranks if there is nothing to learn, the loss is not of scores, or the batch lacks a column that
        it reads. ModelError if the gradient is not finite. In these cases no weight changes.
        """
        ranks = self._passes.ranks
        async with self._trainable.turn:
            shifted = ranks.together(partial(self._check, batch, loss))
            await self._trainable.add(shifted, loss, lambda: None)
            metrics = self._step()
        # The tokens before the shift.
        return Metrics({**metrics.entries, "tokens": (len(batch.tokens.values), 1 / ranks.size)})

    def _check(self, batch: Batch, loss: Loss) -> Batch:
        check_predicts(loss, "scores")
        return _shifted(self._model, batch, loss.columns)


def _shifted(model: LanguageModel, batch: Batch, names: Sequence[str]) -> Batch:
    """Shift the batch's tokens, mask and these columns, so that each token carries the data of the previous one.

    A token's log-prob depends on the tokens before it, a score also on its own token. So each row gets one more token,
    which is never read, and a token's data moves to the next.
    """
    model.check_rows(batch)
    tokens = batch.tokens
    begins, ends = tokens.offsets[:-1], tokens.offsets[1:]
    offsets = tokens.offsets + np.arange(len(tokens) + 1)
    moved = {"tokens": Ragged(np.insert(tokens.values, ends, 0), offsets)}
    rows: list[str] = []
    for name in ("loss_mask", *names):
        if name == "rows":
            continue
        column = batch[name]
        if isinstance(column, Ragged):
            check_lengths(name, column.lengths, tokens.lengths)
            moved[name] = Ragged(np.insert(column.values, begins, 0), offsets)
        else:
            rows.append(name)
    return batch.only(*rows).assign(**moved)


class FrozenReference(Placed, Reference):
    """A frozen model, which gets new weights only from a policy."""

    def __init__(self, config: ReferenceConfig) -> None:
        self._passes, self._load = self._freeze(config)

    async def logprobs(self, batch: Batch) -> Batch:
        """Add `reference_logprobs`."""
        return batch.assign(reference_logprobs=logprobs(self._passes, batch, Source("reference")))

    async def load(self, weights: Weights) -> None:
        """Copy this rank's part of the weights in place."""
        self._load(weights)


class FrozenReward(Placed, Reward):
    """A frozen model that scores texts."""

    def __init__(self, config: RewardModelConfig) -> None:
        self._passes, _ = self._freeze(config)
        self._scorer = ScoreModel(self._passes.model, config)

    async def score(self, batch: Batch) -> Batch:
        """Add `rewards` and `reward_error`. A truncated completion is scored as if it ended there."""
        return self._scorer.score(self._passes, batch)
