"""However a controller ends: its ranks, their template, its sockets and its shared memory end with it."""

import gc
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from meshrl.engines.processes import ProcessEngine
from meshrl.mesh import sweep
from tests.processes.conftest import running, segments, wait_until

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
    return subprocess.Popen(
        [sys.executable, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder), "PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,
    )


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
