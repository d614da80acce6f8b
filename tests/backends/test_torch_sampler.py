import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshrl import (
    Batch,
    Policy,
    PolicyConfig,
    Ragged,
    Run,
    RunConfig,
    Sampler,
    SamplerConfig,
    Sampling,
    Weights,
    publish,
)
from meshrl import rollout as drawn_by
from meshrl.data import Bucket
from meshrl.errors import DataError, ModelError
from meshrl.roles import JoinedSampling
from meshrl_torch.sample.draw import key, uniforms
from meshrl_torch.sample.sampler import TorchSampler
from meshrl_torch.train.one_rank import TorchPolicy
from tests.backends.material import MODEL, floats
from tests.roles.test_generate_calls import drive, turns

PROMPTS = Batch.of(prompt=["abc>", "h>", "abcdefgh>", "bad>", "c"], groups=np.arange(10, 15))


def sampler(model: object, slots: int = 512, **changes: object) -> TorchSampler:
    return TorchSampler(SamplerConfig.model_validate({"model": model, "slots": slots, **changes}))


async def parts(made: TorchSampler, prompts: Batch, sampling: Sampling) -> list[Batch]:
    return [part async for part in made.generate(prompts, sampling)]


async def rollout(made: TorchSampler, sampling: Sampling, prompts: Batch = PROMPTS) -> Batch:
    return Batch.join(await parts(made, prompts.part(np.arange(len(prompts))), sampling))


async def test_draws_do_not_depend_on_slots_nor_on_how_a_mesh_divides_the_rows(small: str) -> None:
    sampling = Sampling(n=6, max_tokens=16)
    made = sampler(small)
    whole = await rollout(made, sampling)
    assert (await rollout(made, sampling)).tokens != whole.tokens, "each call draws anew"
    for slots in (7, 1):
        other = await rollout(sampler(small, slots), sampling)
        assert other.tokens == whole.tokens
        assert other.objects("completion") == whole.objects("completion")
        logprobs = floats(whole.sampler_logprobs.values)
        np.testing.assert_allclose(floats(other.sampler_logprobs.values), logprobs, atol=1e-5)
    divided = [part for half in PROMPTS.split(2) for part in await parts(sampler(small), half, sampling)]
    assert Batch.join(divided).tokens == whole.tokens


async def test_draws_of_an_adapter_do_not_come_again_when_others_are_loaded(small: str) -> None:
    adapters = {name: {"rank": 2, "sync": "adapters"} for name in ("a", "b")}
    policy = TorchPolicy(PolicyConfig.model_validate({"model": small, "adapters": adapters}))
    weights = {name: await policy.weights(name) for name in adapters}
    made, plain, sampling = sampler(small, adapters=adapters), sampler(small), Sampling(max_tokens=16)
    rows = {name: PROMPTS.assign(adapter=[name] * len(PROMPTS)) for name in ("a", "b", "")}
    drawn: dict[str, list[Batch]] = {name: [] for name in rows}
    for _ in range(3):
        await made.load(weights["b"])
        for name, each in drawn.items():
            each.append(await rollout(made, sampling, rows[name]))
    tokens = {name: [batch.tokens for batch in each] for name, each in drawn.items()}
    assert all(one != other for name in ("a", "") for one, other in pairwise(tokens[name]))
    assert tokens["b"][0] == tokens["b"][1] == tokens["b"][2], "calls are counted since its own load"
    for _ in range(2):
        await rollout(plain, sampling)
    assert (await rollout(plain, sampling)).tokens == tokens[""][0], "one call after another, whatever the adapters"


def test_numbers_that_draws_hang_on_are_uniform_and_independent() -> None:
    rows, places = np.divmod(np.arange(100_000), 100)
    numbers = uniforms(key(1, 2, 3), rows, places)
    assert 0 <= numbers.min() < numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.005
    assert np.abs(np.histogram(numbers, 20, (0, 1))[0] / 5000 - 1).max() < 0.06
    table = numbers.reshape(1000, 100)
    assert np.abs(np.corrcoef(table[:-1].ravel(), table[1:].ravel())[0, 1]) < 0.01
    assert np.abs(np.corrcoef(table[:, :-1].ravel(), table[:, 1:].ravel())[0, 1]) < 0.01
    assert key(1, 2) != key(2, 1)


async def test_weights_that_did_not_arrive_are_not_drawn_from(small: str) -> None:
    made, weights = sampler(small), await TorchPolicy(PolicyConfig(model=small)).weights()
    greedy = Sampling(temperature=0, max_tokens=16)
    assert (await made.load(weights)).row("difference").max() < 1e-5
    (bucket,) = weights.buckets
    name = next(iter(bucket.index))
    memory = bucket.memory.copy()
    memory[bucket.index[name].start :][:64] = 1
    damaged = Weights.of(8, [Bucket(bucket.index, bucket.nbytes, memory)])
    before = await rollout(made, greedy)
    with pytest.raises(ModelError, match=rf"version 8 did not arrive as they were sent: 1 tensors differ \({name}\)"):
        await made.load(damaged)
    assert (await rollout(made, greedy)).tokens == before.tokens, "the old ones stay"
    others = {name: np.multiply(array, 1.5, dtype=np.float32) for name, array in weights.tensors.items()}
    with pytest.raises(ModelError, match=r"version 9 arrived, and yet the sampler's log-probs are .* from"):
        await made.load(Weights.streamed(9, others.items(), weights.probe))
    with pytest.raises(ModelError, match="its completions cannot be trusted"):
        await rollout(made, greedy)
    await made.load(weights)
    assert (await rollout(made, greedy)).tokens == before.tokens


async def test_prompts_that_cannot_be_continued(small: str) -> None:
    cases: list[tuple[dict[str, Any], Sampling, str]] = [
        ({"prompt": ["abc>", ""]}, Sampling(), "the prompt '' has no token"),
        ({"prompt": ["abc>", 3]}, Sampling(), r"`prompt` of row 1 is 3 \(int\), not text"),
        ({"prompt": ["abc>"], "max_tokens": np.array([0])}, Sampling(), "`max_tokens` of row 0 is 0"),
        ({"question": ["abc>"]}, Sampling(), "prompt"),
    ]
    made = sampler(small, dtype="bfloat16")
    for columns, sampling, text in cases:
        with pytest.raises(DataError, match=text):
            await rollout(made, sampling, Batch.of(**columns))
    rows = await rollout(made, Sampling(max_tokens=8))
    assert np.isfinite(rows.sampler_logprobs.values).all()
    nothing = {name: Ragged(rows.ragged(name).values[:0], np.zeros(6, np.int64)) for name in PREFIX}
    with pytest.raises(DataError, match="row 0 cannot be continued: it has no `tokens`"):
        await rollout(made, Sampling(), rows.assign(**nothing))


LONGER = MODEL.model_copy(update={"max_tokens": 64})
PREFIX = ("tokens", "loss_mask", "sampler_logprobs", "versions")


async def weights(version: int) -> Weights:
    plain = await TorchPolicy(PolicyConfig(model=LONGER, seed=version)).weights()
    scaled = {name: floats(array) * np.float32(8 if array.ndim == 2 else 1) for name, array in plain.tensors.items()}
    return Weights(version, scaled)


@pytest.mark.bits
async def test_a_replay_gives_the_same_bits_whenever_loads_come() -> None:
    new = [await weights(version) if version else None for version in (1, 2, 3, 0, 4)]

    async def driven(made: TorchSampler, calls: Sequence[int], after: Sequence[int]) -> tuple[list[Batch], Batch]:
        call = partial(rollout, made, Sampling(n=2, max_tokens=20))
        return await drive(made, call, calls, list(zip(after, new, strict=True)))

    given, record = await driven(sampler(LONGER, 4), (3, 2, 0, 25), (0, 9, 7, 8, 9))
    assert sorted(set(np.concatenate([each.versions.values for each in given]).tolist())) == [-1, 1, 2, 3, 4]
    assert any(len({*row.tolist()} - {-1}) > 1 for each in given for row in each.versions), "swaps in the middle"
    assert {bool(each.row("aborted").any()) for each in given} == {False, True}
    for calls, after in (((60, 0, 0, 0), (0, 0, 0, 0, 0)), ((0, 0, 30, 30), (20, 0, 80, 20, 40))):
        again = sampler(LONGER, 4)
        await again.replay(record)
        assert await driven(again, calls, after) == (given, record)


CALLS = [["abc>", "d>"], ["efgh>"], ["a>", "bb>", "ccc>"]]
JOINED = JoinedSampling(max_tokens=40)
ENDLESS = JoinedSampling(max_tokens=40, ignore_eos=True)


async def first(rows: AsyncIterator[Batch]) -> Batch:
    return await anext(rows)


async def drawn(slots: int, sampling: Sampling, between: int = 0) -> list[Batch]:
    """The calls, each begun so many turns of the loop after the one before."""
    made = sampler(LONGER, slots)

    async def call(number: int) -> Batch:
        await turns(number * between)
        return await drawn_by(made, Batch.of(prompt=CALLS[number]), sampling)

    return list(await asyncio.gather(*map(call, range(len(CALLS)))))


async def test_a_call_draws_what_it_draws_alone() -> None:
    for between in (0, 7):
        alone = await drawn(64, Sampling(max_tokens=40), between)
        for slots in (64, 4, 1):
            for mine, other in zip(await drawn(slots, JOINED, between), alone, strict=True):
                assert mine.tokens == other.tokens
                assert mine.sampler_logprobs.values == pytest.approx(other.sampler_logprobs.values, abs=1e-5)
                assert mine.row("truncated").tolist() == other.row("truncated").tolist()


async def test_a_call_whose_rows_nobody_takes_holds_up_no_other() -> None:
    made = sampler(LONGER, 4)
    slow = made.generate(Batch.of(prompt=["abc>", "d>"], max_tokens=np.array([2, 12])), ENDLESS)
    taken = asyncio.create_task(first(slow))
    other = asyncio.create_task(drawn_by(made, Batch.of(prompt=["d>"]), ENDLESS))
    assert [len(row) for row in (await taken).tokens] == [6]
    assert [len(row) for row in (await other).tokens] == [42]
    assert [len(row) async for batch in slow for row in batch.tokens] == [14]


async def test_a_run_records_the_highest_share_of_the_cache_between_two_loads(small: str, tmp_path: Path) -> None:
    async with Run(RunConfig(folder=str(tmp_path), log=[])) as run:
        policy = await run.spawn(Policy, PolicyConfig(model=small))
        made = await run.spawn(Sampler, SamplerConfig(model=small, slots=8))
        for rows in (0, 2, 5):
            if rows:
                await drawn_by(made, PROMPTS.select(np.arange(rows)), Sampling(max_tokens=4, ignore_eos=True))
            await publish(policy, made)
    lines = [json.loads(line) for line in (run.folder / "events.jsonl").read_text("utf-8").splitlines()]
    assert [line["value"] for line in lines if line.get("name") == "KV cache use"] == [0, 0.25, 0.625]
