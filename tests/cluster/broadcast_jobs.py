"""A job that broadcasts weights from host to host. It loads more modules than the other jobs with weights."""

import asyncio

from meshrl import Mesh, NewModel, PolicyConfig, Resources, SamplerConfig, endpoint
from meshrl.engines.ray import RayEngine
from meshrl.mesh import Same
from meshrl_torch.sample.sampler import TorchSampler
from meshrl_torch.train.fsdp.roles import FsdpPolicy
from tests.cluster.jobs import on

MODEL = NewModel(characters="abcdefgh>", hidden_size=512, ffn_size=2048, layers=2, heads=2, max_tokens=48)
"""32 MiB in float32."""


class Sampler(TorchSampler):
    @endpoint
    async def ways(self) -> Same[str]:
        return ", ".join(sorted(self._arrivals.transports))


async def broadcast(engine: RayEngine, hosts: list[str], versions: int) -> object:
    """How weights come to two samplers of each host from a policy with a rank on each, and their largest difference."""
    config = PolicyConfig(backend="fsdp", model=MODEL, weight_sync="broadcast", bucket_mib=8)
    spread = Resources(cpus=0, placement="spread")
    policy = await (await Mesh.reserve(engine, len(hosts), spread)).spawn(FsdpPolicy, config)
    meshes = [await Mesh.reserve(engine, 2, on(host)) for host in hosts]
    samplers = [await mesh.spawn(Sampler, SamplerConfig(model=MODEL, seed=1)) for mesh in meshes]
    most = 0.0
    for _ in range(versions):
        weights = (await policy.weights()).read_by(2 * len(hosts))
        loaded = await asyncio.gather(*(each.load(weights) for each in samplers))
        most = max(most, *(float(each.row("difference").max()) for each in loaded))
    return [await each.ways() for each in samplers], most
