"""Jobs that compute with torch, which takes seconds to import: apart from the others."""

from meshrl import ClippedLoss, Mesh, Resources
from meshrl.engines.ray import RayEngine
from meshrl_fsdp.policy import FsdpPolicy
from tests.cluster.jobs import Traveller
from tests.ray.test_fsdp import CONFIG, rollouts


async def trained(engine: RayEngine, each: dict[str, float]) -> object:
    """Three updates of a policy by FSDP2 on two ranks which ask for this: where they were, and what came of it."""
    mesh = (await Mesh.reserve(engine, 2, Resources(cpus=0, custom=each))).shape(dp=2)
    hosts = await (await mesh.spawn(Traveller)).where()
    policy = await mesh.spawn(FsdpPolicy, CONFIG)
    metrics = [await policy.update(rollouts(seed=seed), ClippedLoss()) for seed in range(3)]
    weights = await (await policy.weights()).load()
    return {"hosts": hosts.tolist(), "weights": weights.fingerprint(), "metrics": [each.means() for each in metrics]}
