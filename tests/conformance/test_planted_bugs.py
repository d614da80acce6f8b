"""The suite finds what is wrong: each of these backends has one mistake, which the check of that promise tells."""

import asyncio
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from meshrl import Batch, Metrics, PolicyConfig, Weights
from meshrl.algo import Loss
from meshrl.errors import DataError
from meshrl.testing.conformance import CHECKS
from meshrl_torch.model import saving as checkpoint
from meshrl_torch.train.one_rank import TorchCritic, TorchPolicy, TorchReference
from meshrl_torch.weights.transfer import copy_into
from tests.conformance.kits import Bugs, missed


class ExportsBeforeTheUpdate(TorchPolicy):
    """Its weights are those before the last update, under the version after it."""

    _before: Weights | None = None

    async def update(self, batch: Batch, loss: Loss) -> Metrics:
        self._before = await super().weights()
        return await super().update(batch, loss)

    async def weights(self, adapter: str | None = None) -> Weights:
        now = await super().weights(adapter)
        return self._before.with_version(now.version) if self._before else now


class WaitsForAnEmptyRank(TorchPolicy):
    """As if a rank with rows waited for one without, which does not come."""

    async def update(self, batch: Batch, loss: Loss) -> Metrics:
        if not all(map(len, batch.split(2))):
            await asyncio.Event().wait()
        return await super().update(batch, loss)


class CountsRefusedUpdates(TorchPolicy):
    """An update that is refused moves the learning rate and the version on."""

    async def update(self, batch: Batch, loss: Loss) -> Metrics:
        try:
            return await super().update(batch, loss)
        except DataError:
            self._trainable.slot(None).optimizer.steps += 1
            raise


class StepsInPart(TorchPolicy):
    """A cancelled update has changed some parameters already."""

    async def update(self, batch: Batch, loss: Loss) -> Metrics:
        try:
            return await super().update(batch, loss)
        except asyncio.CancelledError:
            with torch.no_grad():
                next(iter(self._model.network.parameters())).mul_(1.001)
            raise


class UpdatesTwoAtOnce(TorchPolicy):
    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        trainable: Any = self._trainable
        trainable.turn = nullcontext()  # in place of a lock


class RoundsDifferently(TorchPolicy):
    """Adds in an order that no two runs share: too little to see but in the bits."""

    async def update(self, batch: Batch, loss: Loss) -> Metrics:
        metrics = await super().update(batch, loss)
        with torch.no_grad():
            for parameter in self._model.network.parameters():
                parameter.mul_(1 + 1e-6 * np.random.default_rng().random())
        return metrics


class ForgetsMoments(TorchPolicy):
    """Takes from a checkpoint the weights and the version alone."""

    async def restore(self, folder: str, adapter: str | None = None, optimizer: bool = True) -> None:
        await super().restore(folder, adapter, optimizer)
        stepper: Any = self._trainable.slot(None).optimizer
        stepper._adamw.state.clear()


class SavesNoHead(TorchCritic):
    async def save(self, folder: str, adapter: str | None = None) -> None:
        checkpoint.write(self._model, folder)


class TakesWhatItRefuses(TorchReference):
    """Looks at the weights after it has copied them."""

    async def load(self, weights: Weights) -> None:
        for name, tensor in self._passes.model.tensors().items():
            if name in weights.tensors and tensor.shape == weights.tensors[name].shape:
                copy_into(tensor, weights.tensors[name])
        await super().load(weights)


class BelievesWhatArrives(TorchReference):
    """Does not ask whether the bytes are those that were sent."""

    async def load(self, weights: Weights) -> None:
        await super().load(Weights(weights.version, weights.tensors))


BUGS: Bugs = {
    "weights": [ExportsBeforeTheUpdate],
    "a_sampler_takes_the_weights": [ExportsBeforeTheUpdate],
    "uneven_rows": [WaitsForAnEmptyRank],
    "nothing_to_learn": [CountsRefusedUpdates],
    "a_cancelled_update": [StepsInPart],
    "calls_at_once": [UpdatesTwoAtOnce],
    "the_same_bits": [RoundsDifferently],
    "a_policy_goes_on": [ForgetsMoments],
    "critic_updates": [SavesNoHead],
    "weights_that_a_reference_refuses": [TakesWhatItRefuses, BelievesWhatArrives],
}


async def test_each_planted_bug_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not await missed(BUGS, CHECKS, monkeypatch, WaitsForAnEmptyRank)
