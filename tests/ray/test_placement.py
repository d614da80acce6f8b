import asyncio
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import ray
from numpy.typing import NDArray

from meshrl import Actor, Gather, Mesh, Resources, Run, RunConfig, current_rank, each, endpoint
from meshrl.engines.ray import RayEngine
from meshrl.engines.ray.cluster import host_and_port
from meshrl.engines.ray.code import installed, table
from meshrl.errors import ConfigError, RankFailed
from meshrl.mesh import Same
from meshrl.roles import packages_of
from tests.mesh.test_events import Clocked, calls, read
from tests.ray.conftest import NO_CORE

NAMES = ["WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "MASTER_ADDR", "MASTER_PORT"]


class Probe(Actor):
    def __init__(self) -> None:
        self.found = [os.environ[name] for name in NAMES]

    @endpoint
    async def environment(self) -> Same[object]:
        return self.found

    @endpoint
    async def variables(self, names: list[str]) -> Same[object]:
        return [os.environ.get(name) for name in names]

    @endpoint
    async def threads(self) -> Same[int]:
        return current_rank().threads

    @endpoint
    async def modules(self) -> Same[object]:
        import sys  # noqa: PLC0415 -- the rank's own

        return {"torch", "transformers"} & set(sys.modules)


async def test_a_rank_finds_what_torch_distributed_needs_and_a_thread_where_no_core_is_free(engine: RayEngine) -> None:
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


@pytest.mark.usefixtures("ray_cluster")
async def test_ranks_of_a_cluster_that_runs_get_the_variables_that_the_run_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "a")
    monkeypatch.setenv("JUDGE_URL", "b")
    named = RunConfig(engine="ray", environment=["JUDGE_*"], folder=str(tmp_path))
    async with Run(named) as run:
        probe = await (await run.mesh(1)).spawn(Probe)
        assert await probe.variables(["JUDGE_KEY", "JUDGE_URL", "RANK"]) == ["a", "b", "0"]
    async with Run(named.model_copy(update={"environment": []})) as run:
        assert await (await (await run.mesh(1)).spawn(Probe)).variables(["JUDGE_KEY"]) == [None]
    assert "JUDGE_URL" not in (tmp_path / "run" / "config.toml").read_text("utf-8")


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


async def test_sigterm_reaches_the_callers_handler_while_rays_own_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(*_: object, **__: object) -> None:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(number))  # as Ray does
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    came: list[int] = []

    def handler(number: int, _: object) -> None:
        came.append(number)

    before = signal.signal(signal.SIGTERM, handler)
    engine = RayEngine()
    try:
        with pytest.raises(asyncio.CancelledError):
            await Mesh.reserve(engine, 1, NO_CORE)
        await engine.close()
        assert came == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_host_that_is_an_ipv6_address_has_brackets_only_in_the_address_of_the_cluster() -> None:
    assert host_and_port("[fd00::1]:6379") == ("fd00::1", 6379)
    assert host_and_port("10.0.0.2:6379") == ("10.0.0.2", 6379)


async def test_a_cluster_that_does_not_answer_is_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    engine = RayEngine("127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"no Ray cluster answers at 127.0.0.1:9: .*one with `ray start --head`"):
        await Mesh.reserve(engine, 1, NO_CORE)
    await engine.close()


@pytest.mark.parametrize(
    ("raised", "says", "folder"),
    [
        (Exception("The current node timed out"), "within 0 s: .*timed out.*overloaded.*`ray start --head`", None),
        (OSError("AF_UNIX path length cannot exceed 107 bytes"), "AF_UNIX path .*TMPDIR.*HOME", "/tmp/ray"),  # noqa: S108
        (PermissionError(13, "Permission denied", "/home/x/.ray"), "'/home/x/.ray'.*TMPDIR.*HOME", None),
    ],
)
async def test_a_ray_that_cannot_start_names_the_place_and_gets_short_paths_and_a_token_of_its_own(
    raised: Exception, says: str, folder: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, object] = {}

    def init(*_: object, **options: object) -> None:
        given.update(options, token=os.environ.get("RAY_AUTH_TOKEN"))
        raise raised

    for name in [name for name in os.environ if name.startswith("RAY_A")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("long" * 30)) if folder else "/tmp")  # noqa: S108
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    engine = RayEngine()
    with pytest.raises(ConfigError, match=rf"(?s)did not start .*{says}"):
        await Mesh.reserve(engine, 1, NO_CORE)
    await engine.close()
    assert (given.get("_temp_dir"), len(str(given["token"]))) == (folder, 32)


HERE = {"Python": "3.11.7", "meshrl": "0.1.0", "torch": "2.13.0"}


def test_the_table_names_each_node_package_and_both_versions() -> None:
    others = {
        "10.0.0.2": {**HERE, "torch": "2.12.1"},
        "10.0.0.13": {**HERE, "Python": "3.11.9", "torch": "not installed", "meshrl": "not installed"},
    }
    first, *rows, remedy = table(HERE, others).splitlines()
    assert first.startswith("2 nodes have other versions")
    assert rows == [
        "  node       package  here    there",
        "  10.0.0.2   torch    2.13.0  2.12.1",
        "  10.0.0.13  Python   3.11.7  3.11.9",
        "  10.0.0.13  meshrl   0.1.0   not installed",
    ]
    assert remedy.startswith("install Python==3.11.7 and meshrl==0.1.0 and torch==2.13.0 on each, as `pip install ")


def test_a_build_is_not_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.13.0+cpu" if name == "torch" else "1.0")
    assert installed(["torch", "other"])["torch"] == "2.13.0"


def test_the_packages_of_a_backend_are_those_of_its_extra_and_what_that_asks_for() -> None:
    assert packages_of("vllm") == {"meshrl", "vllm"}
    assert {"meshrl", "megatron-core", "torch", "transformers"} <= packages_of("megatron")
    assert packages_of("sim") == {"meshrl"}
    assert packages_of("no-such-backend") == frozenset()


class Timed(Clocked):
    @endpoint
    async def now(self) -> Gather[NDArray[np.float64]]:
        return np.array([time.monotonic()])  # the loop of a rank counts milliseconds


async def test_ranks_run_within_their_calls(engine: RayEngine, tmp_path: Path) -> None:
    async with Run(RunConfig(name="mine", folder=str(tmp_path)), engine=engine) as run:
        clocked = await (await run.mesh(2, NO_CORE)).spawn(Timed)
        ran = await clocked.now() - run.recorder.began
        async for _ in clocked.times(10_000, 0):
            break
        with pytest.raises(RankFailed):
            await clocked.fail(0)
    found = calls(read(run.folder))
    assert {name: call.error for name, (call, _) in found.items()} == {"now": None, "times": None, "fail": "RankFailed"}
    for name, (call, spans) in found.items():
        assert [(span.mesh, span.actor, span.endpoint, span.rank) for span in spans] == [
            ("1", "Timed", name, rank) for rank in range(2)
        ]
        assert all(call.began <= span.began <= span.ended <= call.ended for span in spans)
    assert all(span.began <= at <= span.ended for span, at in zip(found["now"][1], ran, strict=True))
