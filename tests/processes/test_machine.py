import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from meshrl import Mesh, Resources, at, each, endpoint, respawn
from meshrl.engines.processes import ProcessEngine
from meshrl.errors import ConfigError, RankDied
from meshrl.mesh import Same
from tests.processes.conftest import NO_CORE, Numbered

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]

CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


class Has(Numbered):
    @endpoint
    async def variable(self, name: str) -> Same[str]:
        return os.environ[name]

    @endpoint
    async def cores(self) -> Same[list[int]]:
        return sorted(os.sched_getaffinity(0))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine() -> AsyncIterator[ProcessEngine]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
        made = ProcessEngine()
        yield made
        await made.close()


async def test_modules_are_imported_without_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = "PYTORCH_NVML_BASED_CUDA_CHECK"
    (tmp_path / "asks.py").write_text(f"import os\nos.environ['ASKED'] = os.environ[{check!r}]\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(check, "0")
    made = ProcessEngine(["asks"])
    has = await (await Mesh.reserve(made, 1, NO_CORE)).spawn(Has)
    assert [await has.variable(name) for name in ("ASKED", check)] == ["1", "0"]
    await made.close()


async def gpus_of(mesh: Mesh) -> list[str]:
    return await each((await mesh.spawn(Has)).variable)("CUDA_VISIBLE_DEVICES")


async def test_the_port_of_a_ranks_store_is_its_own_before_it_listens(engine: ProcessEngine) -> None:
    mesh = await Mesh.reserve(engine, 1, NO_CORE)
    has = await mesh.spawn(Has)
    for _ in range(2):
        port = int(await has.variable("MASTER_PORT"))
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("", port))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        with pytest.raises(RankDied):
            await has.die()
        await respawn(has)
    await mesh.stop()


async def test_each_rank_sees_its_own_gpus_which_are_given_back(engine: ProcessEngine) -> None:
    whole = await Mesh.reserve(engine, 2, Resources(cpus=0, gpus=2))
    assert await gpus_of(whole) == ["0,1", "2,3"]
    none = await Mesh.reserve(engine, 2, NO_CORE)
    assert await gpus_of(none) == ["", ""]
    with pytest.raises(ConfigError, match=r"1 ranks with 0\.5 GPUs each, .* has 0 of GPU 0, .* stop a mesh"):
        await Mesh.reserve(engine, 1, Resources(cpus=0, gpus=0.5))
    await whole.stop()
    four = await Mesh.reserve(engine, 4, Resources(cpus=0, gpus=1))
    has = await four.spawn(Has)
    assert await gpus_of(four) == ["0", "1", "2", "3"]
    with pytest.raises(RankDied):
        await at(has, dp=1).die()
    await respawn(has)
    assert await gpus_of(four) == ["0", "1", "2", "3"], "that of the dead is its successor's"
    for mesh in (none, four):
        await mesh.stop()


async def test_ranks_share_a_gpu(engine: ProcessEngine) -> None:
    shares = await Mesh.reserve(engine, 3, Resources(cpus=0, gpus=0.5))
    assert await gpus_of(shares) == ["0", "0", "1"]
    whole = await Mesh.reserve(engine, 1, Resources(cpus=0, gpus=2))
    assert await gpus_of(whole) == ["2,3"], "not one that is shared"
    with pytest.raises(ConfigError, match=r"2 ranks with 0\.3 GPUs each.* has 0 of GPU 0, 0\.5 of GPU 1, 0 of GPU 2"):
        await Mesh.reserve(engine, 2, Resources(cpus=0, gpus=0.3))
    more = await Mesh.reserve(engine, 1, Resources(cpus=0, gpus=0.3))
    assert await gpus_of(more) == ["1"]
    for mesh in (shares, whole, more):
        await mesh.stop()
    all_of_it = await Mesh.reserve(engine, 1, Resources(cpus=0, gpus=4))
    assert await gpus_of(all_of_it) == ["0,1,2,3"]
    await all_of_it.stop()


async def test_what_a_machine_does_not_have_is_said(engine: ProcessEngine) -> None:
    with pytest.raises(ConfigError, match="1 ranks with 5 GPUs each, but this machine has 1 of GPU 0"):
        await Mesh.reserve(engine, 1, Resources(gpus=5))
    with pytest.raises(ConfigError, match=r"asks for shelf, .* use Ray"):
        await Mesh.reserve(engine, 1, Resources(custom={"shelf": 1}))


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores that processes can be pinned to")
async def test_ranks_are_pinned_to_cores_of_their_own_which_are_given_back(engine: ProcessEngine) -> None:
    one, other = [await Mesh.reserve(engine, 1, Resources(cpus=1)) for _ in range(2)]
    seen = [await each((await mesh.spawn(Has)).cores)() for mesh in (one, other)]
    assert seen == [[[CORES[0]]], [[CORES[1]]]]
    await one.stop()
    again = await Mesh.reserve(engine, 1, Resources(cpus=1))
    assert await each((await again.spawn(Has)).cores)() == [[CORES[0]]]
    for mesh in (other, again):
        await mesh.stop()
    rest = await Mesh.reserve(engine, 2)
    has = await rest.spawn(Has)
    half = len(CORES) // 2
    assert await each(has.cores)() == [CORES[:half], CORES[half : 2 * half]]
    assert await each(has.variable)("OMP_NUM_THREADS") == [str(half)] * 2
    none = await (await Mesh.reserve(engine, 1, NO_CORE)).spawn(Has)
    assert await each(none.cores)() == [CORES], "without cores of its own it runs on all"
    assert await none.variable("OMP_NUM_THREADS") == "1"
    await rest.stop()
