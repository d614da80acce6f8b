"""Weights that FSDP's ranks broadcast out of their shards: the bits of the other way, who comes late, who dies."""

import asyncio
import gc
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import Qwen3MoeConfig

from meshrl import (
    Batch,
    ClippedLoss,
    DataLost,
    Gather,
    Mesh,
    NewModel,
    PolicyConfig,
    Ragged,
    RankDied,
    RankFailed,
    SamplerConfig,
    Sampling,
    Sum,
    Weights,
    at,
    endpoint,
    publish,
    respawn,
)
from meshrl.engines.processes import ProcessEngine
from meshrl_fsdp.policy import FsdpPolicy
from meshrl_hf import fp8
from meshrl_hf.collective import Flight
from meshrl_hf.handover import Taking
from meshrl_hf.live_weights import LiveWeights
from meshrl_hf.offer import SCALE
from meshrl_hf.transfer import arrays
from meshrl_inference.assembly import read
from meshrl_megatron.policy import MegatronPolicy
from meshrl_torch.sampler import TorchSampler
from tests.processes.conftest import NO_CORE, running, until

if TYPE_CHECKING:
    from meshrl_inference.naming import Naming

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]

MODEL: Final = NewModel(characters="abcdefgh>", hidden_size=256, ffn_size=512, layers=2, heads=2, max_tokens=48)
"""5 MiB, in buckets of the smallest size."""
ODD: Final = NewModel(characters="abcdefgh>", hidden_size=252, ffn_size=509, layers=2, heads=3, max_tokens=48)
"""Two ranks have different numbers of rows of some matrices."""
COLUMNS = ("o_proj.weight", "down_proj.weight")
"""The ends of names of matrices that `tp` splits along their columns."""


def die_in_flight() -> None:
    """Kill this process at its second bucket, sent or taken."""
    did = list[int]()

    def once(do: Callable[..., Any]) -> Callable[..., Any]:
        def done(*rest: Any, **keywords: Any) -> Any:
            if did:
                os.kill(os.getpid(), signal.SIGKILL)
            did.append(1)
            return do(*rest, **keywords)

        return done

    Flight.add = once(Flight.add)  # type: ignore[method-assign]
    Taking.bucket = once(Taking.bucket)  # type: ignore[method-assign]


class Sender(FsdpPolicy):
    """A policy whose first or second rank may die while it sends."""

    @endpoint
    async def pid(self) -> Gather[np.ndarray]:
        """Of each rank."""
        return np.array([os.getpid()])

    @endpoint
    async def senders(self) -> Gather[np.ndarray]:
        """How many threads of each process send, or wait to."""
        gc.collect()
        return np.array([sum(each.name == "meshrl-sender" for each in threading.enumerate())])

    @endpoint
    async def die(self, rank: int) -> Sum[int]:
        """A rank dies when it has two buckets in flight."""
        if self._trainable.passes.ranks.number == rank:
            die_in_flight()
        return 1


class Reader(TorchSampler):
    """A sampler that tells what it has."""

    @endpoint
    async def pid(self) -> Gather[np.ndarray]:
        """Of each rank."""
        return np.array([os.getpid()])

    @endpoint
    async def die(self) -> Sum[int]:
        """This rank dies when it has two buckets in flight."""
        die_in_flight()
        return 1

    @endpoint
    async def go(self, way: str) -> Sum[int]:
        """From now on, weights come so."""
        os.environ["MESHRL_HANDOVER"] = "0" if way == "by gloo" else "1"
        return 1

    @endpoint
    async def routes(self) -> Gather[Batch]:
        """What each rank has last said of how weights arrive."""
        return Batch.of(route=[", ".join(self._arrivals._said)])

    @endpoint
    async def prints(self) -> Gather[Batch]:
        """The fingerprint of each rank's tensors."""
        return Batch.of(print=[Weights(0, dict(arrays(self._taken.items()))).fingerprint()])


def config(**changes: object) -> PolicyConfig:
    return PolicyConfig.model_validate(
        {
            "backend": "fsdp",
            "model": MODEL,
            "optimizer": {"lr": 1e-2},
            "weight_sync": "broadcast",
            "bucket_mib": 1,
            **changes,
        }
    )


def rollouts(seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    tokens = Ragged.of([rng.integers(2, 11, 7) for _ in range(6)], np.int32)
    return Batch.of(
        tokens=tokens,
        loss_mask=Ragged(np.tile(np.arange(7) >= 3, 6), tokens.offsets),
        sampler_logprobs=Ragged(np.full(42, -2.0, np.float32), tokens.offsets),
        advantages=rng.normal(size=6).astype(np.float32),
    )


async def routes(readers: Reader) -> list[object]:
    return list((await (await readers.routes()).load()).objects("route"))


async def prints(readers: Reader) -> list[object]:
    return list((await (await readers.prints()).load()).objects("print"))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def two(engine: ProcessEngine) -> AsyncIterator[Mesh]:
    made = await Mesh.reserve(engine, 2, NO_CORE)
    yield made
    await made.stop()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def readers(engine: ProcessEngine) -> AsyncIterator[Reader]:
    made = await Mesh.reserve(engine, 2, NO_CORE)
    yield await made.spawn(Reader, SamplerConfig(model=MODEL, seed=5))
    await made.stop()


GLOO, MEMORY = "by gloo", "through shared memory"


async def test_samplers_get_the_bits_of_whole_weights_and_one_that_was_made_again_reads_with_the_others(
    two: Mesh, readers: Reader, tmp_path: Path
) -> None:
    policy = await two.spawn(Sender, config())
    plain = await two.spawn(FsdpPolicy, config(weight_sync="auto"))
    first = await publish(policy, readers)
    for version, way in ((1, GLOO), (2, MEMORY)):
        await readers.go(way)
        for each in (policy, plain):
            await each.update(rollouts(version), ClippedLoss())
        sent = await publish(policy, readers)
        known = (await (await plain.weights()).load()).fingerprint()
        assert await prints(readers) == [known, known]
        assert (sent.version, sorted(sent.ways), sent.fingerprint()) == (version, ["broadcast"], known)  # read whole
        assert await routes(readers) == [f"broadcast {way}"] * 2
    with pytest.raises(DataLost, match=r"version 0 .* has been updated since"):
        first.tensors  # noqa: B018 -- they come when they are looked at
    with pytest.raises(RankFailed, match=r"version 0 .* has been updated since"):
        await readers.load(first)
    assert len(await readers.generate(Batch.of(prompt=["ab", "ba"]), Sampling(max_tokens=2)).__anext__()) == 1

    pid = int((await readers.pid())[0])
    os.kill(pid, signal.SIGKILL)
    await until(lambda: not running([pid]))
    await respawn(readers)
    assert await prints(readers) != [known, known]
    for way in (GLOO, MEMORY):
        await readers.go(way)
        weights = await publish(policy, readers)
        assert await prints(readers) == [known, known]
        assert await routes(readers) == [f"broadcast {way}"] * 2
    await publish(plain, readers)
    assert await routes(readers) == ["shared memory"] * 2
    await policy.checkpoint(str(tmp_path / "state"))
    await policy.restore(str(tmp_path / "state"))
    with pytest.raises(DataLost, match=r"version 2 .* has been updated since"):
        weights.tensors  # noqa: B018


@pytest.fixture(scope="module")
def mixture(random_model: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of four experts."""
    shape: dict[str, Any] = {"vocab_size": 11, "hidden_size": 32, "moe_intermediate_size": 24, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    experts: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
    ends: dict[str, Any] = {"max_position_embeddings": 48, "bos_token_id": None, "eos_token_id": 1}
    config = Qwen3MoeConfig(**shape, **heads, **experts, **ends)
    return random_model(config, tmp_path_factory.mktemp("mixture"), noise=0)


@pytest.mark.megatron
async def test_ranks_of_megatron_send_their_own_experts(engine: ProcessEngine, two: Mesh, mixture: str) -> None:
    """They are those that it gathers for others."""
    mesh = await Mesh.reserve(engine, 2, NO_CORE)
    readers = await mesh.spawn(Reader, SamplerConfig(model=mixture, seed=5))
    keys = {"backend": "megatron", "model": mixture, "megatron": {"experts": 2}}
    policy = await two.spawn(MegatronPolicy, config(**keys))
    plain = await two.spawn(MegatronPolicy, config(**keys, weight_sync="auto"))
    for version in (1, 2):
        for each in (policy, plain):
            await each.update(rollouts(version), ClippedLoss())
        sent = await publish(policy, readers)
        known = (await (await plain.weights()).load()).fingerprint()
        assert await prints(readers) == [known, known]
        assert (sent.version, sorted(sent.ways)) == (version, ["broadcast"])
    assert isinstance(sent, LiveWeights)
    sizes = [sum(prod(part.shape) for each in source.layouts for part in each.parts) for source in sent.offer.sources]
    assert sum(sizes) * 4 == (await plain.weights()).nbytes
    assert max(sizes) < 0.6 * sum(sizes)
    await mesh.stop()


@pytest.mark.wide
@pytest.mark.slow  # the policy waits for the one that has not asked again
@pytest.mark.parametrize("way", [GLOO, MEMORY])
async def test_who_reads_with_a_rank_that_dies_reads_without_it(two: Mesh, readers: Reader, way: str) -> None:
    await readers.go(way)
    policy = await two.spawn(Sender, config(seed=3))
    await publish(policy, readers)
    await at(readers, dp=1).die()
    weights = (await policy.weights()).read_by(2)
    left = at(readers, dp=0)
    told = await asyncio.gather(left.load(weights), at(readers, dp=1).load(weights), return_exceptions=True)
    assert isinstance(told[1], RankDied)
    assert isinstance(told[0], Batch), told[0]
    assert await prints(left) == [weights.fingerprint()]
    await respawn(readers)


@pytest.mark.parametrize("way", [pytest.param(GLOO, marks=[pytest.mark.wide, pytest.mark.slow]), MEMORY])
async def test_a_rank_that_dies_while_it_sends_is_told_and_the_next_load_is_whole(
    engine: ProcessEngine, way: str
) -> None:
    mesh, other = await Mesh.reserve(engine, 2, NO_CORE), await Mesh.reserve(engine, 1, NO_CORE)
    policy = await mesh.spawn(Sender, config(seed=2))
    reader = await other.spawn(Reader, SamplerConfig(model=MODEL, seed=5))
    await reader.go(way)
    await publish(policy, reader)
    await policy.die(1)
    with pytest.raises(RankFailed, match=r"weights of version 0 .* 2 ranks of the policy") as told:
        await publish(policy, reader)
    assert isinstance(told.value.__cause__, DataLost)
    with pytest.raises(RankFailed, match="did not come whole, and some are in use: publish again"):
        await reader.generate(Batch.of(prompt=["ab"]), Sampling(max_tokens=2)).__anext__()
    await respawn(policy)
    weights = await publish(policy, reader)
    assert await prints(reader) == [weights.fingerprint()]
    assert len(await reader.generate(Batch.of(prompt=["ab"]), Sampling(max_tokens=2)).__anext__()) == 1
    assert (await policy.senders()).tolist() == [1, 1]  # none is left that sends what was before the death
    await mesh.stop()
    await other.stop()


class Plain:
    """Names as they are, each tensor by itself."""

    def unit(self, name: str) -> str:
        """Itself."""
        return name.removesuffix(SCALE)

    def in_files(self, tensors: Any) -> Any:
        """As they are."""
        return tensors


def received(weights: LiveWeights) -> dict[str, torch.Tensor]:
    """What an engine gets, in this process."""
    came: dict[str, torch.Tensor] = {}
    naming = cast("Naming", Plain())
    outcome = read(weights.offer, 1, naming, torch.device("cpu"), came.clear, lambda more: came.update(dict(more)))
    assert outcome.way, outcome
    return came


@pytest.mark.parametrize(
    ("policy", "model", "axes"),
    [
        (FsdpPolicy, ODD, {"dp": 2}),
        pytest.param(MegatronPolicy, MODEL, {"tp": 2}, marks=pytest.mark.megatron),
    ],
    ids=["fsdp", "megatron tp"],
)
async def test_in_fp8_whole_rows_come_rounded_and_columns_as_they_are(
    two: Mesh, policy: type[FsdpPolicy], model: NewModel, axes: dict[str, int]
) -> None:
    shaped = two.shape(**({"dp": 1} | axes))
    kind = "fsdp" if policy is FsdpPolicy else "megatron"
    rounding = await shaped.spawn(policy, config(backend=kind, model=model, weight_sync_dtype="fp8"))
    whole = await shaped.spawn(policy, config(backend=kind, model=model, weight_sync="auto"))
    for version in (1, 2):
        for each in (rounding, whole):
            await each.update(rollouts(version), ClippedLoss())
        sent, known = await rounding.weights(), (await (await whole.weights()).load()).tensors
        assert isinstance(sent, LiveWeights)
        came = received(sent)
        rounded = {name for name in known if name.endswith("_proj.weight")}
        if "tp" in axes:
            rounded = {name for name in rounded if not name.endswith(COLUMNS)}
        assert sent.offer.in_fp8 == rounded
        assert came.keys() == known.keys() | {name + SCALE for name in rounded}
        for name, array in known.items():
            tensor = torch.from_numpy(array.copy())
            if name in rounded:
                numbers, scales = fp8.quantized(tensor)
                assert torch.equal(came[name].view(torch.uint8), numbers.view(torch.uint8))
                assert torch.equal(came[name + SCALE], scales)
            else:
                assert torch.equal(came[name], tensor)
