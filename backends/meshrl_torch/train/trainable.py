"""What is trained, in the layout of a backend: a model, its predictions, and an optimizer for it or each adapter."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias, cast

import torch
from torch import Tensor, nn

from meshrl.algo import Loss
from meshrl.data import (
    DEFAULT_ADAPTER,
    Batch,
    Metrics,
    Source,
    adapters_of,
)
from meshrl.errors import ConfigError, DataError
from meshrl.roles import (
    CriticConfig,
    ModelConfig,
    OptimizerConfig,
    PolicyConfig,
    ReferenceConfig,
    RewardModelConfig,
    RewardTrainingConfig,
    Step,
)
from meshrl_torch.checkpoint.boxes import Box
from meshrl_torch.checkpoint.state import State
from meshrl_torch.model.adapted import Adapter, Adapters
from meshrl_torch.model.heads import predicted_scores, predicted_values, value_head, with_score
from meshrl_torch.model.lora import merged
from meshrl_torch.model.network import LanguageModel
from meshrl_torch.model.packing import MicroBatch
from meshrl_torch.model.scoring import Passes, Predict, predicted
from meshrl_torch.model.vision import vision_modules
from meshrl_torch.train.optimizer import Stepper
from meshrl_torch.train.step import Added, StepLoss, prepared

TrainedConfig: TypeAlias = PolicyConfig | CriticConfig | RewardTrainingConfig
"""The table of a trained role."""


@dataclass(frozen=True)
class RoleModel:
    """A role's model: its predictions, and its trained parameters."""

    name: str
    """The role, for messages."""
    model: LanguageModel
    computes: Callable[[LanguageModel, Batch, MicroBatch], Tensor]
    """Its predictions, as `Predict`, with a model."""
    head: nn.Linear | None = None
    """A critic's head, which is not part of the model."""

    @property
    def predict(self) -> Predict:
        """Its predictions with its model."""
        return partial(self.computes, self.model)

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The trained parameters by name: those of adapters, of a critic's body and head, or else all."""
        if self.model.adapters is not None:
            named = self.model.adapters.named.items()
            return {f"{name}/{each}": own for name, adapter in named for each, own in adapter.parameters.items()}
        if self.head is None:
            return _trained(self.model.network.named_parameters())
        body = self.model.body.named_parameters(prefix="body")
        return _trained(body) | dict(self.head.named_parameters(prefix="value_head"))


def _trained(named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, nn.Parameter]:
    return {name: each for name, each in named if each.requires_grad}


def role_model(config: ModelConfig, model: LanguageModel) -> RoleModel:
    """Return what a table's role does with a model, after adding the role's head to it, or freezing it for adapters.

    What sees is frozen unless the table trains it. ConfigError if its role has no model, or a table trains what it
    lacks.
    """
    trains = isinstance(config, PolicyConfig) and config.train_vision
    if trains and model.vision is None:
        raise ConfigError("policy.train_vision: this model sees no images: leave it out")
    if model.vision is not None and not trains:
        for module in vision_modules(model.network).values():
            module.requires_grad_(False)
    if isinstance(config, PolicyConfig):
        if config.is_adapted:
            model.network.requires_grad_(False)
            model = replace(model, adapters=Adapters(mixes=config.share_passes))
        if config.activation_checkpointing:
            model.network.activation_checkpointing_enable({"use_reentrant": False})
            model.network.train(True)  # required by transformers; its dropout is zero
        return RoleModel("policy", model, partial(predicted, follows=True))
    if isinstance(config, CriticConfig):
        head = value_head(model, config)
        return RoleModel("critic", model, partial(predicted_values, head), head)
    if isinstance(config, RewardModelConfig | RewardTrainingConfig):
        scorer = with_score(model, config)
        return RoleModel("reward model", scorer.model, partial(predicted_scores, scorer.head))
    if isinstance(config, ReferenceConfig):
        return RoleModel("reference", model, predicted)
    raise ConfigError(f"a {type(config).__name__} is not the table of a role whose memory is known")


@dataclass
class Slot:
    """What an optimizer steps over: a whole model, or one adapter."""

    optimizer: Stepper
    state: State
    adapter: Adapter | None = None
    added: Added | None = None
    """The rows whose gradients are in the parameters."""

    def forget(self) -> None:
        """Drop the gradients of all rows that were added."""
        self.added = None
        self.optimizer.forget()


class Trainable(ABC):
    """A model, its predictions and its optimizers, in the layout of a backend. All ranks call its methods together."""

    _predict: Predict
    """A pass that keeps gradients, if passes come one by one."""

    def __init__(
        self,
        passes: Passes,
        slots: Mapping[str, Slot],
        turn: AbstractAsyncContextManager[object] = nullcontext(),  # noqa: B008 -- stateless
    ) -> None:
        """`slots`: adapters by name, or the whole model alone, called `DEFAULT_ADAPTER`.

        `turn`: held while weights are read or changed, if calls may run between the passes of another call.
        """
        self.passes, self.slots, self.turn = passes, dict(slots), turn
        self.device: torch.device = passes.model.device
        """Of passes."""

    def slot(self, adapter: str | None) -> Slot:
        """Return an adapter by name, or the one without. DataError if there is none."""
        name = DEFAULT_ADAPTER if adapter is None else adapter
        if name not in self.slots:
            what = "has no `lora`, so name an adapter" if adapter is None else f"has no adapter {name!r}"
            raise DataError(f"this policy {what}: it has {', '.join(map(repr, self.slots)) or 'none'}")
        return self.slots[name]

    def source(self, batch: Batch) -> Source:
        """Return what computes log-probs of these rows now: the versions of their adapters.

        Of all adapters if there are no rows, as on a rank that gets none of a batch.
        """
        known = self.passes.model.adapters
        names = {DEFAULT_ADAPTER} if known is None else set(adapters_of(batch, known.named)) or self.slots.keys()
        versions = [self.slots[name].optimizer.steps if name in self.slots else 0 for name in names] or [0]
        return Source("trainer", min(versions), max(versions))

    @property
    def newest(self) -> int:
        """The newest version that log-probs of any rows can have: a batch keeps one range for all its adapters."""
        return max((slot.optimizer.steps for slot in self.slots.values()), default=0)

    def placed(self, adapter: Adapter, optimizer: OptimizerConfig) -> Slot:
        """Return an adapter with its optimizer and its state. ConfigError if the backend has no adapters."""
        raise ConfigError(f"{type(self).__name__} has no adapters")

    async def add(
        self, batch: Batch, loss: Loss, check: Callable[[], object], *, keeps: bool = False
    ) -> tuple[Mapping[str, Added], StepLoss]:
        """Add the gradients of the rows of all ranks, with the same number of passes on each. Returns what was added.

        `check` raises if this rank's rows do not fit, and nothing changes then. If peers allow it, the call may be
        cancelled between two micro-batches. After that, or another error, all gradients of the rows' adapters are
        dropped. DataError if there is nothing to learn, the loss does not fit earlier ones, or a metric of it has a
        name of the step's. `keeps`: as in `StepLoss`.
        """
        ranks = self.passes.ranks
        before = {name: slot.added for name, slot in self.slots.items() if slot.added}
        micros, losses = prepared(self.passes, batch, loss, check, before)
        losses.keeps = keeps
        try:
            await self._backward(batch, micros, losses)
            own = losses.added(ranks.agree(losses.sums)[ranks.last])
        except BaseException as error:
            for name in losses.totals:
                self.slots[name].forget()
            if lost := sum(before[name].total.rows for name in before.keys() & losses.totals.keys()):
                error.add_note(
                    f"The gradients of {lost} rows that were added since the last step are dropped with "
                    "those of this call: call forward_backward for all of them again"
                )
            raise
        for name, each in own.items():
            self.slots[name].added = before[name] + each if name in before else each
        return own, losses

    def step(self, slot: Slot, chosen: Step | None = None) -> Metrics:
        """Make one step on all rows that were added. ModelError, and no step, if the gradient is not finite."""
        added, slot.added = cast("Added", slot.added), None
        settings = slot.optimizer.settings(chosen)
        norm = slot.optimizer.step(added.loss.predicts, settings, added.scale)
        return added.metrics(self.passes.ranks, grad_norm=norm, lr=settings.lr)

    def require(self, slot: Slot, *, added: bool) -> None:
        """Raise DataError on all ranks unless gradients were added on each, or on none."""

        def check() -> None:
            if added and slot.added is None:
                raise DataError(
                    "nothing to step on: no gradients were added since the last step, or they were dropped when a call "
                    "of forward_backward failed or was cancelled; call it first"
                )
            if not added and slot.added is not None:
                raise DataError(
                    f"the gradients of {slot.added.total.rows} rows wait for a step, and a checkpoint does not hold "
                    "gradients: call `step` before it"
                )

        self.passes.ranks.agree(check)

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
    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Return the model's tensors by their Hugging Face names: whole ones, of this rank if others have the rest."""

    def published(self, adapter: Adapter | None) -> Iterable[tuple[str, Tensor]]:
        """Return this rank's tensors for samplers: an adapter's, as its `sync` selects, or all of the model."""
        if adapter is None:
            return self.tensors()
        return adapter.parameters.items() if adapter.config.sync == "adapters" else merged(self.tensors(), adapter)

    @abstractmethod
    def shards(self) -> Iterable[Box]:
        """Return this rank's parts of the tensors for samplers, as views. Each part comes from only one rank."""

    @abstractmethod
    def save(self, folder: str, adapters: Mapping[str, Adapter]) -> None:
        """Write a Hugging Face folder, completely or not at all: of adapters by name, or of the model without any."""
