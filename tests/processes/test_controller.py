"""What ranks have of the process that they are forked from, and what ends with a controller, however it ends."""

import asyncio
import gc
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from meshrl import Mesh, Resources, each, endpoint, respawn
from meshrl.engines.processes import ProcessEngine
from meshrl.errors import ConfigError, RankDied
from meshrl.mesh import Same, sweep
from tests.processes.conftest import NO_CORE, Numbered, made_now, running, segments, until, wait_until

pytestmark = pytest.mark.process

SCRIPT = """
import asyncio, os, sys, time
from pathlib import Path
import numpy as np
from meshrl import Actor, Batch, Gather, Mesh, Resources, current_rank, endpoint
from meshrl.engines.processes import ProcessEngine

class Rows(Actor):
    @endpoint
    async def make(self) -> Gather[Batch]:
        return Batch.of(rewards=np.arange(1000))

    @endpoint
    async def wait(self, note: str) -> None:
        Path(f"{note}-{current_rank().index}").touch()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            Path(note).write_text("cancelled")
            raise

async def main():
    engine = ProcessEngine(inline_bytes=0)
    rows = await (await Mesh.reserve(engine, 2, Resources(cpus=0))).spawn(Rows)
    batch, own = await rows.make(), engine.put(np.arange(1000))
    call = asyncio.create_task(rows.wait(sys.argv[1]))
    while not all(Path(f"{sys.argv[1]}-{rank}").exists() for rank in range(2)):
        await asyncio.sleep(0.01)
    print("it runs", flush=True)
    sys.stdin.readline()
    try:
        {end}
    finally:
        {finally}

asyncio.run(main())
"""
ENGINE_ALONE = """
from meshrl.engines.processes import ProcessEngine
engine = ProcessEngine()
print("it runs", flush=True)
input()
"""
FORK = "os.fork() or (os.close(1), os.close(2), open(sys.argv[1], 'w').close(), time.sleep(10**6)); await call"


def start(folder: Path, *command: Path | str) -> "subprocess.Popen[str]":
    own = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": os.pathsep.join(sys.path)}
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen([sys.executable, *command], **pipes, text=True, env=own, start_new_session=True)


@contextmanager
def controller(end: str, last: str = "pass", *, is_read: bool = False) -> Generator[tuple[subprocess.Popen[str], Path]]:
    """A script with two ranks and a call on them; what has to be gone when it ends is looked for afterwards.

    `is_read`: what it has leased of shared memory is read by a process that it has forked.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        script = folder / "script.py"
        script.write_text(SCRIPT.replace("{end}", end).replace("{finally}", last))
        with start(folder, script, folder / "note") as started:
            assert started.stdin is not None
            assert started.stdout is not None
            assert any(line == "it runs\n" for line in started.stdout)
            pids = [started.pid, *(child.pid for child in psutil.Process(started.pid).children(recursive=True))]
            assert len(pids) > 2, "the controller and two ranks"
            memory = segments(*pids)
            assert len(memory) >= 3
            assert list(folder.glob("meshrl-*"))
            started.stdin.write("go on\n")
            started.stdin.flush()
            yield started, folder
            started.communicate()
        wait_until(lambda: not running(pids))
        assert is_read or not [path for path in memory if path.exists()]
        assert not list(folder.glob("meshrl-*"))


def test_a_killed_controller_leaves_nothing_even_if_what_it_has_forked_goes_on() -> None:
    with controller(FORK, is_read=True) as (started, folder):
        wait_until((folder / "note").exists)
        forked = [child.pid for child in psutil.Process(started.pid).children() if os.getpgid(child.pid) == started.pid]
        started.kill()
    assert started.returncode == -signal.SIGKILL
    assert running(forked)
    os.killpg(started.pid, signal.SIGKILL)
    wait_until(lambda: not running(forked))
    sweep()


def test_a_controller_that_exits_without_closing_its_engine_leaves_nothing() -> None:
    with controller("raise SystemExit(3)") as (started, _):
        pass
    assert started.returncode == 3


def test_an_interrupt_is_the_controllers_alone_which_cancels_its_calls_and_ends() -> None:
    with controller("await call", "await engine.close()") as (started, folder):
        os.killpg(started.pid, signal.SIGINT)
        started.wait()
        assert (folder / "note").read_text() == "cancelled"
    assert started.returncode == -signal.SIGINT


@pytest.mark.usefixtures("cold")
def test_what_is_left_where_all_were_killed_at_once_goes_with_the_next_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def kill(started: "subprocess.Popen[str]") -> None:
            for process in [*psutil.Process(started.pid).children(), started]:
                process.kill()
            started.communicate()

        def begun(known: set[Path]) -> "tuple[subprocess.Popen[str], set[Path]]":
            started = start(folder, "-c", ENGINE_ALONE)
            assert started.stdout is not None
            assert started.stdout.readline() == "it runs\n"
            return started, set(folder.glob("meshrl-*")) - known

        one, left = begun(set())
        other, there = begun(left)
        kill(one)
        assert left
        assert all(path.exists() for path in (*left, *there))
        monkeypatch.setattr(tempfile, "tempdir", name)
        gc.collect()
        descriptors = psutil.Process().num_fds()
        engine = ProcessEngine()
        assert not any(path.exists() for path in left)
        assert all(path.exists() for path in there)
        del engine
        gc.collect()
        assert psutil.Process().num_fds() == descriptors
        kill(other)
        ProcessEngine()
        gc.collect()
        assert not list(folder.glob("meshrl-*"))


class Rank(Numbered):
    @endpoint
    async def draw(self) -> Same[float]:
        return float(np.random.random())  # noqa: NPY002 -- what older code draws from

    @endpoint
    async def fork(self) -> Same[list[int]]:
        if not (child := os.fork()):
            signal.pause()
        return [os.getpid(), child]

    @endpoint
    async def environment(self) -> Same[dict[str, str]]:
        return dict(os.environ)

    @endpoint
    async def files(self) -> Same[int]:
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]

    @endpoint
    async def say(self, text: str) -> None:
        print(text)  # noqa: T201 -- what is tested


async def test_ranks_have_what_the_user_set_and_own_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (long := tmp_path / ("long" * 30)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))  # longer than the path of a socket may be
    monkeypatch.setenv("PYTHONPATH", "/the/users/own")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, limits[1]))
    engine = ProcessEngine(modules=["numpy.random"])
    monkeypatch.setenv("MINE", "set late")
    ranks = await (await Mesh.reserve(engine, 4, NO_CORE)).spawn(Rank)
    environment = (await each(ranks.environment)())[0]
    assert (environment["PYTHONPATH"], environment["MINE"]) == ("/the/users/own", "set late")
    assert await ranks.files() > 512, "as many files as this user may open"
    assert len(set(await each(ranks.draw)())) == 4
    await engine.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert not list(long.iterdir())


BREAKS = """
import asyncio, os
from pathlib import Path

fork, loop, forks, failed = os.fork, asyncio.new_event_loop, [], Path(__file__).with_name("failed")

def second_is_refused():
    forks.append(None)
    if len(forks) == 2:
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return fork()

def third_fails():
    if len(forks) > 2 and not failed.exists():
        failed.touch()
        raise ValueError("a rank of straw")
    return loop()

os.fork, asyncio.new_event_loop = second_is_refused, third_fails
print("imported")
"""


@pytest.mark.usefixtures("cold")
async def test_a_rank_that_cannot_be_started_is_told_and_takes_nothing_and_all_is_printed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Neither its process nor its GPU; what ranks are made of goes on. A user's module breaks it."""
    (tmp_path / "breaks.py").write_text(BREAKS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    for name in ("PYTHONPATH", "PYTHONUNBUFFERED"):
        monkeypatch.delenv(name, raising=False)
    engine, made_of = made_now(lambda: ProcessEngine(modules=["breaks"]))
    with pytest.raises(ConfigError, match=r"takes no more processes \(.*temporarily unavailable"):
        await Mesh.reserve(engine, 2, Resources(cpus=0, gpus=1))
    with pytest.raises(ConfigError, match="did not start: it ended by itself with status 1"):
        await Mesh.reserve(engine, 1, Resources(cpus=0, gpus=2))
    ranks = await (await Mesh.reserve(engine, 1, Resources(cpus=0, gpus=2))).spawn(Rank)
    environment = await ranks.environment()
    assert environment["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert "PYTHONPATH" not in environment
    await ranks.say("a rank says so")
    assert running(made_of) == made_of
    await engine.close()
    printed = capfd.readouterr()
    assert sorted(printed.out.splitlines()) == ["a rank says so", "imported"]
    assert "ValueError: a rank of straw" in printed.err


@pytest.mark.usefixtures("cold")
async def test_ranks_end_with_what_they_are_made_of_and_can_be_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        engine, made_of = made_now(lambda: ProcessEngine(inline_bytes=0))
        mesh = await Mesh.reserve(engine, 2, NO_CORE)
        ranks = await mesh.spawn(Rank)
        pids = (await ranks.pid()).tolist()
        call = asyncio.create_task(ranks.hang())
        await ranks.files()
        os.kill(made_of[0], signal.SIGKILL)
        with pytest.raises(RankDied, match="the process that ranks are made of is gone"):
            await call
        await until(lambda: not running([*made_of, *pids]))
        known = {child.pid for child in psutil.Process().children()}
        await respawn(ranks)
        assert not set((await ranks.pid()).tolist()) & set(pids)

        (again,) = (child.pid for child in psutil.Process().children() if child.pid not in known)
        os.kill(again, signal.SIGKILL)
        wait_until(lambda: not running([again]))  # before the loop can hear of it
        other = await (await Mesh.reserve(engine, 1, NO_CORE)).spawn(Rank)
        assert await other.draw() >= 0
        await engine.close()
        assert not running([again])
        assert not list(Path(folder).glob("meshrl-*"))


async def test_processes_that_a_rank_has_started_end_with_it() -> None:
    engine = ProcessEngine()
    meshes = [await Mesh.reserve(engine, 1, NO_CORE) for _ in range(3)]
    killed, *others = [await mesh.spawn(Rank) for mesh in meshes]
    pids = [await ranks.fork() for ranks in (killed, *others)]
    assert all(running(pair) == pair for pair in pids)
    call = asyncio.create_task(killed.hang())
    await killed.files()
    os.kill(pids[0][0], signal.SIGKILL)
    with pytest.raises(RankDied):  # though its child has its end of the connection
        await call
    await until(lambda: not running(pids[0]))
    await meshes[1].stop()
    await until(lambda: not running(pids[1]))
    await engine.close()
    await until(lambda: not running(pids[2]))


@pytest.mark.usefixtures("cold")
async def test_an_engine_leaves_nothing_however_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)

        def is_clean(pids: list[int]) -> bool:
            return not running(pids) and not list(Path(folder).glob("meshrl-*"))

        engine, pids = made_now(ProcessEngine)
        assert running(pids), "ranks are made ready as soon as there is an engine"
        await engine.close()
        assert is_clean(pids), "where nobody asked for any"

        engine, pids = made_now(ProcessEngine)
        del engine
        gc.collect()
        assert is_clean(pids), "where it is dropped"

        engine, pids = made_now(ProcessEngine)
        await (await Mesh.reserve(engine, 1, NO_CORE)).stop()
        os.kill(pids[0], signal.SIGSTOP)  # so that its end is waited for
        closing = asyncio.create_task(engine.close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert is_clean(pids), "where its end is cancelled"
