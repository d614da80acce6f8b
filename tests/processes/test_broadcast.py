"""Weights that FSDP's ranks broadcast out of their shards: the bits of the other way, who comes late, who dies."""

import asyncio
import gc
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import Qwen3MoeConfig

import meshrl as rl
from meshrl.engines.processes import ProcessEngine
from meshrl.errors import DataLost, RankDied, RankFailed
from meshrl_inference.engine_side.loading import Naming, read_broadcast
from meshrl_megatron.roles import MegatronPolicy
from meshrl_torch.sample.sampler import TorchSampler
from meshrl_torch.train.fsdp.roles import FsdpPolicy
from meshrl_torch.weights.live_weights import LiveWeights
from meshrl_torch.weights.transfer import arrays
from meshrl_torch.wire import fp8
from meshrl_torch.wire.bucket_server import BucketClient
from meshrl_torch.wire.collective import InFlightBuckets
from meshrl_torch.wire.manifest import SCALE
from tests.backends.material import SHAPE, changed, updated
from tests.processes.conftest import NO_CORE, Numbered, killed

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]

MODULES = (__name__,)
"""Without them, each new rank would import torch and the backends anew."""
MODEL: Final = rl.NewModel(characters="abcdefgh>", hidden_size=256, ffn_size=512, layers=2, heads=2, max_tokens=48)
ODD: Final = rl.NewModel(characters="abcdefgh>", hidden_size=252, ffn_size=509, layers=2, heads=3, max_tokens=48)
"""Two ranks have different numbers of rows of some matrices."""
COLUMNS = ("o_proj.weight", "down_proj.weight")


def die_in_flight() -> None:
    did = list[int]()

    def once(do: Callable[..., Any]) -> Callable[..., Any]:
        def done(*rest: Any, **keywords: Any) -> Any:
            if did:
                os.kill(os.getpid(), signal.SIGKILL)
            did.append(1)
            return do(*rest, **keywords)

        return done

    InFlightBuckets.add = once(InFlightBuckets.add)  # type: ignore[method-assign]
    BucketClient.bucket = once(BucketClient.bucket)  # type: ignore[method-assign]


class Sender(FsdpPolicy):
    @rl.endpoint
    async def senders(self) -> rl.Gather[np.ndarray]:
        gc.collect()
        return np.array([sum(each.name == "meshrl-sender" for each in threading.enumerate())])

    @rl.endpoint
    async def die(self, rank: int) -> None:
        if self._trainable.passes.ranks.number == rank:
            die_in_flight()


class Reader(TorchSampler, Numbered):
    @rl.endpoint
    async def die(self) -> None:
        die_in_flight()

    @rl.endpoint
    async def go(self, way: str) -> None:
        os.environ["MESHRL_HANDOVER"] = "0" if way == "by gloo" else "1"

    @rl.endpoint
    async def got(self) -> rl.Gather[rl.Batch]:
        found = rl.Weights(0, dict(arrays(self._model.tensors().items()))).fingerprint()
        return rl.Batch.of(route=[", ".join(self._arrivals.transports)], print=[found])


def config(**changes: object) -> rl.PolicyConfig:
    keys = {"backend": "fsdp", "model": MODEL, "optimizer": {"lr": 1e-2}, "weight_sync": "broadcast", "bucket_mib": 1}
    return rl.PolicyConfig.model_validate(keys | changes)


async def routes(readers: Reader) -> list[object]:
    return list((await (await readers.got()).load()).objects("route"))


async def prints(readers: Reader) -> list[object]:
    return list((await (await readers.got()).load()).objects("print"))


async def both_updated(version: int, *policies: rl.Policy) -> str:
    await updated(*policies, seed=version)
    return (await (await policies[1].weights()).load()).fingerprint()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def two(engine: ProcessEngine) -> AsyncIterator[rl.Mesh]:
    made = await rl.Mesh.reserve(engine, 2, NO_CORE)
    yield made
    await made.stop()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def readers(engine: ProcessEngine) -> AsyncIterator[Reader]:
    made = await rl.Mesh.reserve(engine, 2, NO_CORE)
    yield await made.spawn(Reader, rl.SamplerConfig(model=MODEL, seed=5))
    await made.stop()


GLOO, MEMORY = "by gloo", "through shared memory"


async def test_samplers_get_the_bits_of_whole_weights_and_one_that_was_made_again_reads_with_the_others(
    two: rl.Mesh, readers: Reader, tmp_path: Path
) -> None:
    policy = await two.spawn(Sender, config())
    plain = await two.spawn(FsdpPolicy, config(weight_sync="auto"))
    first = await rl.publish(policy, readers)
    for version, way in ((1, GLOO), (2, MEMORY)):
        await readers.go(way)
        known = await both_updated(version, policy, plain)
        sent = await rl.publish(policy, readers)
        assert await prints(readers) == [known, known]
        assert (sent.version, sorted(sent.transports), sent.fingerprint()) == (
            version,
            ["broadcast"],
            known,
        )  # read whole
        assert await routes(readers) == [f"broadcast {way}"] * 2
    with pytest.raises(DataLost, match=r"version 0 .* has been updated since"):
        first.tensors  # noqa: B018 -- they come when they are looked at
    with pytest.raises(RankFailed, match=r"version 0 .* has been updated since"):
        await readers.load(first)
    assert len(await readers.generate(rl.Batch.of(prompt=["ab", "ba"]), rl.Sampling(max_tokens=2)).__anext__()) == 1

    await killed(int((await readers.pid())[0]))
    await rl.respawn(readers)
    assert await prints(readers) != [known, known]
    for way in (GLOO, MEMORY):
        await readers.go(way)
        weights = await rl.publish(policy, readers)
        assert await prints(readers) == [known, known]
        assert await routes(readers) == [f"broadcast {way}"] * 2
    await rl.publish(plain, readers)
    assert await routes(readers) == ["shared memory"] * 2
    await policy.checkpoint(str(tmp_path / "state"))
    await policy.restore(str(tmp_path / "state"))
    with pytest.raises(DataLost, match=r"version 2 .* has been updated since"):
        weights.tensors  # noqa: B018


@pytest.mark.megatron
async def test_ranks_of_megatron_send_their_own_experts(
    engine: ProcessEngine, two: rl.Mesh, random_model: Callable[..., str], tmp_path: Path
) -> None:
    shape = changed(SHAPE, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True)
    mixture = random_model(Qwen3MoeConfig(**shape), tmp_path, noise=0)
    mesh = await rl.Mesh.reserve(engine, 2, NO_CORE)
    readers = await mesh.spawn(Reader, rl.SamplerConfig(model=mixture, seed=5))
    keys = {"backend": "megatron", "model": mixture, "megatron": {"experts": 2}}
    policy = await two.spawn(MegatronPolicy, config(**keys))
    plain = await two.spawn(MegatronPolicy, config(**keys, weight_sync="auto"))
    for version in (1, 2):
        known = await both_updated(version, policy, plain)
        sent = await rl.publish(policy, readers)
        assert await prints(readers) == [known, known]
        assert (sent.version, sorted(sent.transports)) == (version, ["broadcast"])
    assert isinstance(sent, LiveWeights)
    sizes = [
        sum(prod(part.shape) for each in source.layouts for part in each.parts) for source in sent.manifest.sources
    ]
    assert sum(sizes) * 4 == (await plain.weights()).nbytes
    assert max(sizes) < 0.6 * sum(sizes)
    await mesh.stop()


@pytest.mark.wide
@pytest.mark.slow  # the policy waits for the one that has not asked again
@pytest.mark.parametrize("way", [GLOO, MEMORY])
async def test_who_reads_with_a_rank_that_dies_reads_without_it(two: rl.Mesh, readers: Reader, way: str) -> None:
    await readers.go(way)
    policy = await two.spawn(Sender, config(seed=3))
    await rl.publish(policy, readers)
    await rl.at(readers, dp=1).die()
    weights = (await policy.weights()).read_by(2)
    left = rl.at(readers, dp=0)
    told = await asyncio.gather(left.load(weights), rl.at(readers, dp=1).load(weights), return_exceptions=True)
    assert isinstance(told[1], RankDied)
    assert isinstance(told[0], rl.Batch), told[0]
    assert await prints(left) == [weights.fingerprint()]
    await rl.respawn(readers)


@pytest.mark.parametrize("way", [pytest.param(GLOO, marks=[pytest.mark.wide, pytest.mark.slow]), MEMORY])
async def test_a_rank_that_dies_as_it_sends_is_told_and_the_next_load_is_whole(engine: ProcessEngine, way: str) -> None:
    mesh, other = await rl.Mesh.reserve(engine, 2, NO_CORE), await rl.Mesh.reserve(engine, 1, NO_CORE)
    policy = await mesh.spawn(Sender, config(seed=2))
    reader = await other.spawn(Reader, rl.SamplerConfig(model=MODEL, seed=5))
    await reader.go(way)
    await rl.publish(policy, reader)
    await policy.die(1)
    with pytest.raises(RankFailed, match=r"weights of version 0 .* 2 ranks of the policy") as told:
        await rl.publish(policy, reader)
    assert isinstance(told.value.__cause__, DataLost)
    with pytest.raises(RankFailed, match="did not come whole, and some are in use: publish again"):
        await reader.generate(rl.Batch.of(prompt=["ab"]), rl.Sampling(max_tokens=2)).__anext__()
    await rl.respawn(policy)
    weights = await rl.publish(policy, reader)
    assert await prints(reader) == [weights.fingerprint()]
    assert len(await reader.generate(rl.Batch.of(prompt=["ab"]), rl.Sampling(max_tokens=2)).__anext__()) == 1
    assert (await policy.senders()).tolist() == [1, 1]  # none is left that sends what was before the death
    await mesh.stop()
    await other.stop()


def received(weights: LiveWeights) -> dict[str, torch.Tensor]:
    came: dict[str, torch.Tensor] = {}
    plain = SimpleNamespace(unit=lambda name: name.removesuffix(SCALE), in_files=lambda tensors: tensors)
    naming = cast("Naming", plain)
    outcome = read_broadcast(
        weights.manifest, 1, naming, torch.device("cpu"), came.clear, lambda more: came.update(dict(more))
    )
    assert outcome.transport, outcome
    return came


@pytest.mark.parametrize(
    ("policy", "model", "axes"),
    [(FsdpPolicy, ODD, {"dp": 2}), pytest.param(MegatronPolicy, MODEL, {"tp": 2}, marks=pytest.mark.megatron)],
    ids=["fsdp", "megatron tp"],
)
async def test_in_fp8_whole_rows_come_rounded_and_columns_as_they_are(
    two: rl.Mesh, policy: type[FsdpPolicy], model: rl.NewModel, axes: dict[str, int]
) -> None:
    shaped = two.shape(**({"dp": 1} | axes))
    keys = {"backend": "fsdp" if policy is FsdpPolicy else "megatron", "model": model}
    rounding = await shaped.spawn(policy, config(**keys, weight_sync_dtype="fp8"))
    whole = await shaped.spawn(policy, config(**keys, weight_sync="auto"))
    for version in (1, 2):
        await both_updated(version, rounding, whole)
        sent, known = await rounding.weights(), (await (await whole.weights()).load()).tensors
        assert isinstance(sent, LiveWeights)
        came = received(sent)
        rounded = {name for name in known if name.endswith("_proj.weight")}
        if "tp" in axes:
            rounded = {name for name in rounded if not name.endswith(COLUMNS)}
        assert sent.manifest.in_fp8 == rounded
        assert came.keys() == known.keys() | {name + SCALE for name in rounded}
        for name, array in known.items():
            tensor = torch.from_numpy(array.copy())
            if name in rounded:
                numbers, scales = fp8.quantized(tensor)
                assert torch.equal(came[name].view(torch.uint8), numbers.view(torch.uint8))
                assert torch.equal(came[name + SCALE], scales)
            else:
                assert torch.equal(came[name], tensor)
