"""Calls of the torch sampler that decode as one: what each draws is what it draws alone."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import numpy as np
import pytest

from meshrl import Batch, NewModel, PolicyConfig, SamplerConfig, Sampling, rollout
from meshrl.roles import JoinedSampling
from meshrl_torch.policy import TorchPolicy
from meshrl_torch.sampler import TorchSampler

MODEL = NewModel(characters="abcdefgh>", hidden_size=16, ffn_size=32, layers=2, heads=2, max_tokens=64)
CALLS = [["abc>", "d>"], ["efgh>"], ["a>", "bb>", "ccc>"]]
JOINED = JoinedSampling(max_tokens=40)


async def first(rows: AsyncIterator[Batch]) -> Batch:
    return await anext(rows)


async def drawn(slots: int, sampling: Sampling, between: int = 0) -> list[Batch]:
    """The calls, each begun so many turns of the loop after the one before."""
    sampler = TorchSampler(SamplerConfig(model=MODEL, slots=slots))

    async def call(number: int) -> Batch:
        for _ in range(number * between):
            await asyncio.sleep(0)
        return await rollout(sampler, Batch.of(prompt=CALLS[number]), sampling)

    return list(await asyncio.gather(*map(call, range(len(CALLS)))))


def same(ours: Sequence[Batch], theirs: Sequence[Batch]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert [row.tolist() for row in mine.tokens] == [row.tolist() for row in other.tokens]
        assert mine.sampler_logprobs.values == pytest.approx(other.sampler_logprobs.values, abs=1e-5)
        assert mine.row("truncated").tolist() == other.row("truncated").tolist()


async def test_a_call_draws_what_it_draws_alone() -> None:
    for between in (0, 7):
        alone = await drawn(64, Sampling(max_tokens=40), between)
        for slots in (64, 4, 1):
            same(await drawn(slots, JOINED, between), alone)


async def test_weights_come_between_two_steps_of_all() -> None:
    weights = (await TorchPolicy(PolicyConfig(model=MODEL, seed=3)).weights()).with_version(5)
    sampler, sampling = TorchSampler(SamplerConfig(model=MODEL)), JOINED.model_copy(update={"ignore_eos": True})
    calls = [asyncio.create_task(rollout(sampler, Batch.of(prompt=each), sampling)) for each in CALLS]
    for _ in range(20):
        await asyncio.sleep(0)
    await sampler.load(weights)
    for batch in await asyncio.gather(*calls):
        for mask, versions in zip(batch.loss_mask, batch.versions, strict=True):
            told = versions[mask.astype(bool)].tolist()
            assert told == sorted(told)
            assert set(told) == {0, 5}


async def test_a_call_whose_rows_nobody_takes_holds_up_no_other() -> None:
    sampler, sampling = TorchSampler(SamplerConfig(model=MODEL)), JOINED.model_copy(update={"ignore_eos": True})
    slow = sampler.generate(Batch.of(prompt=["abc>", "d>"], max_tokens=np.array([2, 12])), sampling)
    taken = asyncio.create_task(first(slow))
    other = asyncio.create_task(rollout(sampler, Batch.of(prompt=["d>"]), sampling))
    assert [len(row) for row in (await taken).tokens] == [6]
    assert [len(row) for row in (await other).tokens] == [42]
    assert [len(row) async for batch in slow for row in batch.tokens] == [14]


async def test_an_abort_stops_all_and_a_call_that_is_left_goes_alone() -> None:
    sampler = TorchSampler(SamplerConfig(model=MODEL))
    sampling = JOINED.model_copy(update={"ignore_eos": True})
    left = sampler.generate(Batch.of(prompt=["abc>"], max_tokens=np.array([50])), sampling)
    leaves = asyncio.create_task(first(left))
    stays = asyncio.create_task(rollout(sampler, Batch.of(prompt=["d>"]), sampling))
    for _ in range(5):
        await asyncio.sleep(0)
    leaves.cancel()
    assert [len(row) for row in (await stays).tokens] == [42]
    aborted = asyncio.create_task(first(sampler.generate(Batch.of(prompt=CALLS[0]), sampling)))
    for _ in range(10):
        await asyncio.sleep(0)
    await sampler.abort()
    batch = await aborted
    assert batch.row("aborted").tolist() == [True, True]
    again = await rollout(sampler, batch.drop("aborted"), sampling)
    assert [int(mask.sum()) for mask in again.loss_mask] == [40, 40]
