"""The sampler of the torch backend: a decode loop for Hugging Face models, which calls can share."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import numpy as np
import torch

from meshrl.data import BASE, AdapterOf, ArrivalLog, Batch, Source, Weights
from meshrl.errors import ConfigError, DataError, ModelError
from meshrl.roles import GenerateCall, LoraConfig, SamplerConfig, Sampling, SteppingSampler
from meshrl_torch.model.adapted import Adapters
from meshrl_torch.model.loading import load
from meshrl_torch.model.lora import add_adapter
from meshrl_torch.model.routing import routed
from meshrl_torch.model.scoring import Passes, logprobs, most_probable, one_by_one, predicted
from meshrl_torch.ranks.process_group import own_rank
from meshrl_torch.sample.cache import Slots
from meshrl_torch.sample.decoder import PREFILL_TOKENS, Decoder, begun
from meshrl_torch.sample.draw import Draw, UInt64, key
from meshrl_torch.sample.memory import remembered
from meshrl_torch.sample.rollouts import Finished, Request, Rollouts
from meshrl_torch.weights.live_weights import LiveWeights
from meshrl_torch.weights.transfer import check_probe, import_weights, probe_difference

YIELD_STEPS: Final = 8
"""Decode steps between two batches of finished rows. Making a batch costs as much as a step of a tiny model."""


@dataclass(frozen=True)
class JoinedCall:
    """One of the calls that decode together."""

    call: GenerateCall
    number: int
    rows: asyncio.Queue[Finished | Exception | None] = field(default_factory=asyncio.Queue)
    """Finished or aborted rows, and at the end None, or an error."""

    def end(self, error: Exception | None = None) -> None:
        """End the call: no more rows come."""
        self.call.end()
        self.rows.put_nowait(error)


class SharedDecoding:
    """Calls that decode together, and the task that steps them: each step is one forward pass over all their rows.

    Many small calls would otherwise be decoded in many small passes, and each costs almost as much as a large one. A
    row's samples depend only on its call's seed. The last bits of its log-probs may depend on the rows next to it, so
    calls join only with `JoinedSampling`.
    """

    def __init__(self, decoder: Decoder, versions: Callable[[], Mapping[str, int]]) -> None:
        """`versions`: returns those of all adapters before each step. Its error ends all calls."""
        self._decoder, self._versions = decoder, versions
        self._parts: dict[int, JoinedCall] = {}
        """By number."""
        self._steps = 0
        self._stepping: asyncio.Task[None] | None = None

    @property
    def room(self) -> int:
        """Number of rows that another call may bring. 0 if all calls have ended."""
        return self._decoder.room if self._parts else 0

    def begin(self, call: GenerateCall, ended: Callable[[], None]) -> JoinedCall:
        """Add the call whose rows the decoder was made with. `ended` is called when all calls have ended."""
        part = self._parts[0] = JoinedCall(call, 0)
        self._stepping = asyncio.create_task(self._step())
        self._stepping.add_done_callback(lambda _: ended())
        return part

    def join(self, call: GenerateCall, request: Request, seed: UInt64) -> JoinedCall:
        """Add another call, for whose rows there is room."""
        number = self._decoder.add(request, seed)
        return self._parts.setdefault(number, JoinedCall(call, number))

    async def finished(self, part: JoinedCall) -> Finished | None:
        """Return the next finished or aborted rows of a call. None if it has no more."""
        rows = await part.rows.get()
        if isinstance(rows, Exception):
            raise rows
        return rows

    def leave(self, part: JoinedCall) -> None:
        """Drop the unfinished rows of a call."""
        if self._parts.pop(part.number, None):
            self._decoder.stop(part.number)
            self._decoder.take(part.number)

    async def _step(self) -> None:
        try:
            while self._parts:
                await asyncio.sleep(0)  # others run, which may load weights; replays do not join
                for number, part in list(self._parts.items()):
                    if part.call.aborted:
                        self._decoder.stop(number)
                        self._hand_over(part, is_last=True)
                    else:
                        part.call.count()
                if self._parts:
                    self._decoder.step(self._versions())
                    self._steps += 1
                    for number in list(self._decoder.finished):
                        self._hand_over(self._parts[number], is_last=not self._decoder.has(number))
        except Exception as error:  # noqa: BLE001 -- raised by each of the calls
            for part in self._parts.values():
                part.end(error)
            self._parts.clear()

    def _hand_over(self, part: JoinedCall, is_last: bool) -> None:
        """Hand over finished rows, after the call's last step or now and then."""
        if (is_last or self._steps % YIELD_STEPS == 0) and (rows := self._decoder.take(part.number)) is not None:
            part.rows.put_nowait(rows)
        if is_last:
            self._parts.pop(part.number).end()


class TorchSampler(SteppingSampler):
    """Continuous batching on one rank.

    Samples depend on the seeds, the weights' version, the number of calls since they were loaded, and the row's number
    in the call. They do not depend on slots, or on how a mesh divided the rows.
    """

    def __init__(self, config: SamplerConfig) -> None:
        own_rank()
        self._config = config
        model, self._new_cache = remembered(load(config))
        self._adapters = Adapters()
        self._model = replace(model, adapters=self._adapters)
        for name, lora in config.declared.items():
            self._add(name, lora)
        self._routed = routed(self._model) if config.record_experts else (0, 0)
        self._versions = dict.fromkeys((BASE, *self._adapters.named), 0)
        """Of the whole model, and of each adapter by name."""
        self._refused = ""
        """Why the model's samples cannot be trusted. Empty if they can."""
        self._arrivals = ArrivalLog()
        self._caches: list[Slots] = []
        self._fullest = 0.0
        """The highest share of its slots that rows of a call were in since the last weights."""
        self._shared: dict[Sampling, SharedDecoding] = {}
        """The newest for each sampling."""
        self._busy = Counter[str]()
        """Number of running calls with rows of each adapter."""

    async def generate(self, prompts: Batch, sampling: Sampling) -> AsyncIterator[Batch]:
        """Yield finished rollouts, those of some steps together. Without rows, yields one empty batch.

        ModelError if the last weights do not compute the same as the policy.
        """
        rollouts = Rollouts(
            self._model, prompts, sampling, self._routed, self._adapters.named, is_repeated=True, sees=True
        )
        for row in range(len(rollouts.request.limits)):  # a fault is the caller's, not that of calls it joins
            begun(self._model, rollouts.request, row)
        names = set(rollouts.request.adapters.tolist())
        self._busy.update(names)
        try:
            async for batch in self._generated(rollouts, sampling):
                yield batch
        finally:
            self._busy.subtract(names)

    async def _generated(self, rollouts: Rollouts, sampling: Sampling) -> AsyncIterator[Batch]:
        if len(rollouts.ended.rows):
            yield rollouts.batch(rollouts.ended, self._versions)
        if sampling.joins and len(rollouts.request.limits) and not self.generate_calls.is_replayed:
            async for batch in self._joined(rollouts, sampling):
                yield batch
            return
        cache = self._caches.pop() if self._caches else self._new_cache()
        try:
            async with self.generate_calls.begin(sampling.beside) as call:
                versions = dict(self._versions)
                draw = Draw(sampling, self._seeds(rollouts, sampling, call))
                slots, request = self._config.slots, rollouts.request
                decoder = Decoder(self._model, cache, request, draw, slots, routed=self._routed)
                while decoder.busy:
                    finished = decoder.take() if call.steps % YIELD_STEPS == 0 else None
                    if finished is not None:
                        yield rollouts.batch(finished, versions)
                    if not await call.step():
                        decoder.stop()
                        break
                    versions = dict(self._usable())
                    decoder.step(versions)
                    self._fullest = max(self._fullest, decoder.filled)
        finally:
            self._caches.append(cache)
        finished = decoder.take()
        if finished is not None or not len(rollouts.rows):
            yield rollouts.batch(finished or rollouts.ended, versions)

    async def _joined(self, rollouts: Rollouts, sampling: Sampling) -> AsyncIterator[Batch]:
        """Decode rows together with those of other calls."""
        request = rollouts.request
        async with self.generate_calls.begin() as call:
            versions = dict(self._versions)
            seed = self._seeds(rollouts, sampling, call)
            shared = self._shared.get(sampling)
            if shared is not None and shared.room >= len(request.limits):
                part = shared.join(call, request, seed)
            else:
                cache, slots = self._caches.pop() if self._caches else self._new_cache(), self._config.slots
                decoder = Decoder(self._model, cache, request, Draw(sampling, seed), slots, routed=self._routed)

                def before() -> Mapping[str, int]:
                    self._fullest = max(self._fullest, decoder.filled)
                    return self._usable()

                shared = self._shared[sampling] = SharedDecoding(decoder, before)
                part = shared.begin(call, partial(self._ended, sampling, shared, cache))
            try:
                while (finished := await shared.finished(part)) is not None:
                    yield rollouts.batch(finished, versions)
            finally:
                shared.leave(part)

    def _ended(self, sampling: Sampling, shared: SharedDecoding, cache: Slots) -> None:
        self._caches.append(cache)
        if self._shared.get(sampling) is shared:
            del self._shared[sampling]

    def _seeds(self, rollouts: Rollouts, sampling: Sampling, call: GenerateCall) -> UInt64:
        """Return what determines each row's random numbers, uint64[rows].

        Among others these are the version of its adapter, and the number of calls since that was loaded.
        """
        names, number = np.unique(rollouts.request.adapters, return_inverse=True)
        seeds = [
            key(self._config.seed, sampling.seed, self._versions[name], call.turn_of(name)) for name in map(str, names)
        ]
        return np.array(seeds, np.uint64)[number]

    def _usable(self) -> Mapping[str, int]:
        """Return the versions of all adapters. ModelError if the weights cannot be trusted."""
        if self._refused:
            raise ModelError(self._refused)
        return self._versions

    async def logprobs(self, batch: Batch, top: int = 0) -> Batch:
        """Add `logprobs`, and with `top` the most probable tokens at each place. The first weights are version 0."""
        self._usable()
        model = self._model
        passes = Passes(model, one_by_one(partial(predicted, model)), PREFILL_TOKENS, split=model.split)
        scored = batch.assign(logprobs=logprobs(passes, batch, Source("sampler")))
        if not top:
            return scored
        ids, best = most_probable(model, batch, min(top, model.known), PREFILL_TOKENS, model.split)
        return scored.assign(top_tokens=ids, top_logprobs=best)

    async def load(self, weights: Weights) -> Batch:
        """Copy the weights in place. Rows being decoded use them from their next token on.

        ModelError, and the old ones stay in use, if they are of another model or differ from the sent bytes. If the
        model then computes something else than the policy, or only part of weights that are loaded in place has
        arrived, it samples no more until others come.
        """
        async with self.generate_calls.loading(weights.adapter.name if weights.adapter else BASE) as places:
            if weights.adapter is not None:
                name, difference = weights.adapter.name, self._load_adapter(weights, weights.adapter)
            else:
                name, difference = BASE, self._load_whole(weights)
            self._arrivals.note(weights)
            self._versions[name] = weights.version
        told = {"cache": self._fullest, **({} if difference is None else {"difference": difference})}
        self._fullest = 0.0
        return places.assign(**{name: np.full(len(places), value) for name, value in told.items()})

    async def drop_adapter(self, name: str) -> None:
        """Forget an adapter. DataError if there is none of that name, or rows are still decoded with it."""
        if name not in self._adapters.named:
            known = ", ".join(self._adapters.named) or "none"
            raise DataError(f"there is no adapter {name!r} to drop: there are {known}")
        if self._busy[name]:
            raise DataError(
                f"the adapter {name!r} decodes rows of {self._busy[name]} calls of `generate`: wait for them, or abort "
                "them"
            )
        self._adapters.drop(self._model.network, name)
        del self._versions[name]

    def _load_whole(self, weights: Weights) -> float | None:
        """Copy a whole model's weights into the base. Returns their difference from the policy's if it was measured."""
        tensors = self._model.tensors()
        if self._config.lora is not None:
            raise ModelError(
                f"weights of version {weights.version} belong to another model: they are whole, and this sampler adds "
                "adapters to the model that it has: give the policy and this role the same `lora`"
            )
        if isinstance(weights, LiveWeights):
            weights.load_into(tensors, partial(self._refuse, weights))
        else:
            import_weights(tensors, weights)
        self._refused = ""
        try:
            return self._difference(weights, BASE)
        except ModelError as error:
            self._refused = str(error)
            self._versions[BASE] = weights.version
            raise

    def _load_adapter(self, weights: Weights, of: AdapterOf) -> float | None:
        """Copy the weights of an adapter, which is added if it is new. Returns their difference, as for whole ones.

        After an error the old ones stay in use.
        """
        held = self._adapters.named.get(of.name)
        new, has = held is None, held.config if held else LoraConfig(rank=of.rank, alpha=of.alpha)
        if (has.rank, has.alpha) != (of.rank, of.alpha):
            raise ModelError(
                f"weights of version {weights.version} belong to another model: the adapter {of.name!r} has rank = "
                f"{of.rank} and alpha = {of.alpha}, and this sampler's has {has.rank} and {has.alpha}: give it the "
                "same in both tables, or call drop_adapter first"
            )
        if new:
            targets = tuple({name.partition(".lora_")[0]: None for name in weights.tensors})
            lora = LoraConfig(rank=of.rank, alpha=of.alpha, targets=targets, sync="adapters")
            try:
                self._add(of.name, lora)
            except ConfigError as error:
                raise ModelError(f"weights of version {weights.version} belong to another model: {error}") from error
        own = self._adapters.named[of.name].parameters
        before = {name: each.detach().clone() for name, each in own.items()}
        try:
            import_weights(own, weights)
            return self._difference(weights, of.name)
        except BaseException:
            for name, each in own.items():
                each.data.copy_(before[name])
            if new:
                self._adapters.drop(self._model.network, of.name)
            raise

    def _add(self, name: str, lora: LoraConfig) -> None:
        dtype, device = getattr(torch, self._config.dtype), self._model.device
        add_adapter(self._model, name, lora, seed=self._config.seed, dtype=dtype, device=device)

    def _difference(self, weights: Weights, adapter: str) -> float | None:
        """Return the difference from the policy's log-probs, None without a probe. ModelError if it is too large."""
        if weights.probe is None:
            return None
        predict = one_by_one(partial(predicted, self._model))
        difference = probe_difference(self._model, predict, weights.probe, adapter)
        check_probe(weights, difference, self._config.dtype)
        return difference

    def _refuse(self, weights: Weights) -> None:
        """Sample nothing while only some tensors are new."""
        self._refused = f"weights of version {weights.version} did not come whole, and some are in use: publish again"
