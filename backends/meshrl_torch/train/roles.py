"""The roles, once for all backends that run a Hugging Face model: a backend lays the model out, and these answer calls.

If ranks wait for each other, a call runs on all of them from beginning to end. An error of one is raised on all.
"""

import asyncio
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import msgspec
import numpy as np
import torch

from meshrl.algo import Gae, Loss, check_predicts, check_sources, with_advantages
from meshrl.data import (
    ADAPTER,
    BASE,
    DEFAULT_ADAPTER,
    AdapterOf,
    Batch,
    LossResult,
    Metrics,
    Ragged,
    Source,
    Weights,
    WeightSource,
    adapters_of,
    check_lengths,
)
from meshrl.errors import ConfigError, DataError, ModelError
from meshrl.mesh import CollectiveActor
from meshrl.roles import (
    Critic,
    LoraConfig,
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
    name_of_adapter,
)
from meshrl_torch.checkpoint.state import FACTS
from meshrl_torch.model.heads import ScoreModel, values
from meshrl_torch.model.lora import add_adapter
from meshrl_torch.model.network import LanguageModel
from meshrl_torch.model.packing import learned
from meshrl_torch.model.routing import check_followed
from meshrl_torch.model.rows import encoded
from meshrl_torch.model.scoring import Passes, check_readable, logprobs, score
from meshrl_torch.train.trainable import Slot, Trainable, TrainedConfig
from meshrl_torch.weights.live_weights import make_sender, offer_weights
from meshrl_torch.weights.transfer import arrays, make_probe

T = TypeVar("T")

_ADAPTERS: Final = "adapters"
"""The folder of the named adapters' states in a state of the whole."""
_TABLES: Final = "adapters.json"
"""The tables of all adapters, by name."""


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
        Rows of several adapters make a step of each, also if the gradient of another one is not finite.
        """
        async with self._trainable.turn:
            added, _ = await self._trainable.add(batch, loss, partial(self._check, batch, loss))
            return self._step(added)

    @abstractmethod
    def _check(self, batch: Batch, loss: Loss) -> object:
        """Raise DataError if the loss or this rank's rows do not fit the model."""

    async def save(self, folder: str, adapter: str | None = None) -> None:
        """Write a Hugging Face folder, completely or not at all. A critic's head and adapters get their own files."""
        slots = self._trainable.slots if adapter is None else {DEFAULT_ADAPTER: self._trainable.slot(adapter)}
        self._trainable.save(folder, {name: slot.adapter for name, slot in slots.items() if slot.adapter})

    async def checkpoint(self, folder: str, wait: bool = True, adapter: str | None = None) -> None:
        """Write the weights, the optimizer's moments and the number of steps, after all earlier updates.

        Of all adapters, or of one. DataError, and nothing is written, if gradients wait for a step.
        """
        async with self._trainable.turn:
            slots = {"": self._trainable.slot(adapter)} if adapter else self._folders()
            for slot in slots.values():
                self._trainable.require(slot, added=False)
            if not adapter:
                self._passes.ranks.first(partial(self._write_tables, Path(folder)))
            for path, slot in slots.items():
                slot.state.write(str(Path(folder, path)), wait)
            try:
                if wait:
                    await self.written()
            except asyncio.CancelledError:
                for slot in slots.values():
                    await slot.state.ended()  # until then it reads the weights
                raise

    async def written(self) -> None:
        """Wait until the last checkpoint is written."""
        for slot in list(self._trainable.slots.values()):
            await slot.state.written()

    async def restore(self, folder: str, adapter: str | None = None, optimizer: bool = True) -> None:
        """Load what `checkpoint` wrote. Several ranks may have another layout. `optimizer`: its moments and steps too.

        ModelError, and nothing changes, if it belongs to another role or model. If a file cannot be read to its end, or
        is damaged (Damaged), a part may be loaded.
        """
        async with self._trainable.turn:
            slots = {"": self._trainable.slot(adapter)} if adapter else await self._restore_tables(Path(folder))
            for path, slot in slots.items():
                self._change(slot)
                slot.state.read(str(Path(folder, path)), optimizer=optimizer)
                slot.forget()

    def _folders(self) -> Mapping[str, Slot]:
        """Return the slots by their folders in a state of the whole."""
        return {_folder_of(name): slot for name, slot in self._trainable.slots.items()}

    def _write_tables(self, folder: Path) -> None:
        """Write the tables of adapters into a state of the whole, if the model has any."""

    async def _restore_tables(self, folder: Path) -> Mapping[str, Slot]:
        """Add and drop adapters, until they are those of a state. Returns the slots in it by their folders.

        ModelError, and nothing changes, if the state of one does not fit.
        """
        return self._folders()

    def _step(self, names: Iterable[str], chosen: Step | None = None) -> Metrics:
        """Make a step of each slot. ModelError after all of them if a gradient was not finite."""
        metrics: dict[str, Metrics] = {}
        failure: ModelError | None = None
        for name in names:
            slot = self._trainable.slots[name]
            self._change(slot)
            try:
                metrics[name] = self._trainable.step(slot, chosen)
            except ModelError as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return _by_name(metrics)

    def _change(self, slot: Slot) -> None:
        """Called before the weights change."""
        slot.state.keep()


def _by_name(metrics: Mapping[str, Metrics]) -> Metrics:
    """Return the metrics of one slot, or those of several, each with its name: `NAME/loss`."""
    if len(metrics) == 1:
        return next(iter(metrics.values()))
    return Metrics({f"{name}/{key}": entry for name, own in metrics.items() for key, entry in own.entries.items()})


class TrainedPolicy(Trained, Policy):
    """A language model that AdamW trains, or its adapters."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        self._config = config
        for name, lora in config.declared.items():
            self._add(name, lora)
        self._sources: dict[str | None, WeightSource] = {}
        """By adapter."""
        self._sender = make_sender(config, self._passes) if config.weight_sync == "broadcast" else None
        if self._sender:
            weakref.finalize(self, self._sender.leave).atexit = False  # its thread would keep the parameters

    async def encode(self, batch: Batch) -> Batch:
        """Add `tokens` and `loss_mask` from `prompt` and `completion`."""
        return encoded(self._model, batch)

    def _check(self, batch: Batch, loss: Loss) -> None:
        check_predicts(loss, "logprobs")
        if (known := self._model.adapters) is not None and BASE in (names := adapters_of(batch, known.named)):
            raise DataError(
                f"{batch.place(names.index(BASE))} names no adapter, and the base model is frozen: name one of "
                f"{', '.join(map(repr, known.named)) or 'those that add_adapter adds'} in the column `{ADAPTER}`, or "
                "declare policy.lora for such rows"
            )
        check_sources(batch, loss, self._trainable.newest)
        self.check_rows(self._model, batch)

    def _change(self, slot: Slot) -> None:
        """End the offer of the weights, because they change. Readers that have not received them get an error."""
        super()._change(slot)
        if self._sender:
            self._sender.end()

    async def forward_backward(self, batch: Batch, loss: Loss) -> LossResult:
        """Add the gradients of a batch. On one rank it may be cancelled between micro-batches, and drops them all then.

        DataError, and nothing changes, where `update` raises it, or if an earlier loss of the step is normalised
        otherwise.
        """
        async with self._trainable.turn:
            own, losses = await self._trainable.add(batch, loss, partial(self._check, batch, loss), keeps=True)
            logprobs, values = self._trainable.on_every_rank(losses.values()).numpy()
            source, offsets = self._trainable.source(batch), batch.tokens.offsets
            columns = {"logprobs": Ragged(logprobs, offsets, source=source), "losses": Ragged(values, offsets)}
            metrics = _by_name({name: each.metrics(self._passes.ranks) for name, each in own.items()})
            return LossResult(batch.only().assign(**columns), metrics)

    async def step(self, optimizer: Step | None = None, adapter: str | None = None) -> Metrics:
        """Make one optimizer step with all gradients since the last one. DataError if there are none."""
        async with self._trainable.turn:
            self._trainable.require(self._trainable.slot(adapter), added=True)
            return self._step([DEFAULT_ADAPTER if adapter is None else adapter], optimizer)

    async def logprobs(self, batch: Batch) -> Batch:
        """Add `logprobs`, of the version after all earlier updates."""
        async with self._trainable.turn:
            values = logprobs(self._passes, batch, None, self.check_rows)
            return batch.assign(logprobs=Ragged(values.values, values.offsets, source=self._trainable.source(batch)))

    @staticmethod
    def check_rows(model: LanguageModel, batch: Batch) -> None:
        """Raise DataError if the model cannot read a batch's rows, or follow the experts in them."""
        check_readable(model, batch)
        check_followed(model.routers, batch)

    async def weights(self, adapter: str | None = None) -> Weights:
        """Return this rank's part of the weights, after all earlier updates, with adapters as their `sync` says."""
        async with self._trainable.turn:
            base = adapter is None and DEFAULT_ADAPTER not in self._trainable.slots
            slot = None if base else self._trainable.slot(adapter)
            version = slot.optimizer.steps if slot else 0
            probe = make_probe(self._passes, version, adapter)
            if self._sender:
                weights: Weights = offer_weights(self._sender, version, probe, self._trainable.shards())
            else:
                source = self._sources.setdefault(adapter, WeightSource(changes=self._config.weight_sync == "delta"))
                own = slot.adapter if slot else None
                of = None
                if own and own.config.sync == "adapters":
                    of = AdapterOf(adapter or DEFAULT_ADAPTER, own.config.rank, own.config.alpha)
                weights = source.weights(version, arrays(self._trainable.published(own)), probe, of)
            if self._passes.model.device.type == "cuda":
                torch.cuda.empty_cache()  # an engine on the same GPU may wake next, to take them
            return weights

    async def add_adapter(self, name: str, lora: LoraConfig) -> None:
        """Add an adapter. All ranks start with the same values."""
        async with self._trainable.turn:
            if self._model.adapters is None:
                raise ConfigError(
                    f"{type(self).__name__} trains its whole model, so it can have no adapter {name!r}: set "
                    "policy.lora or policy.adapters, an empty table if none is known before"
                )
            if name in self._trainable.slots:
                raise ConfigError(f"there is an adapter {name!r} already: drop it first, or take another name")
            try:
                name_of_adapter(name)
            except ValueError as error:
                raise ConfigError(str(error)) from None
            self._add(name, lora)

    async def drop_adapter(self, name: str) -> None:
        """Drop an adapter. Raises, after that, the error of its last checkpoint if that could not be written."""
        async with self._trainable.turn:
            slot = self._trainable.slots.get(name)
            if slot is None or slot.adapter is None:
                raise ConfigError(f"there is no adapter {name!r} to drop: there are {sorted(self._trainable.slots)}")
            await slot.state.ended()
            self._drop(name)
            await slot.state.written()

    async def adapters(self) -> dict[str, int]:
        """Return the number of steps of each adapter by name."""
        return {name: slot.optimizer.steps for name, slot in self._trainable.slots.items() if slot.adapter}

    def _add(self, name: str, lora: LoraConfig) -> None:
        model, config = self._model, self._config
        dtype, device = getattr(torch, config.dtype), self._trainable.device
        adapter = add_adapter(model, name, lora, seed=config.seed, dtype=dtype, device=device)
        slot = self._trainable.placed(adapter, lora.optimizer or config.optimizer)
        slot.state.alpha = lora.alpha
        self._trainable.slots[name] = slot

    def _drop(self, name: str) -> None:
        del self._trainable.slots[name]
        self._sources.pop(name, None)
        if self._model.adapters is not None:
            self._model.adapters.drop(self._model.network, name)

    def _write_tables(self, folder: Path) -> None:
        if self._model.adapters is None:
            return
        tables = {name: slot.adapter.config for name, slot in self._trainable.slots.items() if slot.adapter}
        folder.mkdir(parents=True, exist_ok=True)
        dumped = {name: lora.model_dump(mode="json") for name, lora in tables.items()}
        (folder / _TABLES).write_bytes(msgspec.json.encode(dumped))

    async def _restore_tables(self, folder: Path) -> Mapping[str, Slot]:
        """Those that the state does not have are dropped, and begin again if the policy's table declares them."""
        if self._model.adapters is None:
            return self._folders()
        slots, tables = self._trainable.slots, self._tables_in(folder)
        gone, before = slots.keys() - tables.keys(), set(slots)
        try:
            try:
                self._add_missing(tables)
            except ConfigError as error:
                raise ModelError(f"{folder} is the state of another policy: {error}") from error
            inside = {_folder_of(name): slots[name] for name in tables}
            for path, slot in inside.items():
                slot.state.check(str(folder / path))
            for name in gone:
                await slots[name].state.ended()  # until then it reads the weights
        except BaseException:
            self._drop_all(slots.keys() - before)
            raise
        self._drop_all(gone)
        self._add_missing(self._config.declared)
        return inside

    def _tables_in(self, folder: Path) -> Mapping[str, LoraConfig]:
        """Read the tables of the adapters in a state of the whole. ModelError if they cannot be this policy's."""
        only_default = self._trainable.slots.keys() == {DEFAULT_ADAPTER}
        found = self._passes.ranks.together(partial(_tables_in, folder, only_default))
        declared = self._config.declared
        if DEFAULT_ADAPTER in found and DEFAULT_ADAPTER not in declared:
            raise ModelError(
                f"{folder} has the state of an adapter without a name, and this policy's table has no `lora`: set "
                "policy.lora to resume it, or restore it with `adapter = NAME` if it is the state of one adapter"
            )
        return {name: table or declared[name] for name, table in found.items()}

    def _add_missing(self, tables: Mapping[str, LoraConfig]) -> None:
        for name, lora in tables.items():
            if name not in self._trainable.slots:
                self._add(name, lora)

    def _drop_all(self, names: Iterable[str]) -> None:
        for name in names:
            self._drop(name)


def _folder_of(name: str) -> str:
    """Return an adapter's folder in a state of the whole."""
    return "" if name == DEFAULT_ADAPTER else f"{_ADAPTERS}/{name}"


def _tables_in(folder: Path, only_default: bool) -> Mapping[str, LoraConfig | None]:
    """Read the tables of the adapters in a state of the whole. ModelError if it is none of a policy with adapters.

    None: the state has the adapter without a name, but not its table, like older ones. `only_default`: the policy has
    no other.
    """
    file, has_default = folder / _TABLES, (folder / FACTS).is_file()
    if not file.is_file():
        if has_default and only_default:
            return {DEFAULT_ADAPTER: None}
        raise ModelError(
            f"{folder} is not the state of a policy with adapters, because it has no {_TABLES}: give the folder that "
            "`checkpoint` wrote, with `adapter = NAME` if it wrote one adapter alone"
        )
    try:
        raw = msgspec.json.decode(file.read_bytes(), type=dict[str, msgspec.Raw])
        tables: dict[str, LoraConfig | None] = {
            name: LoraConfig.model_validate_json(bytes(table)) for name, table in raw.items()
        }
    except (OSError, ValueError) as error:  # msgspec's and pydantic's are ValueErrors
        raise ModelError(f"{file} cannot be read as tables of adapters: {type(error).__name__}: {error}") from error
    if has_default:
        tables.setdefault(DEFAULT_ADAPTER, None)
    return tables


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
            added, _ = await self._trainable.add(shifted, loss, lambda: None)
            metrics = self._step(added)
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
        return batch.assign(reference_logprobs=logprobs(self._passes, batch, Source("reference"), self.check_rows))

    @staticmethod
    def check_rows(model: LanguageModel, batch: Batch) -> None:
        """Raise DataError if the model cannot read a batch's rows."""
        check_readable(model, batch)

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
