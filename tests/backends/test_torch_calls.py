"""The torch sampler's calls: stopped and gone on with, with new weights in the middle, and replayed bit for bit."""

import asyncio
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest

from meshrl import Batch, NewModel, PolicyConfig, Ragged, SamplerConfig, Sampling, Weights
from meshrl.errors import DataError
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


async def test_what_is_drawn_does_not_hang_on_calls_before_the_weights_came() -> None:
    used, fresh = sampler(), sampler()
    for version in (1, 2):
        await used.load(weights(version))
        for _ in range(version):
            await collected(used, PROMPTS, Sampling(n=2))
    for made in (used, fresh):
        await made.load(weights(3))
    one, other = [[await collected(made, PROMPTS, Sampling(n=2)) for _ in range(2)] for made in (used, fresh)]
    assert one == other
    assert one[0].tokens != one[1].tokens, "each call draws anew"


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
    aborted = np.asarray(rows.row("aborted"), np.bool_)
    assert 0 < aborted.sum() < len(rows), "some had ended"
    begun = [bool(mask.any()) for mask in rows.loss_mask]
    assert not all(begun)
    assert any(np.logical_and(begun, aborted)), "some were in the middle, and some had not begun"
    assert not rows.row("truncated")[aborted].any()
    for row, prompt in enumerate(map(str, prompts.objects("prompt"))):
        assert whole.tokens[row][: len(rows.tokens[row])].tolist() == rows.tokens[row].tolist()
        assert rows.loss_mask[row].tolist() == [place >= len(prompt) for place in range(len(rows.tokens[row]))]
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
