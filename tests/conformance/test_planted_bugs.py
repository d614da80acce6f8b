"""The suite finds what is wrong: each of these backends has one mistake, which the check of that promise tells."""

import asyncio
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from meshrl import Batch, Metrics, PolicyConfig, Ragged, Weights
from meshrl.algo import Loss
from meshrl.errors import DataError
from meshrl.testing.conformance import CHECKS
from meshrl_torch.model import saving as checkpoint
from meshrl_torch.train.one_rank import TorchCritic, TorchPolicy, TorchReference
from meshrl_torch.train.optimizer import Optimizer
from meshrl_torch.weights.transfer import copy_into
from tests.conformance.kits import Bugs, missed


class NormalisesByRank(TorchPolicy):
    """As if two ranks divided by their own tokens, and their gradients were averaged."""

    async def update(self, batch: Batch, loss: Loss) -> Metrics:
        tokens = np.array([float(mask.sum()) for mask in batch.loss_mask])
        share = np.ones(len(batch), np.float32)
        for rows in batch.plan(2):
            share[rows] = tokens.sum() / (2 * max(1, tokens[rows].sum()))
        return await super().update(
            batch.assign(advantages=share * np.asarray(batch.row("advantages"), np.float32)), loss
        )


def adamw(policy: TorchPolicy) -> torch.optim.AdamW:
    optimizer = policy._trainable.optimizer
    assert isinstance(optimizer, Optimizer)
    return optimizer._adamw


class ClipsByShard(TorchPolicy):
    """As if two ranks clipped the gradient of their halves of the parameters, each by the norm of its half."""

    def __init__(self, config: PolicyConfig) -> None:
        whole = config.optimizer.model_copy(update={"max_grad_norm": None})
        super().__init__(config.model_copy(update={"optimizer": whole}))
        parameters = list(self._model.network.parameters())

        def clip(*_: object) -> None:
            for half in (parameters[::2], parameters[1::2]):
                torch.nn.utils.clip_grad_norm_(half, config.optimizer.max_grad_norm or 1)

        adamw(self).register_step_pre_hook(clip)


class ExportsBeforeTheUpdate(TorchPolicy):
    """Its weights are those before the last update, under the version after it."""

    _before: Weights | None = None

    async def update(self, batch: Batch, loss: Loss) -> Metrics:
        self._before = await super().weights()
        return await super().update(batch, loss)

    async def weights(self) -> Weights:
        now = await super().weights()
        return self._before.with_version(now.version) if self._before else now


class CrashesOnAnEmptyRank(TorchPolicy):
    """As if each of two ranks looked at its first row."""

    async def update(self, batch: Batch, loss: Loss) -> Metrics:
        assert [part.tokens[0] for part in batch.split(2)]
        return await super().update(batch, loss)


class WaitsForAnEmptyRank(TorchPolicy):
    """As if a rank with rows waited for one without, which does not come."""

    async def update(self, batch: Batch, loss: Loss) -> Metrics:
        if not all(map(len, batch.split(2))):
            await asyncio.Event().wait()
        return await super().update(batch, loss)


class TellsTheRowsOfARank(TorchPolicy):
    """The mean over ranks of a number that each counted of its own rows."""

    async def update(self, batch: Batch, loss: Loss) -> Metrics:
        metrics = await super().update(batch, loss)
        return Metrics({**metrics.entries, "rows": (len(batch) / 2, 1)})


class MixesRows(TorchPolicy):
    """Scores rows from the last to the first, and gives the log-probs in that order."""

    async def logprobs(self, batch: Batch) -> Batch:
        scored = (await super().logprobs(batch.select(np.arange(len(batch))[::-1]))).ragged("logprobs")
        return batch.assign(logprobs=Ragged(scored.values, scored.offsets, source=scored.source))


class IgnoresTemperature(TorchPolicy):
    async def logprobs(self, batch: Batch) -> Batch:
        plain = batch.drop("temperature") if "temperature" in batch else batch
        return batch.assign(logprobs=(await super().logprobs(plain)).ragged("logprobs"))


class CountsRefusedUpdates(TorchPolicy):
    """An update that is refused moves the learning rate and the version on."""

    async def update(self, batch: Batch, loss: Loss) -> Metrics:
        try:
            return await super().update(batch, loss)
        except DataError:
            self._trainable.optimizer.steps += 1
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


class SavesOnce(TorchPolicy):
    """Writes the folder that is not there, and leaves one that is."""

    async def save(self, folder: str) -> None:
        if not Path(folder).exists():
            await super().save(folder)


class ForgetsMoments(TorchPolicy):
    """Takes from a checkpoint the weights and the version alone."""

    async def restore(self, folder: str) -> None:
        await super().restore(folder)
        adamw(self).state.clear()


class SavesNoHead(TorchCritic):
    async def save(self, folder: str) -> None:
        checkpoint.write(self._model, folder)


class KeepsItsOwnWeights(TorchReference):
    async def load(self, weights: Weights) -> None: ...


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
    "clipped_loss_by_token_mean": [NormalisesByRank],
    "clipped_loss_by_sequence_mean": [ClipsByShard],
    "weights": [ExportsBeforeTheUpdate],
    "a_sampler_takes_the_weights": [ExportsBeforeTheUpdate],
    "uneven_rows": [CrashesOnAnEmptyRank, WaitsForAnEmptyRank],
    "clipped_loss_by_a_constant": [TellsTheRowsOfARank],
    "the_order_of_rows": [MixesRows],
    "log_probs": [IgnoresTemperature],
    "nothing_to_learn": [CountsRefusedUpdates],
    "a_cancelled_update": [StepsInPart],
    "calls_at_once": [UpdatesTwoAtOnce],
    "the_same_bits": [RoundsDifferently],
    "saving": [SavesOnce],
    "a_policy_goes_on": [ForgetsMoments],
    "critic_updates": [SavesNoHead],
    "a_reference_takes_weights": [KeepsItsOwnWeights],
    "weights_that_a_reference_refuses": [TakesWhatItRefuses, BelievesWhatArrives],
}


async def test_each_planted_bug_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not await missed(BUGS, CHECKS, monkeypatch, WaitsForAnEmptyRank, CrashesOnAnEmptyRank)
