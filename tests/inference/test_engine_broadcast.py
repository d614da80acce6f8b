from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

import pytest
import pytest_asyncio
import torch
from structlog.testing import capture_logs
from transformers import LlamaConfig

from meshrl import Weights
from meshrl.errors import DataLost, ModelError
from meshrl.mesh import Rank, rank_context
from meshrl_inference.sampler import EngineSampler
from meshrl_torch.weights import sender as broadcast
from meshrl_torch.weights.live_weights import LiveWeights
from meshrl_torch.weights.sender import BucketForwarder
from meshrl_torch.wire.bucket_bytes import fingerprint
from meshrl_torch.wire.plan import Locality
from tests.inference.networks import ENDLESS, LONG, PROMPTS, SHAPE, completions, offer, two
from tests.senders import Senders, sending

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

RANKS = 3
LIMIT = 1 << 14
"""Half the bytes of a rank's buckets. Each rank has several."""


class Source(NamedTuple):
    senders: Senders
    weights: list[Weights]
    folder: str

    def live(self, model: int, version: int) -> LiveWeights:
        return offer(self.senders, self.weights[model], version)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def source(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Source]:
    folder = tmp_path_factory.mktemp("models")
    _, weights = await two(LlamaConfig(**SHAPE, tie_word_embeddings=True), folder)
    with sending(RANKS, LIMIT) as senders:
        yield Source(senders, weights, str(folder / "0"))


@pytest.fixture(scope="module")
def sampler(backend: Any, source: Source) -> Iterator[EngineSampler]:
    before = rank_context.set(Rank(0, 2, {"dp": 0, "tp": 0}, {"dp": 1, "tp": 2}, 1))
    made = backend.sampler(backend.config(model=source.folder, slots=16))
    rank_context.reset(before)
    yield made
    made.close()


async def test_each_process_reads_and_running_rows_continue(sampler: EngineSampler, source: Source) -> None:
    known: list[list[list[int]]] = []
    for version, weights in enumerate(source.weights, 1):
        await sampler.load(weights.with_version(version))
        known.append(await completions(sampler))
    assert known[0] != known[1]
    stream = aiter(sampler.generate(ENDLESS, LONG))
    await anext(stream)
    near = [list(sender._policy) for sender in source.senders.each]
    for version, route in ((3, "broadcast by gloo"), (4, "broadcast through shared memory"), (5, "")):
        for sender, places in zip(source.senders.each, near, strict=True):
            sender._policy[:] = [Locality("elsewhere")] * RANKS if version == 3 else places
        with capture_logs() as said:
            loaded = await sampler.load(source.live(version % 2, version))
        assert float(loaded.row("difference").max()) < 1e-4
        assert [line["by"] for line in said if line["event"] == "weights arrive"] == ([route] if route else [])
    while 5 not in (await anext(stream)).versions.values:
        pass
    await sampler.abort()
    assert [batch async for batch in stream]
    assert await completions(sampler) == known[1]


async def test_those_that_are_gone_change_nothing(sampler: EngineSampler, source: Source) -> None:
    await sampler.load(source.live(0, 10))
    before, gone = await completions(sampler), source.live(1, 11)
    source.live(1, 12)
    with pytest.raises(DataLost, match=r"weights of version 11 .* has been updated since"):
        await sampler.load(gone)
    assert await completions(sampler) == before
    with pytest.raises(ModelError, match=r"continues with version 10: `.*` is missing there and float32"):
        await sampler.load(source.senders.offer({"model.strange": torch.ones(4, 4)}, 13))
    assert await completions(sampler) == before


async def test_what_was_changed_on_its_way_is_not_drawn_from(
    sampler: EngineSampler, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcast, "fingerprint", lambda tensor: fingerprint(tensor) + 1)
    with pytest.raises(ModelError, match=r"version 20 .* decodes nothing .*: tensors in damaged buckets: \d+"):
        await sampler.load(source.live(0, 20))
    with pytest.raises(ModelError, match=r"version 20 did not come whole, and some are in use: publish again"):
        await completions(sampler)
    monkeypatch.undo()
    places = await sampler.load(source.live(1, 21))
    assert float(places.row("difference").max()) < 1e-4
    assert len(await completions(sampler)) == len(PROMPTS)


@pytest.mark.parametrize("failures", [1, 2])
async def test_an_interrupted_broadcast_is_read_again_once(
    sampler: EngineSampler, source: Source, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    stream = aiter(sampler.generate(ENDLESS, LONG))
    await anext(stream)
    end, failed = BucketForwarder.send_fingerprints, list[int]()

    def fail(self: BucketForwarder, number: int, prints: torch.Tensor) -> None:
        if self.rank == 1 and len(failed) < failures:
            failed.append(number)
            raise RuntimeError("this rank sends no more")
        end(self, number, prints)

    monkeypatch.setattr(BucketForwarder, "send_fingerprints", fail)
    weights = source.live(0, 30)
    if failures == 1:
        assert float((await sampler.load(weights)).row("difference").max()) < 1e-4
        await sampler.abort()
        assert [batch async for batch in stream]
        return
    with pytest.raises(DataLost, match=rf"weights of version 30 cannot be read from {RANKS} ranks of the policy"):
        await sampler.load(weights)
    with pytest.raises(ModelError, match="did not come whole"):
        [batch async for batch in stream]
    with pytest.raises(ModelError, match="did not come whole"):
        await completions(sampler)
    places = await sampler.load(source.weights[1].with_version(31))
    assert float(places.row("difference").max()) < 1e-4
    assert len(await completions(sampler)) == len(PROMPTS)
