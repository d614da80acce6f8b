"""The suite of samplers finds what is wrong: each of these has one mistake, which the check of that promise tells."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import ClassVar

import ml_dtypes
import numpy as np
import pytest

from meshrl import Batch, ModelError, Ragged, SamplerConfig, Sampling, Weights
from meshrl.testing import PromiseBroken
from meshrl.testing.conformance import SAMPLER, Harness, Subject, interruptions
from meshrl.testing.conformance.samples import NEW, OLD, completions, text_of
from meshrl_torch.sampler import TorchSampler
from tests.conformance.kits import missed


class Changed(TorchSampler):
    """Yields the plain sampler's rows changed."""

    async def generate(self, prompts: Batch, sampling: Sampling) -> AsyncIterator[Batch]:
        async for part in super().generate(prompts, sampling):
            yield self.changed(part, sampling)

    def changed(self, part: Batch, sampling: Sampling) -> Batch:
        raise NotImplementedError


class Misled(TorchSampler):
    """Draws by another request: of prompts without some columns, with other options."""

    forgotten: ClassVar[frozenset[str]] = frozenset()
    options: ClassVar[Mapping[str, object]] = {}

    async def generate(self, prompts: Batch, sampling: Sampling) -> AsyncIterator[Batch]:
        async for part in super().generate(*self.misled(prompts, sampling)):
            yield part

    def misled(self, prompts: Batch, sampling: Sampling) -> tuple[Batch, Sampling]:
        return prompts.drop(*(self.forgotten & {*prompts.names})), sampling.model_copy(update=self.options)


class TellsRoundedLogProbs(Changed):
    def changed(self, part: Batch, sampling: Sampling) -> Batch:
        column = part.sampler_logprobs
        rounded = column.values.astype(ml_dtypes.bfloat16).astype(np.float32)
        return part.assign(sampler_logprobs=Ragged(rounded, column.offsets, source=column.source))


class TellsTheRestrictedDistribution(Changed):
    """What is kept has all of the probability, as an engine has it that tells what it drew from."""

    def changed(self, part: Batch, sampling: Sampling) -> Batch:
        column = part.sampler_logprobs
        whole = np.asarray(column.values, np.float32)
        values = np.where(part.loss_mask.values, np.minimum(whole - np.float32(np.log(sampling.top_p)), 0), whole)
        return part.assign(sampler_logprobs=Ragged(values, column.offsets, source=column.source))


class NamesNoSource(Changed):
    def changed(self, part: Batch, sampling: Sampling) -> Batch:
        column = part.sampler_logprobs
        return part.assign(sampler_logprobs=Ragged(column.values, column.offsets))


def turns(part: Batch) -> Iterator[int]:
    """Where, in all tokens, a row's tokens have the new version for the first time, and others before had the old."""
    for row, versions in enumerate(part.versions):
        if OLD in versions and NEW in versions:
            yield int(part.versions.offsets[row] + np.argmax(versions == NEW))


class StampsATokenLate(Changed):
    """The first token by new weights still has the old version."""

    late = 0

    def changed(self, part: Batch, sampling: Sampling) -> Batch:
        versions = part.versions.values.copy()
        for turn in turns(part):
            versions[turn + self.late] = NEW if self.late else OLD
        return part.assign(versions=Ragged(versions, part.versions.offsets))


class StampsATokenEarly(StampsATokenLate):
    """The last token by old weights has the new version already."""

    late = -1


class StampsItsVersionOnAll(Changed):
    """As if a row had one version: that of its end."""

    def changed(self, part: Batch, sampling: Sampling) -> Batch:
        return part.assign(oldest_version=np.array([row.max() for row in part.versions], np.int32))


class LeavesTheStopText(Changed):
    def changed(self, part: Batch, sampling: Sampling) -> Batch:
        return part.assign(completion=[text_of(tokens) for tokens in completions(part)])


class StopsNoRowsThatGoOn(Misled):
    def misled(self, prompts: Batch, sampling: Sampling) -> tuple[Batch, Sampling]:
        return prompts, sampling.model_copy(update={"stop": ()} if "versions" in prompts else {})


class CallsAllTruncated(Changed):
    def changed(self, part: Batch, sampling: Sampling) -> Batch:
        return part.assign(truncated=np.ones(len(part), np.bool_))


class DropsTheTask(Changed):
    def changed(self, part: Batch, sampling: Sampling) -> Batch:
        return part.drop("row")


class LosesRowsThatWait(Changed):
    """An abort yields what has begun alone."""

    def changed(self, part: Batch, sampling: Sampling) -> Batch:
        return part.select([bool(mask.any()) for mask in part.loss_mask])


class YieldsRowsTwice(TorchSampler):
    async def generate(self, prompts: Batch, sampling: Sampling) -> AsyncIterator[Batch]:
        async for part in super().generate(prompts, sampling):
            yield part
            yield part


class DrawsOnceForAll(TorchSampler):
    """The completions of a prompt are one."""

    async def generate(self, prompts: Batch, sampling: Sampling) -> AsyncIterator[Batch]:
        async for part in super().generate(prompts, sampling.model_copy(update={"n": 1})):
            yield part.repeat(sampling.n)


class IgnoresTemperature(Misled):
    options: ClassVar = {"temperature": 1.0}


class IgnoresTopK(Misled):
    options: ClassVar = {"top_k": 0}


class IgnoresTheSeed(Misled):
    options: ClassVar = {"seed": 0}


class DrawsByTheClock(Misled):
    def misled(self, prompts: Batch, sampling: Sampling) -> tuple[Batch, Sampling]:
        return prompts, sampling.model_copy(update={"seed": int(np.random.default_rng().integers(1 << 30))})


class DrawsByItsPast(Misled):
    """Calls count from the beginning, not from the last load."""

    calls = 0

    def misled(self, prompts: Batch, sampling: Sampling) -> tuple[Batch, Sampling]:
        self.calls += 1
        return prompts, sampling.model_copy(update={"seed": sampling.seed + 1000 * self.calls})


class CountsAllCalls(Misled):
    """Calls beside others count as they do."""

    def misled(self, prompts: Batch, sampling: Sampling) -> tuple[Batch, Sampling]:
        return prompts, Sampling(**sampling.model_dump())


class IgnoresLimitsOfRows(Misled):
    forgotten = frozenset({"max_tokens"})


class BeginsAnew(Misled):
    """Rows that are to go on start from their prompts."""

    forgotten = frozenset({"tokens", "loss_mask", "sampler_logprobs", "versions"})


class KeepsPrompts(TorchSampler):
    """What it has read of a prompt outlives a load: here all that it drew from it."""

    def __init__(self, config: SamplerConfig) -> None:
        super().__init__(config)
        self._kept: dict[tuple[object, ...], Batch] = {}

    async def generate(self, prompts: Batch, sampling: Sampling) -> AsyncIterator[Batch]:
        key = (*prompts.objects("prompt"), sampling.temperature)
        if key not in self._kept:
            self._kept[key] = Batch.concat([part async for part in super().generate(prompts, sampling)])
        yield self._kept[key]


class KeepsItsHead(TorchSampler):
    async def load(self, weights: Weights) -> Batch:
        own = {
            name: tensor.numpy().copy() for name, tensor in self._model.tensors().items() if name == "lm_head.weight"
        }
        return await super().load(Weights(weights.version, {**weights.tensors, **own}))


class TakesWhatFits(TorchSampler):
    """Weights of another dtype are made to fit."""

    async def load(self, weights: Weights) -> Batch:
        fitting = {name: array.astype(np.float32) for name, array in weights.tensors.items()}
        return await super().load(Weights(weights.version, fitting))


class CountsRefusedWeights(TorchSampler):
    async def load(self, weights: Weights) -> Batch:
        try:
            return await super().load(weights)
        except ModelError:
            self._version = weights.version
            raise


class IgnoresItsRecord(TorchSampler):
    async def replay(self, record: Batch) -> None: ...


class KeepsSlots(TorchSampler):
    """A call that is cancelled keeps its room."""

    def __init__(self, config: SamplerConfig) -> None:
        super().__init__(config)
        self._room = asyncio.Semaphore(2)

    async def generate(self, prompts: Batch, sampling: Sampling) -> AsyncIterator[Batch]:
        await self._room.acquire()
        async for part in super().generate(prompts, sampling):
            yield part
        self._room.release()


class LoadsBetweenCalls(TorchSampler):
    """Weights wait for the calls that run."""

    def __init__(self, config: SamplerConfig) -> None:
        super().__init__(config)
        self._busy = asyncio.Lock()

    async def generate(self, prompts: Batch, sampling: Sampling) -> AsyncIterator[Batch]:
        async with self._busy:
            async for part in super().generate(prompts, sampling):
                yield part

    async def load(self, weights: Weights) -> Batch:
        async with self._busy:
            return await super().load(weights)


BUGS: list[tuple[type[TorchSampler], str]] = [
    (TellsRoundedLogProbs, "sampler_log_probs"),
    (NamesNoSource, "sampler_log_probs"),
    (TellsTheRestrictedDistribution, "restricted_draws"),
    (IgnoresTopK, "restricted_draws"),
    (IgnoresTemperature, "frequencies"),
    (IgnoresTheSeed, "seeds"),
    (DrawsByTheClock, "seeds"),
    (DrawsByItsPast, "seeds"),
    (CountsAllCalls, "calls_beside"),
    (DrawsOnceForAll, "completions_of_a_prompt"),
    (DropsTheTask, "columns"),
    (CallsAllTruncated, "ends_of_rows"),
    (IgnoresLimitsOfRows, "ends_of_rows"),
    (LeavesTheStopText, "stop_texts"),
    (StopsNoRowsThatGoOn, "stop_texts_of_rows_that_go_on"),
    (BeginsAnew, "rows_that_go_on"),
    (YieldsRowsTwice, "more_rows_than_slots"),
    (KeepsSlots, "a_cancelled_call"),
    (LosesRowsThatWait, "an_abort"),
    (StampsATokenLate, "numbers_around_a_load"),
    (StampsATokenEarly, "numbers_around_a_load"),
    (StampsItsVersionOnAll, "versions_of_tokens"),
    (LoadsBetweenCalls, "versions_of_tokens"),
    (IgnoresItsRecord, "a_replay"),
    (KeepsItsHead, "greedy_after_a_load"),
    (KeepsPrompts, "a_prompt_that_was_read_before"),
    (TakesWhatFits, "weights_of_another_model"),
    (CountsRefusedWeights, "weights_of_another_model"),
]


async def test_each_wrong_sampler_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interruptions, "_LOADS", 2)  # of eight, each as long as a whole call of LoadsBetweenCalls
    assert not await missed(BUGS, SAMPLER, monkeypatch, KeepsSlots, None)


async def test_a_record_that_is_taken_but_not_repeated_is_found() -> None:
    async with Harness(Subject("torch", replays=False)) as harness:
        with pytest.raises(PromiseBroken, match="a record is accepted"):
            await harness.run(interruptions.a_replay)
