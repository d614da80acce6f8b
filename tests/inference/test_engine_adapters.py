"""Adapters alone at vLLM: rows use their own, which a policy sends without its base, and say its versions."""

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import cast

import numpy as np
import pytest

from meshrl import Batch, PolicyConfig, Ragged, Sampling, publish, rollout
from meshrl.algo import CrossEntropy
from meshrl.data import AdapterOf, Bucket, Weights
from meshrl.errors import DataError, ModelError
from meshrl_inference.sampler import EngineSampler
from meshrl_torch.train.one_rank import TorchPolicy
from tests.inference.conftest import MODEL, Backend
from tests.inference.networks import GREEDY

pytestmark = [pytest.mark.slow, pytest.mark.vllm]
TABLE = {"rank": 4, "alpha": 16, "sync": "adapters"}
NAMES = ("maths", "maths", "poems", "poems", "", "")
ROWS = Batch.of(prompt=["abc>", "hgfe>"] * 3, adapter=list(NAMES))


def policy() -> TorchPolicy:
    table = {"model": MODEL, "adapters": {"maths": TABLE, "poems": TABLE}, "optimizer": {"lr": 0.05}}
    return TorchPolicy(PolicyConfig.model_validate(table))


async def learn(made: TorchPolicy, name: str) -> None:
    """A step of one adapter, which changes what it draws."""
    tokens = np.random.default_rng(len(name)).integers(2, 10, (4, 12))
    masks = [np.arange(12) > 2] * 4
    batch = Batch.of(tokens=Ragged.of(list(tokens), np.int32), loss_mask=Ragged.of(masks, np.bool_))
    await made.update(batch.assign(adapter=[name] * 4), CrossEntropy())


async def check_logprobs(made: TorchPolicy, drawn: Batch, version: int) -> None:
    """Compare those of the tokens that a version drew with those of the policy."""
    mine = drawn.versions.values == version
    assert mine.any()
    wanted = np.asarray((await made.logprobs(drawn)).ragged("logprobs").values[mine], np.float32)
    np.testing.assert_allclose(np.asarray(drawn.sampler_logprobs.values[mine], np.float32), wanted, atol=1e-4)


@pytest.fixture(scope="module")
def adapted() -> Iterator[EngineSampler]:
    """It has room for two adapters in a step, and is told of one."""
    table = {"maths": TABLE}
    backend = Backend("vllm")
    sampler = backend.sampler(backend.config(model=MODEL, slots=32, adapters=table, keys={"max_adapters": 2}))
    yield sampler
    sampler.close()


async def test_rows_are_drawn_with_their_own_adapters_of_their_own_versions(adapted: EngineSampler) -> None:
    made = policy()
    before = await (await rollout(adapted, ROWS.select([0, 1, 4, 5]), GREEDY)).load()
    assert before.tokens[0].tolist() == before.tokens[2].tolist(), "an adapter changes nothing before it comes"
    for name in ("maths", "maths", "poems"):
        await learn(made, name)
    for name in ("maths", "poems"):
        weights = await made.weights(name)
        assert weights.nbytes < (await TorchPolicy(PolicyConfig(model=MODEL)).weights()).nbytes
        assert (await adapted.load(weights)).row("difference").max() < 1e-4
    drawn = await (await rollout(adapted, ROWS, GREEDY)).load()
    versions = [set(row[-20:].tolist()) for row in drawn.versions]
    assert versions == [{2}, {2}, {1}, {1}, {0}, {0}]
    for version in (0, 1, 2):
        await check_logprobs(made, drawn, version)
    assert drawn.tokens[4].tolist() == before.tokens[2].tolist()
    for row in (0, 2):
        assert drawn.tokens[row].tolist() != drawn.tokens[4].tolist()

    await adapted.load((await made.weights("poems")).named("poems@1"))  # a third, which takes turns with the others
    names = ["poems@1", "poems", "maths", "poems@1", "poems", "maths"]
    again = await (await rollout(adapted, Batch.of(prompt=["abc>", "abc>"] * 3, adapter=names), GREEDY)).load()
    assert again.tokens[0].tolist() == again.tokens[1].tolist() == drawn.tokens[2].tolist()
    assert again.tokens[2].tolist() == drawn.tokens[0].tolist()
    await adapted.drop_adapter("poems@1")
    with pytest.raises(DataError, match="names the adapter 'poems@1'"):
        await rollout(adapted, Batch.of(prompt=["abc>"], adapter=["poems@1"]), GREEDY)


async def test_rows_change_to_a_version_that_comes_in_flight(adapted: EngineSampler) -> None:
    made = policy()
    await learn(made, "maths")
    await adapted.load((await made.weights("maths")).with_version(5))
    await learn(made, "maths")
    many = Batch.of(prompt=["abc>"] * 2000, adapter=["maths"] * 2000, max_tokens=np.where(np.arange(2000) % 2, 200, 4))
    drawn: list[Batch] = []
    drawing = cast("AsyncGenerator[Batch]", adapted.generate(many, Sampling(ignore_eos=True)))
    async with aclosing(drawing) as stream:
        drawn.append(await anext(stream))
        with pytest.raises(DataError, match="'maths' decodes rows of 1 calls"):
            await adapted.drop_adapter("maths")
        await adapted.load((await made.weights("maths")).with_version(6))
        # Short rows that began after the load may end before the long ones that were in progress.
        while {5, 6} not in (seen := [set(row.tolist()) - {-1} for batch in drawn for row in batch.versions]):
            drawn.append(await anext(stream))
    await check_logprobs(made, Batch.concat(drawn), 6)
    assert {5} in seen


async def test_an_adapter_that_did_not_arrive_or_does_not_fit_is_refused(adapted: EngineSampler) -> None:
    made = policy()
    await learn(made, "maths")
    weights = (await made.weights("maths")).with_version(8)
    await adapted.load(weights)
    before = await (await rollout(adapted, ROWS, GREEDY)).load()
    (bucket,) = weights.buckets
    name = next(iter(bucket.index))
    memory = bucket.memory.copy()
    memory[bucket.index[name].start :][:64] = 1
    of, whole = AdapterOf("maths", 4, 16), dict(weights.tensors)
    first, *_ = whole
    refused = {
        "tensors did not arrive": Weights.of(9, [Bucket(bucket.index, bucket.nbytes, memory)], adapter=of),
        "float32\\[4, 5\\] there and float32\\[4, 64\\]": Weights(9, whole | {first: np.ones((4, 5), np.float32)}, of),
        "is missing": Weights(9, {first: whole[first]}, of),
        "is no matrix": Weights(9, {f"other.{first}": whole[first]}, of),
        "has rank 9, and .*max_rank is 4": Weights(9, whole, AdapterOf("other", 9, 16)),
        "has rank = 2 .*'s has \\(4, 16\\)": Weights(9, whole, of._replace(rank=2)),
        "keeps its base": Weights(9, whole),
    }
    for complaint, each in refused.items():
        with pytest.raises(ModelError, match=rf"version 9 were not loaded.*{complaint}"):
            await adapted.load(each)
    assert (await (await rollout(adapted, ROWS, GREEDY)).load()).tokens == before.tokens, "the old ones stay"
    await publish(made, adapted, adapter="maths")
