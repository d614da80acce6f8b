"""One fixture for all engines: what is tested with it holds on each."""

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio

from meshrl import LocalEngine, Mesh, Resources
from meshrl.engines.processes import ProcessEngine
from meshrl.mesh import Engine

NO_CORE = Resources(cpus=0)
RAY = pytest.param("ray", marks=pytest.mark.wide)

on_processes = pytest.mark.parametrize("engine", ["processes", RAY], indirect=True)
on_ray_too = pytest.mark.parametrize("engine", ["local", "processes", "ray"], indirect=True)
where_columns_stay = pytest.mark.parametrize("engine", ["local", "by reference", "processes", RAY], indirect=True)
"""`by reference`: the local engine, where every column stays where it was made."""

Reserve = Callable[..., Awaitable[Mesh]]


@pytest_asyncio.fixture(loop_scope="session", scope="session")
async def processes() -> AsyncIterator[Callable[[], ProcessEngine]]:
    """One for all tests, which stop their meshes: starting one costs an interpreter and its imports."""
    made: list[ProcessEngine] = []

    def of() -> ProcessEngine:
        if not made:
            made.append(ProcessEngine())
        return made[0]

    yield of
    for engine in made:
        await engine.close()


@pytest_asyncio.fixture(loop_scope="session", params=["local", "processes", RAY])
async def engine(request: pytest.FixtureRequest, processes: Callable[[], ProcessEngine]) -> AsyncIterator[Engine]:
    if request.param == "processes":
        yield processes()
        return
    made: Engine
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
        from meshrl.engines.ray import RayEngine  # noqa: PLC0415 -- slow to import

        made = RayEngine()
    else:
        made = LocalEngine(cores=4, inline_bytes=0) if request.param == "by reference" else LocalEngine(cores=4)
    yield made
    await made.close()


@pytest_asyncio.fixture(loop_scope="session")
async def reserve(engine: Engine) -> AsyncIterator[Reserve]:
    """`await reserve(2)`: ranks that take a thread of their own where that is cheap, and no core of other machines."""
    made: list[Mesh] = []

    async def of(count: int, resources: Resources | None = None, *named: str) -> Mesh:
        small = Resources(cpus=1 if isinstance(engine, LocalEngine) else 0)
        made.append(await Mesh.reserve(engine, count, resources or small, *named))
        return made[-1]

    yield of
    for mesh in made:
        await mesh.stop()


@pytest_asyncio.fixture(loop_scope="session")
async def mesh(reserve: Reserve) -> Mesh:
    return await reserve(2)
