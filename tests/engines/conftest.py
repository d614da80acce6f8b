"""One fixture for all engines: what is tested with it holds on each."""

from collections.abc import AsyncIterator

import pytest

from meshrl import LocalEngine, Resources
from meshrl.engines.processes import ProcessEngine
from meshrl.mesh import Engine

ENGINES = ["local", "by reference", "processes", "ray"]


@pytest.fixture(params=ENGINES)
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
    """`by reference`: the local engine, where every column stays where it was made."""
    made: Engine
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
        from meshrl.engines.ray import RayEngine  # noqa: PLC0415 -- slow to import

        made = RayEngine()
    elif request.param == "processes":
        made = ProcessEngine()
    else:
        made = LocalEngine(cores=4, inline_bytes=0) if request.param == "by reference" else LocalEngine(cores=4)
    yield made
    await made.close()


@pytest.fixture
def small(request: pytest.FixtureRequest, engine: Engine) -> Resources:
    """Ranks that take a thread of their own where that is cheap, and no core of the cluster."""
    return Resources(cpus=1 if isinstance(engine, LocalEngine) else 0)
