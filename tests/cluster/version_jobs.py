"""A job that waits for a node which has other versions."""

from meshrl import Mesh, Resources, at, respawn
from meshrl.engines.ray import RayEngine
from meshrl.errors import ConfigError
from tests.cluster.jobs import Traveller, say


async def reserved(engine: RayEngine) -> object:
    """Reserve a rank on every host that there is, and say what is told."""
    try:
        await Mesh.reserve(engine, 3, Resources(cpus=0, placement="spread"))
    except ConfigError as refused:
        return str(refused)
    return ""


async def joined(engine: RayEngine) -> object:
    """Begin with one rank of two; what is told of the other when its node joins, and where the first is then."""
    mesh = await Mesh.reserve(engine, 2, Resources(cpus=0, custom={"rollout": 1}, min_ranks=1))
    one = await mesh.spawn(Traveller)
    say("ready")
    try:
        await respawn(at(one, dp=1))
    except ConfigError as refused:
        return str(refused), (await at(one, dp=0).where()).tolist()
    return "", []
