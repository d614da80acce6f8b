import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl import Batch, ClippedLoss, PolicyConfig, Sampler, SamplerConfig, Sampling, Weights
from meshrl.errors import DataError
from meshrl.testing.fakes import FakePolicy, FakeSampler

PROMPTS = Batch.of(prompt=["1+1=", "5+5=", "99+1="], answer=["2", "10", "100"])
SAMPLING = Sampling(n=2)


def sampler() -> FakeSampler:
    return FakeSampler(SamplerConfig(backend="fake", model="none"))


def weights(version: int) -> Weights:
    return Weights(version, {"skill": np.array([version % 5 / 4])})


async def collected(made: Sampler, prompts: Batch) -> Batch:
    return Batch.join([part async for part in made.generate(prompts.part(np.arange(len(prompts))), SAMPLING)])


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def drive(
    made: Sampler,
    call: Callable[[], Coroutine[None, None, Batch]],
    calls: Sequence[int],
    swaps: Sequence[tuple[int, Weights | None]],
) -> tuple[list[Batch], Batch]:
    """What calls gave and loads returned. Each begins so many turns of the loop after the one before of its kind.

    A swap to None is an abort.
    """
    places, running = list[Batch](), list[asyncio.Task[Batch]]()

    async def generate() -> None:
        for delay in calls:
            await turns(delay)
            running.append(asyncio.create_task(call()))

    async def swap() -> None:
        for delay, new in swaps:
            await turns(delay)
            if new is None:
                await made.abort()
            else:
                places.append(await made.load(new))

    await asyncio.gather(generate(), swap())
    return await asyncio.gather(*running), Batch.concat(places)


DELAYS = st.lists(st.integers(0, 12), min_size=4, max_size=4)


@settings(max_examples=30)
@given(st.data())
def test_a_record_brings_the_same_rows_whatever_the_speed(data: st.DataObject) -> None:
    aborts = data.draw(st.lists(st.booleans(), min_size=4, max_size=4))

    async def both() -> None:
        results: list[tuple[list[Batch], Batch]] = []
        for made in (sampler(), sampler()):
            if results:
                await made.replay(results[0][1])
            new = [None if is_abort else weights(version) for version, is_abort in enumerate(aborts)]
            swaps = list(zip(data.draw(DELAYS), new, strict=True))
            driven = asyncio.create_task(drive(made, partial(collected, made, PROMPTS), data.draw(DELAYS), swaps))
            await turns(1000)
            assert driven.done(), "nobody can go on"
            drawn, places = await driven
            results.append((drawn, Batch.concat([places, await made.load(weights(0))])))
        assert results[0] == results[1]

    asyncio.run(both())


@pytest.mark.parametrize("close", [False, True])
async def test_a_load_that_waits_for_a_call_that_ends_tells_so(close: bool) -> None:
    made, again = sampler(), sampler()
    stream = made.generate(PROMPTS, SAMPLING)
    for _ in range(5):
        await anext(stream)
    await again.replay(await made.load(weights(1)))
    stream = again.generate(PROMPTS if close else PROMPTS.select([0]), SAMPLING)
    assert isinstance(stream, AsyncGenerator)
    await anext(stream)
    loading = asyncio.create_task(again.load(weights(1)))
    await turns(3)
    assert not loading.done()
    if close:
        await stream.aclose()
    else:
        assert len([part async for part in stream]) == 1
    with pytest.raises(DataError, match="call 0 of `generate` had made 5 steps, but now that call ended earlier"):
        await loading


async def test_records_that_cannot_be_replayed() -> None:
    made = sampler()
    places = [await made.load(weights(version)) for version in range(2)]
    with pytest.raises(DataError, match="has had 0 calls of `generate` and 2 of `load` and `abort`"):
        await made.replay(places[0])
    with pytest.raises(DataError, match="no entry for load 0 on rank 0"):
        await sampler().replay(places[1])


async def test_a_policy_refuses_tokens_of_weights_to_come() -> None:
    policy = FakePolicy(PolicyConfig(backend="fake", model="none"))
    drawn = await collected(sampler(), PROMPTS)
    rows = drawn.assign(advantages=np.ones(len(drawn), np.float32))
    await policy.update(rows, ClippedLoss())
    with pytest.raises(DataError, match="`oldest_version` is 2 in a row and this policy has made 1 updates"):
        await policy.update(rows.assign(oldest_version=np.full(len(rows), 2, np.int32)), ClippedLoss())
