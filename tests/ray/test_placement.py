"""Where ranks are, what they find there, and requests that cannot be met."""

import asyncio
import os
import socket
import sys
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from meshrl import Actor, Mesh, Resources, current_rank, each, endpoint
from meshrl.engines.ray import RayEngine
from meshrl.engines.ray.channel import interface_of
from meshrl.engines.ray.cluster import Cluster, Node, room_for
from meshrl.engines.remote import Place, environments
from meshrl.errors import ConfigError, NoRoom
from meshrl.mesh import Same

NAMES = ["WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "MASTER_ADDR", "MASTER_PORT"]


class Probe(Actor):
    def __init__(self) -> None:
        self.found = [os.environ[name] for name in NAMES]

    @endpoint
    async def environment(self) -> Same[object]:
        return self.found

    @endpoint
    async def threads(self) -> Same[int]:
        return current_rank().threads

    @endpoint
    async def modules(self) -> Same[object]:
        import sys  # noqa: PLC0415 -- the rank's own

        return {"torch", "transformers"} & set(sys.modules)


async def test_a_rank_finds_what_torch_distributed_needs_and_a_thread_where_no_core_is_free(engine: RayEngine) -> None:
    """As on the local engine, the first mesh takes all cores, and none is waited for."""
    mesh = await Mesh.reserve(engine, 2)
    probe = await mesh.spawn(Probe)
    found = [value for value in await each(probe.environment)() if isinstance(value, list)]
    assert [values[:5] for values in found] == [["2", "0", "0", "2", "1"], ["2", "1", "1", "2", "1"]]
    assert found[0][5:] == found[1][5:]
    assert int(found[0][6]) > 1023
    assert await probe.modules() == set(), "a rank imports what its actor needs"
    assert await (await (await Mesh.reserve(engine, 1)).spawn(Probe)).threads() == 1
    await mesh.stop()
    assert await (await (await Mesh.reserve(engine, 1)).spawn(Probe)).threads() == 2


def test_local_ranks_are_counted_by_node() -> None:
    places = [Place(1, "one", "10.0.0.1", "a", 5000, "boot"), Place(2, "two", "10.0.0.2", "b", 6000, "boot")]
    told = environments({0: places[1], 1: places[0], 2: places[1]}, 3, threads=3)
    master = "10.0.0.2", "6000", "3"
    assert [
        [told[rank][name] for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")]
        for rank in range(3)
    ] == [["0", "2", *master], ["0", "1", *master], ["1", "2", *master]]


async def test_what_the_cluster_can_never_give_is_an_error_at_once(engine: RayEngine) -> None:
    for asks, message in [
        (Resources(cpus=2), r"2 ranks with 2 CPU each, and the cluster has room for 1:\n  \S+ has 2 CPU, 2 shelf"),
        (Resources(gpus=1), "2 ranks with .*1 GPU each, and the cluster has room for 0"),
        (Resources(cpus=0, custom={"shelf": 1.5}), "2 ranks with 1.5 shelf each, and the cluster has room for 1"),
    ]:
        with pytest.raises(ConfigError, match=message):
            await Mesh.reserve(engine, 2, asks)


async def test_what_is_taken_is_waited_for_and_a_process_that_starts_is_told_from_that(
    engine: RayEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("meshrl.engines.remote.engine.FIRST_REPORT", 0.05)
    monkeypatch.setattr("meshrl.engines.remote.engine.NEXT_REPORT", 0.05)
    shelf = Resources(cpus=0, custom={"shelf": 2})
    first = await Mesh.reserve(engine, 1, shelf)
    second = asyncio.create_task(Mesh.reserve(engine, 1, shelf, "judges", str(tmp_path)))
    said = ""
    while "waiting for resources for ranks" not in said:  # where it goes is the command line's to say
        await asyncio.sleep(0.01)
        said += "".join(capsys.readouterr())
    assert f"waiting for resources for ranks mesh=judges logs={tmp_path}/judges-*.log missing=1 of=1" in said
    assert not second.done()
    await first.stop()
    await second
    last = [line for line in "".join(capsys.readouterr()).splitlines() if "waiting for" in line][-1]
    assert "waiting for ranks to start" in last
    assert "free=" not in last


async def test_a_node_that_is_lost_before_its_ranks_have_started_leaves_no_room(
    engine: RayEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a run that is restarted waits for it."""
    found, asked = Cluster.nodes, list[object]()

    async def nodes(cluster: Cluster) -> list[Node]:
        there = await found(cluster)
        asked.append(there)
        return [*there, there[0]._replace(id="lost", has={"shelf": 3, "CPU": 1})] if len(asked) == 1 else there

    monkeypatch.setattr(Cluster, "nodes", nodes)
    monkeypatch.setattr(Cluster, "check", AsyncMock(return_value=True))
    monkeypatch.setattr("meshrl.engines.remote.engine.FIRST_REPORT", 0.01)
    with pytest.raises(NoRoom, match="3 ranks with 1 shelf each, and the cluster has room for 2"):
        await Mesh.reserve(engine, 3, Resources(cpus=0, custom={"shelf": 1}))


def test_a_share_of_a_gpu_lies_on_one_gpu() -> None:
    assert room_for({"GPU": 0.4}, {"GPU": 2}) == 4
    assert room_for({"GPU": 2, "CPU": 1}, {"GPU": 8, "CPU": 3}) == 3


async def test_an_address_where_nothing_answers_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    engine = RayEngine("127.0.0.1:9")
    with pytest.raises(
        ConfigError, match=r"no Ray cluster answers at 127.0.0.1:9: .*; start one with `ray start --head`"
    ):
        await Mesh.reserve(engine, 1)
    await engine.close()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems are not asked")
def test_gloo_is_told_the_interface_of_an_address() -> None:
    name = interface_of("127.0.0.1")
    assert name in [name for _, name in socket.if_nameindex()]
    assert interface_of("192.0.2.1") is None, "an address of no machine"
