"""The sampler of the torch backend: a decode loop for Hugging Face models."""

from collections.abc import AsyncIterator
from functools import partial

import numpy as np
import torch

from meshrl.data import ArrivalLog, Batch, Weights
from meshrl.errors import ModelError
from meshrl.mesh import current_rank
from meshrl.roles import SamplerConfig, Sampling, SteppingSampler
from meshrl_torch.model.loading import load
from meshrl_torch.model.lora import adapt, adapters
from meshrl_torch.model.routing import routed
from meshrl_torch.model.scoring import one_by_one, predicted
from meshrl_torch.sample.cache import Cache
from meshrl_torch.sample.decoder import Decoder
from meshrl_torch.sample.draw import Draw, key
from meshrl_torch.sample.joint import YIELD_STEPS, Joint
from meshrl_torch.sample.rollouts import Rollouts
from meshrl_torch.weights.live_weights import LiveWeights
from meshrl_torch.weights.probe import check, difference
from meshrl_torch.weights.transfer import import_weights


class TorchSampler(SteppingSampler):
    """Continuous batching on one rank.

    Samples depend on the seeds, the weights' version, the number of calls since they were loaded, and the row's number
    in the call. They do not depend on slots, or on how a mesh divided the rows.
    """

    def __init__(self, config: SamplerConfig) -> None:
        torch.set_num_threads(current_rank().threads)
        self._config = config
        self._model = load(config)
        adapt(self._model, config.lora, config.seed)
        tensors = self._model.tensors()
        self._taken = adapters(tensors) if config.lora else tensors
        """The tensors that new weights are copied to."""
        self._routed = routed(self._model.routers) if config.record_experts else (0, 0)
        self._version = 0
        self._refused = ""
        """Why the model's samples cannot be trusted. Empty if they can."""
        self._arrivals = ArrivalLog()
        self._caches: list[Cache] = []
        self._joints: dict[Sampling, Joint] = {}
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
        cache = self._caches.pop() if self._caches else Cache()
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
            joint = self._joints.get(sampling)
            if joint is not None and joint.room >= len(request.limits):
                part = joint.join(call, request, seed)
            else:
                cache, slots = self._caches.pop() if self._caches else Cache(), self._config.slots
                decoder = Decoder(self._model, cache, request, Draw(sampling, seed), slots, routed=self._routed)
                joint = self._joints[sampling] = Joint(decoder, self._usable)
                part = joint.begin(call, partial(self._ended, sampling, joint, cache))
            try:
                while (finished := await joint.finished(part)) is not None:
                    yield rollouts.batch(finished, version)
            finally:
                joint.leave(part)

    def _ended(self, sampling: Sampling, joint: Joint, cache: Cache) -> None:
        self._caches.append(cache)
        if self._joints.get(sampling) is joint:
            del self._joints[sampling]

    def _usable(self) -> int:
        """Return the version of the weights. ModelError if they cannot be trusted."""
        if self._refused:
            raise ModelError(self._refused)
        return self._version

    async def load(self, weights: Weights) -> Batch:
        """Copy the weights in place. Rows being decoded use them from their next token on.

        ModelError, and the old ones stay in use, if they are of another model or differ from the sent bytes. If the
        model then computes something else than the policy, or only part of weights that are poured in place has
        arrived, it samples no more until others come.
        """
        async with self.generate_calls.loading() as places:
            if isinstance(weights, LiveWeights):
                weights.pour(self._taken, partial(self._refuse, weights))
            else:
                import_weights(self._taken, weights)
            self._arrivals.note(weights)
            self._version, self._refused = weights.version, ""
            if weights.probe is None:
                return places
            found = difference(self._model, one_by_one(partial(predicted, self._model)), weights.probe)
            try:
                check(weights, found, self._config.dtype)
            except ModelError as error:
                self._refused = str(error)
                raise
        return places.assign(difference=np.full(len(places), found))

    def _refuse(self, weights: Weights) -> None:
        """Sample nothing while only some tensors are new."""
        self._refused = f"weights of version {weights.version} did not come whole, and some are in use: publish again"
