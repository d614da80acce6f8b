"""The backends that sample keep the suite's promises, and the suite finds what is wrong in samplers of one mistake."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from meshrl import Batch, Ragged, SamplerConfig, Sampling, Weights
from meshrl.testing import PromiseBroken, conformance
from meshrl.testing.conformance import SAMPLER, Check, Harness, Subject, Trial, draws, interruptions, rows
from meshrl.testing.conformance.samples import NEW, OLD, completions, drawn, questions, text_of
from meshrl_torch.sample.sampler import TorchSampler
from tests.conformance.kits import Bugs, asked, keep, missed


def tells_rounded_log_probs(part: Batch, _: Sampling) -> Batch:
    column = part.sampler_logprobs
    rounded = column.values.astype(ml_dtypes.bfloat16).astype(np.float32)
    return part.assign(sampler_logprobs=Ragged(rounded, column.offsets, source=column.source))


def tells_the_restricted_distribution(part: Batch, sampling: Sampling) -> Batch:
    """What is kept has all of the probability, as an engine has it that tells what it drew from."""
    column = part.sampler_logprobs
    whole = np.asarray(column.values, np.float32)
    values = np.where(part.loss_mask.values, np.minimum(whole - np.float32(np.log(sampling.top_p)), 0), whole)
    return part.assign(sampler_logprobs=Ragged(values, column.offsets, source=column.source))


def turns(part: Batch) -> Iterator[int]:
    """Where, in all tokens, a row's tokens have the new version for the first time, and others before had the old."""
    for row, versions in enumerate(part.versions):
        if OLD in versions and NEW in versions:
            yield int(part.versions.offsets[row] + np.argmax(versions == NEW))


def stamps_a_token_late(part: Batch, _: Sampling) -> Batch:
    versions = part.versions.values.copy()
    versions[[*turns(part)]] = OLD
    return part.assign(versions=Ragged(versions, part.versions.offsets))


def stamps_its_version_on_all(part: Batch, _: Sampling) -> Batch:
    return part.assign(oldest_version=np.array([row.max() for row in part.versions], np.int32))


def leaves_the_stop_text(part: Batch, _: Sampling) -> Batch:
    return part.assign(completion=[text_of(tokens) for tokens in completions(part)])


def calls_all_truncated(part: Batch, _: Sampling) -> Batch:
    return part.assign(truncated=np.ones(len(part), np.bool_))


def drops_the_task(part: Batch, _: Sampling) -> Batch:
    return part.drop("row")


def loses_rows_that_wait(part: Batch, _: Sampling) -> Batch:
    return part.select([bool(mask.any()) for mask in part.loss_mask])


def draws_once_for_all(part: Batch, sampling: Sampling) -> Batch:
    return part.repeat(sampling.n)


def ignores(**options: Any) -> Callable[[Batch, Sampling], tuple[Batch, Sampling]]:
    return lambda prompts, sampling: (prompts, sampling.model_copy(update=options))


def forgets(*columns: str) -> Callable[[Batch, Sampling], tuple[Batch, Sampling]]:
    return lambda prompts, sampling: (prompts.drop(*({*columns} & {*prompts.names})), sampling)


def stops_no_rows_that_go_on(prompts: Batch, sampling: Sampling) -> tuple[Batch, Sampling]:
    return prompts, sampling.model_copy(update={"stop": ()} if "versions" in prompts else {})


def counts_all_calls(prompts: Batch, sampling: Sampling) -> tuple[Batch, Sampling]:
    return prompts, Sampling(**sampling.model_dump())


class YieldsRowsTwice(TorchSampler):
    async def generate(self, prompts: Batch, sampling: Sampling) -> AsyncIterator[Batch]:
        async for part in super().generate(prompts, sampling):
            yield part
            yield part


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
        own = self._model.tensors()
        head = {name: own[name].numpy().copy() for name in ("lm_head.weight",) if name in own}
        return await super().load(Weights(weights.version, {**weights.tensors, **head}))


class TakesWhatFits(TorchSampler):
    async def load(self, weights: Weights) -> Batch:
        fitting = {name: array.astype(np.float32) for name, array in weights.tensors.items()}
        return await super().load(Weights(weights.version, fitting))


class IgnoresItsRecord(TorchSampler):
    async def replay(self, record: Batch) -> None: ...


class KeepsSlots(TorchSampler):
    def __init__(self, config: SamplerConfig) -> None:
        super().__init__(config)
        self._room = asyncio.Semaphore(2)

    async def generate(self, prompts: Batch, sampling: Sampling) -> AsyncIterator[Batch]:
        await self._room.acquire()
        async for part in super().generate(prompts, sampling):
            yield part
        self._room.release()


def wrong(
    change: Callable[[Batch, Sampling], Batch] = lambda part, _: part,
    request: Callable[[Batch, Sampling], tuple[Batch, Sampling]] = lambda prompts, sampling: (prompts, sampling),
) -> type[TorchSampler]:
    class Wrong(TorchSampler):
        async def generate(self, prompts: Batch, sampling: Sampling) -> AsyncIterator[Batch]:
            async for part in super().generate(*request(prompts, sampling)):
                yield change(part, sampling)

    Wrong.__name__ = f"{change.__name__}, {request.__name__}"
    return Wrong


BUGS: Bugs = {
    "sampler_log_probs": [wrong(tells_rounded_log_probs)],
    "restricted_draws": [wrong(tells_the_restricted_distribution), wrong(request=ignores(top_k=0))],
    "frequencies": [wrong(request=ignores(temperature=1.0))],
    "seeds": [wrong(request=ignores(seed=0))],
    "calls_beside": [wrong(request=counts_all_calls)],
    "completions_of_a_prompt": [wrong(draws_once_for_all, ignores(n=1))],
    "columns": [wrong(drops_the_task)],
    "ends_of_rows": [wrong(calls_all_truncated), wrong(request=forgets("max_tokens"))],
    "stop_texts": [wrong(leaves_the_stop_text)],
    "stop_texts_of_rows_that_go_on": [wrong(request=stops_no_rows_that_go_on)],
    "rows_that_go_on": [wrong(request=forgets("tokens", "loss_mask", "sampler_logprobs", "versions"))],
    "more_rows_than_slots": [YieldsRowsTwice],
    "a_cancelled_call": [KeepsSlots],
    "an_abort": [wrong(loses_rows_that_wait)],
    "numbers_around_a_load": [wrong(stamps_a_token_late)],
    "versions_of_tokens": [wrong(stamps_its_version_on_all)],
    "a_replay": [IgnoresItsRecord],
    "greedy_after_a_load": [KeepsItsHead],
    "a_prompt_that_was_read_before": [KeepsPrompts],
    "weights_of_another_model": [TakesWhatFits],
}


async def test_each_wrong_sampler_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not await missed(BUGS, SAMPLER, monkeypatch, KeepsSlots, shared=True)


async def test_a_record_that_is_taken_but_not_repeated_is_found() -> None:
    async with Harness(Subject("torch", replays=False)) as harness:
        with pytest.raises(PromiseBroken, match="a record is accepted"):
            await harness.run(interruptions.a_replay)


pytestmark = pytest.mark.asyncio(loop_scope="session")


async def greedy_of_transformers(trial: Trial) -> None:
    """Greedy completions are what transformers generates, with tied embeddings and without."""
    for tied in (True, False):
        pair = await trial.pair(tied)
        sampler = await trial.own.sampler(model=pair.old)
        rollouts = await drawn(sampler, questions(5), Sampling(max_tokens=12, temperature=0))
        network: Any = AutoModelForCausalLM.from_pretrained(pair.old, attn_implementation="eager")
        assert network.config.tie_word_embeddings is tied
        for tokens, completion in zip(rollouts.tokens, completions(rollouts), strict=True):
            prompt = torch.from_numpy(tokens[: len(tokens) - len(completion)].astype(np.int64))[None]
            expected = network.generate(
                prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=12, pad_token_id=0
            )
            assert tokens.tolist() == expected[0].tolist()


ON_TWO_RANKS = (
    draws.seeds, rows.columns, rows.few_rows, interruptions.a_cancelled_call, interruptions.an_abort,
    interruptions.numbers_around_a_load,
)  # fmt: skip
"""What hangs on which rank has a row."""
SKILL = Weights(0, {"skill": np.array([0.5])})
CASES = [
    *asked(Subject("fake", {"dp": 2}, weights=SKILL), conformance.SAMPLER_OF_NO_MODEL),
    *asked(Subject("torch"), [*conformance.SAMPLER, greedy_of_transformers]),
    *asked(Subject("torch", {"dp": 2}), ON_TWO_RANKS, (*conformance.SAMPLER_OF_NO_MODEL, draws.greedy)),
]


@pytest.mark.parametrize(("harness", "model", "checks"), CASES, indirect=["harness"])
async def test_a_sampler_conforms(harness: Harness, model: str, checks: Sequence[Check]) -> None:
    await keep(harness, checks)
