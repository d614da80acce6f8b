"""The sampler of the torch backend: a decode loop for Hugging Face models, which calls can share."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np

from meshrl.data import ArrivalLog, Batch, Source, Weights
from meshrl.errors import ModelError
from meshrl.roles import GenerateCall, SamplerConfig, Sampling, SteppingSampler
from meshrl_torch.model.loading import load
from meshrl_torch.model.lora import adapt, adapters
from meshrl_torch.model.routing import routed
from meshrl_torch.model.scoring import Passes, logprobs, most_probable, one_by_one, predicted
from meshrl_torch.ranks.process_group import own_rank
from meshrl_torch.sample.cache import Slots
from meshrl_torch.sample.decoder import PREFILL_TOKENS, Decoder
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

    def __init__(self, decoder: Decoder, version: Callable[[], int]) -> None:
        """`version`: returns that of the weights before each step. Its error ends all calls."""
        self._decoder, self._version = decoder, version
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
                    self._decoder.step(self._version())
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
        self._model = adapt(model, config.lora, config.seed)
        tensors = self._model.tensors()
        self._taken = adapters(tensors) if config.lora else tensors
        """The tensors that new weights are copied to."""
        self._routed = routed(self._model) if config.record_experts else (0, 0)
        self._version = 0
        self._refused = ""
        """Why the model's samples cannot be trusted. Empty if they can."""
        self._arrivals = ArrivalLog()
        self._caches: list[Slots] = []
        self._shared: dict[Sampling, SharedDecoding] = {}
        """The newest for each sampling."""

    async def generate(self, prompts: Batch, sampling: Sampling) -> AsyncIterator[Batch]:
        """Yield finished rollouts, those of some steps together. Without rows, yields one empty batch.

        ModelError if the last weights do not compute the same as the policy.
        """
        rollouts = Rollouts(self._model, prompts, sampling, self._routed)
        if len(rollouts.ended.rows):
            yield rollouts.batch(rollouts.ended, self._version)
        if sampling.joins and len(rollouts.request.limits) and not self.generate_calls.is_replayed:
            async for batch in self._joined(rollouts, sampling):
                yield batch
            return
        cache = self._caches.pop() if self._caches else self._new_cache()
        try:
            async with self.generate_calls.begin(sampling.beside) as call:
                version = self._version
                draw = Draw(sampling, key(self._config.seed, sampling.seed, version, call.turn))
                slots, request = self._config.slots, rollouts.request
                decoder = Decoder(self._model, cache, request, draw, slots, routed=self._routed)
                while decoder.busy:
                    finished = decoder.take() if call.steps % YIELD_STEPS == 0 else None
                    if finished is not None:
                        yield rollouts.batch(finished, version)
                    if not await call.step():
                        decoder.stop()
                        break
                    version = self._usable()
                    decoder.step(version)
        finally:
            self._caches.append(cache)
        finished = decoder.take()
        if finished is not None or not len(rollouts.rows):
            yield rollouts.batch(finished or rollouts.ended, version)

    async def _joined(self, rollouts: Rollouts, sampling: Sampling) -> AsyncIterator[Batch]:
        """Decode rows together with those of other calls."""
        request = rollouts.request
        async with self.generate_calls.begin() as call:
            version = self._version
            seed = key(self._config.seed, sampling.seed, version, call.turn)
            shared = self._shared.get(sampling)
            if shared is not None and shared.room >= len(request.limits):
                part = shared.join(call, request, seed)
            else:
                cache, slots = self._caches.pop() if self._caches else self._new_cache(), self._config.slots
                decoder = Decoder(self._model, cache, request, Draw(sampling, seed), slots, routed=self._routed)
                shared = self._shared[sampling] = SharedDecoding(decoder, self._usable)
                part = shared.begin(call, partial(self._ended, sampling, shared, cache))
            try:
                while (finished := await shared.finished(part)) is not None:
                    yield rollouts.batch(finished, version)
            finally:
                shared.leave(part)

    def _ended(self, sampling: Sampling, shared: SharedDecoding, cache: Slots) -> None:
        self._caches.append(cache)
        if self._shared.get(sampling) is shared:
            del self._shared[sampling]

    def _usable(self) -> int:
        """Return the version of the weights. ModelError if they cannot be trusted."""
        if self._refused:
            raise ModelError(self._refused)
        return self._version

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
        async with self.generate_calls.loading() as places:
            if isinstance(weights, LiveWeights):
                weights.load_into(self._taken, partial(self._refuse, weights))
            else:
                import_weights(self._taken, weights)
            self._arrivals.note(weights)
            self._version, self._refused = weights.version, ""
            if weights.probe is None:
                return places
            difference = probe_difference(self._model, one_by_one(partial(predicted, self._model)), weights.probe)
            try:
                check_probe(weights, difference, self._config.dtype)
            except ModelError as error:
                self._refused = str(error)
                raise
        return places.assign(difference=np.full(len(places), difference))

    def _refuse(self, weights: Weights) -> None:
        """Sample nothing while only some tensors are new."""
        self._refused = f"weights of version {weights.version} did not come whole, and some are in use: publish again"
