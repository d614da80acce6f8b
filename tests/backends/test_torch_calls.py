"""The torch sampler's calls: stopped and gone on with, replayed bit for bit, and decoded as one."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import cache

import numpy as np
import pytest

from meshrl import Batch, NewModel, PolicyConfig, Ragged, SamplerConfig, Sampling, Weights, rollout
from meshrl.errors import DataError
from meshrl.roles import JoinedSampling
from meshrl_torch.policy import TorchPolicy
from meshrl_torch.sampler import TorchSampler
from tests.backends.material import floats

MODEL = NewModel(characters="abcdefgh>", hidden_size=16, ffn_size=24, layers=2, heads=2, max_tokens=64)
PROMPTS = Batch.of(prompt=["abc>", "h>", "abcdefgh>", "bad>", "c"])
PREFIX = ("tokens", "loss_mask", "sampler_logprobs", "versions")


@cache
def weights(version: int) -> Weights:
    """Of another model for each version, far from the initialisation."""
    plain = asyncio.run(TorchPolicy(PolicyConfig(model=MODEL, seed=version)).weights())
    scaled = {name: floats(array) * np.float32(8 if array.ndim == 2 else 1) for name, array in plain.tensors.items()}
    return Weights(version, scaled)


@pytest.fixture(autouse=True, scope="module")
def _made() -> None:
    """Weights are computed before a test's loop runs."""
    for version in range(5):
        weights(version)


def sampler(slots: int = 4) -> TorchSampler:
    return TorchSampler(SamplerConfig(model=MODEL, slots=slots))


async def collected(made: TorchSampler, prompts: Batch, sampling: Sampling) -> Batch:
    return Batch.join([part async for part in made.generate(prompts.part(np.arange(len(prompts))), sampling)])


async def test_each_call_draws_anew_whatever_calls_there_were_before_the_weights_came() -> None:
    used, fresh = sampler(), sampler()
    await used.load(weights(1))
    await collected(used, PROMPTS, Sampling(n=2))
    for made in (used, fresh):
        await made.load(weights(3))
    one, other = [[await collected(made, PROMPTS, Sampling(n=2)) for _ in range(2)] for made in (used, fresh)]
    assert one == other
    assert one[0].tokens != one[1].tokens


async def stopped(made: TorchSampler, prompts: Batch, sampling: Sampling, turns: int) -> Batch:
    """What a call gives that is aborted after some turns of the loop."""
    running = asyncio.create_task(collected(made, prompts, sampling))
    for _ in range(turns):
        await asyncio.sleep(0)
    await made.abort()
    return await running


async def test_stopped_rows_go_on_as_if_they_had_not_been() -> None:
    sampling = Sampling(max_tokens=24, temperature=0, stop=("ab", "gh", "ede"))
    prompts = PROMPTS.repeat(2).assign(max_tokens=np.array([24, 3, 5, 24, 24, 20, 24, 24, 24, 24]))
    made = sampler()
    await made.load(weights(3))
    whole = await collected(made, prompts, sampling)
    rows = await stopped(made, prompts, sampling, 9)
    aborted, begun = rows.row("aborted"), np.array([mask.any() for mask in rows.loss_mask])
    assert not aborted.all(), "some had ended"
    assert not begun.all(), "some had not begun"
    assert (aborted & begun).any(), "some were in the middle"
    rows = rows.drop("prompt")  # what it has is all that it needs
    for turns in (1, 6, 4):
        rows = await stopped(made, rows, sampling, turns)
    rows = await collected(made, rows, sampling)
    for name in (*PREFIX[:2], "versions", "completion", "truncated", "aborted", "oldest_version"):
        assert rows.only(name) == whole.only(name)
    np.testing.assert_allclose(
        np.asarray(rows.sampler_logprobs.values, float), np.asarray(whole.sampler_logprobs.values, float), atol=1e-5
    )


async def drive(
    made: TorchSampler, calls: Sequence[int], swaps: Sequence[tuple[int, int]]
) -> tuple[list[Batch], Batch]:
    """What calls gave and loads returned. Each begins so many turns of the loop after the one before of its kind.

    A swap to version 0 is an abort.
    """
    places: list[Batch] = []
    new = {version: weights(version) for _, version in swaps}

    async def generate() -> list[Batch]:
        running: list[asyncio.Task[Batch]] = []
        for turns in calls:
            for _ in range(turns):
                await asyncio.sleep(0)
            running.append(asyncio.create_task(collected(made, PROMPTS, Sampling(n=2, max_tokens=20))))
        return list(await asyncio.gather(*running))

    async def swap() -> None:
        for turns, version in swaps:
            for _ in range(turns):
                await asyncio.sleep(0)
            if version:
                places.append(await made.load(new[version]))
            else:
                await made.abort()

    given, _ = await asyncio.gather(generate(), swap())
    return given, Batch.concat(places)


@pytest.mark.bits
async def test_a_replay_gives_the_same_bits_whenever_loads_come() -> None:
    versions = (1, 2, 3, 0, 4)
    given, record = await drive(sampler(), (3, 2, 0, 25), list(zip((0, 9, 7, 8, 9), versions, strict=True)))
    assert sorted(set(np.concatenate([each.versions.values for each in given]).tolist())) == [-1, 1, 2, 3, 4]
    assert any(len({*row.tolist()} - {-1}) > 1 for each in given for row in each.versions), "swaps in the middle"
    assert {bool(each.row("aborted").any()) for each in given} == {False, True}
    for calls, turns in (((60, 0, 0, 0), (0, 0, 0, 0, 0)), ((0, 0, 30, 30), (20, 0, 80, 20, 40))):
        again = sampler()
        await again.replay(record)
        assert await drive(again, calls, list(zip(turns, versions, strict=True))) == (given, record)


async def test_a_row_that_cannot_be_continued() -> None:
    made = sampler()
    rows = await collected(made, PROMPTS, Sampling())
    nothing = {name: Ragged(rows.ragged(name).values[:0], np.zeros(6, np.int64)) for name in PREFIX}
    with pytest.raises(DataError, match="row 0 cannot be continued: it has no `tokens`"):
        await collected(made, rows.assign(**nothing), Sampling())


CALLS = [["abc>", "d>"], ["efgh>"], ["a>", "bb>", "ccc>"]]
JOINED = JoinedSampling(max_tokens=40)
ENDLESS = JoinedSampling(max_tokens=40, ignore_eos=True)


async def first(rows: AsyncIterator[Batch]) -> Batch:
    return await anext(rows)


async def drawn(slots: int, sampling: Sampling, between: int = 0) -> list[Batch]:
    """The calls, each begun so many turns of the loop after the one before."""
    made = sampler(slots)

    async def call(number: int) -> Batch:
        for _ in range(number * between):
            await asyncio.sleep(0)
        return await rollout(made, Batch.of(prompt=CALLS[number]), sampling)

    return list(await asyncio.gather(*map(call, range(len(CALLS)))))


async def test_a_call_draws_what_it_draws_alone() -> None:
    for between in (0, 7):
        alone = await drawn(64, Sampling(max_tokens=40), between)
        for slots in (64, 4, 1):
            for mine, other in zip(await drawn(slots, JOINED, between), alone, strict=True):
                assert mine.tokens == other.tokens
                assert mine.sampler_logprobs.values == pytest.approx(other.sampler_logprobs.values, abs=1e-5)
                assert mine.row("truncated").tolist() == other.row("truncated").tolist()


async def test_weights_come_between_two_steps_of_all() -> None:
    made = sampler()
    calls = [asyncio.create_task(rollout(made, Batch.of(prompt=each), ENDLESS)) for each in CALLS]
    for _ in range(20):
        await asyncio.sleep(0)
    await made.load(weights(4))
    for batch in await asyncio.gather(*calls):
        for mask, versions in zip(batch.loss_mask, batch.versions, strict=True):
            told = versions[mask.astype(bool)].tolist()
            assert told == sorted(told)
            assert set(told) == {0, 4}


async def test_a_call_whose_rows_nobody_takes_holds_up_no_other() -> None:
    made = sampler()
    slow = made.generate(Batch.of(prompt=["abc>", "d>"], max_tokens=np.array([2, 12])), ENDLESS)
    taken = asyncio.create_task(first(slow))
    other = asyncio.create_task(rollout(made, Batch.of(prompt=["d>"]), ENDLESS))
    assert [len(row) for row in (await taken).tokens] == [6]
    assert [len(row) for row in (await other).tokens] == [42]
    assert [len(row) async for batch in slow for row in batch.tokens] == [14]


async def test_an_abort_stops_all_and_a_call_that_is_left_goes_alone() -> None:
    made = sampler()
    left = made.generate(Batch.of(prompt=["abc>"], max_tokens=np.array([50])), ENDLESS)
    leaves = asyncio.create_task(first(left))
    stays = asyncio.create_task(rollout(made, Batch.of(prompt=["d>"]), ENDLESS))
    for _ in range(5):
        await asyncio.sleep(0)
    leaves.cancel()
    assert [len(row) for row in (await stays).tokens] == [42]
    aborted = asyncio.create_task(first(made.generate(Batch.of(prompt=CALLS[0]), ENDLESS)))
    for _ in range(10):
        await asyncio.sleep(0)
    await made.abort()
    batch = await aborted
    assert batch.row("aborted").tolist() == [True, True]
    again = await rollout(made, batch.drop("aborted"), ENDLESS)
    assert [int(mask.sum()) for mask in again.loss_mask] == [40, 40]
