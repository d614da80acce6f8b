"""Weights from a policy's GPU to a reader: by each route, from one rank and from two, and where GPUs are shared."""

import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import torch

import meshrl as rl
from meshrl.engines.processes import ProcessEngine
from meshrl_torch.train.fsdp.roles import FsdpPolicy
from meshrl_torch.weights.live_weights import InPlace, LiveWeights
from meshrl_torch.weights.transfer import arrays
from meshrl_torch.wire.reader import Reader
from tests.backends.material import MODEL, updated

MIG = "MIG-00000000-0000-0000-0000-0000000000{:02x}"
"""The form of a name of a part of a GPU."""


class Model(rl.Actor):
    """Tensors that weights are read into, as an engine's process has them."""

    def __init__(self) -> None:
        self._reader = Reader()

    @rl.endpoint
    async def read(self, weights: rl.Weights, kind: str, handover: str) -> rl.Gather[rl.Batch]:
        assert isinstance(weights, LiveWeights)
        os.environ["MESHRL_HANDOVER"] = handover
        tensors = {name: torch.zeros(shape, device=kind) for name, shape in weights.manifest.shapes.items()}
        way = self._reader.read(weights.manifest, weights.together, InPlace(tensors, lambda: None), print)
        print_ = rl.Weights(0, dict(arrays(tensors.items()))).fingerprint()
        return rl.Batch.of(way=[way], print=[print_], gpu=[str(torch.cuda.get_device_properties(0).uuid)])


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine() -> AsyncIterator[ProcessEngine]:
    made = ProcessEngine(["meshrl_torch.train.fsdp.roles"])
    yield made
    await made.close()


async def routes(policy: rl.Policy, readers: Model, count: int, *ways: tuple[str, str]) -> list[str]:
    """Read the weights in each way, a device and if memory may be opened, and after an update."""
    found = list[str]()
    for kind, handover in ways:
        await updated(policy)
        weights = await policy.weights()
        told = await (await readers.read(weights.read_by(count), kind, handover)).load()
        assert set(told.objects("print")) == {weights.fingerprint()}
        found += {str(way) for way in told.objects("way")}
    return found


MEMORY, IPC, NCCL, GLOO = "through shared memory", "by CUDA IPC", "by NCCL", "by gloo"


@pytest.mark.parametrize(
    ("senders", "share", "expected"),
    [
        pytest.param(1, 1.0, [NCCL, NCCL, MEMORY, GLOO], id="apart"),
        pytest.param(1, 0.5, [IPC, GLOO, MEMORY, GLOO], id="two processes on one GPU"),
        pytest.param(2, 1.0, [IPC, IPC], id="in the processes of the policy, on two GPUs"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_each_route_brings_the_bits(
    engine: ProcessEngine, senders: int, share: float, expected: list[str]
) -> None:
    main = await rl.Mesh.reserve(engine, senders, rl.Resources(cpus=0, gpus=share))
    config = rl.PolicyConfig(model=MODEL, backend="fsdp", weight_sync="broadcast", bucket_mib=1)
    policy = await main.spawn(FsdpPolicy, config)
    if senders == 2:
        found = await routes(policy, await main.spawn(Model), 2, ("cuda", "1"), ("cuda", "1"))
    else:
        other = await rl.Mesh.reserve(engine, 1, rl.Resources(cpus=0, gpus=share))
        ways = [(kind, handover) for kind in ("cuda", "cpu") for handover in ("1", "0")]
        found = await routes(policy, await other.spawn(Model), 1, *ways)
        await other.stop()
    await main.stop()
    assert found == expected


class Names(rl.Actor):
    @rl.endpoint
    async def gpu(self) -> rl.mesh.Same[tuple[str, str]]:
        return os.environ["CUDA_VISIBLE_DEVICES"], str(torch.cuda.get_device_properties(0).uuid)


async def test_parts_of_gpus_are_given_out_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(MIG.format, (1, 0))))
    engine = ProcessEngine()
    try:
        mesh = await rl.Mesh.reserve(engine, 2, rl.Resources(cpus=0, gpus=1))
        told = await rl.each((await mesh.spawn(Names)).gpu)()
    finally:
        await engine.close()
    assert told == [(MIG.format(number), MIG.format(number)[4:]) for number in (1, 0)]
