"""However a controller ends: its ranks, their template, its sockets and its shared memory end with it."""

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

from meshrl.mesh import sweep
from tests.processes.conftest import running, segments, wait_until

pytestmark = pytest.mark.process

SCRIPT = """
import asyncio, os, sys, time
from pathlib import Path
import numpy as np
from meshrl import Actor, Batch, Gather, Mesh, Resources, endpoint
from meshrl.engines.processes import ProcessEngine

class Rows(Actor):
    @endpoint
    async def make(self) -> Gather[Batch]:
        return Batch.of(rewards=np.arange(1000))

    @endpoint
    async def wait(self, note: str) -> None:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            Path(note).write_text("cancelled")
            raise

async def main():
    engine = ProcessEngine(inline_bytes=0)
    rows = await (await Mesh.reserve(engine, 2, Resources(cpus=0))).spawn(Rows)
    batch, own = await rows.make(), engine.put(np.arange(1000))
    call = asyncio.create_task(rows.wait(sys.argv[1]))
    await asyncio.sleep(0.1)
    print("it runs", flush=True)
    sys.stdin.readline()
    try:
        {end}
    finally:
        {finally}

asyncio.run(main())
"""
FORK = "os.fork() or (os.close(1), os.close(2), open(sys.argv[1], 'w').close(), time.sleep(1000)); await call"
HANG, NEVER, CLOSE = "await call", "pass", "await engine.close()"


@contextmanager
def controller(end: str, last: str = NEVER, *, is_read: bool = False) -> Generator[tuple[subprocess.Popen[str], Path]]:
    """A script with two ranks and a call on them; what has to be gone when it ends is looked for afterwards.

    `is_read`: what it has leased of shared memory is read by a process that it has forked.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        script = folder / "script.py"
        script.write_text(SCRIPT.replace("{end}", end).replace("{finally}", last))
        with subprocess.Popen(
            [sys.executable, script, folder / "note"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": name, "PYTHONPATH": os.pathsep.join(sys.path)},
            start_new_session=True,
        ) as started:
            assert started.stdin is not None
            assert started.stdout is not None
            assert any(line == "it runs\n" for line in started.stdout)
            pids = [started.pid, *(child.pid for child in psutil.Process(started.pid).children(recursive=True))]
            assert len(pids) == 4, "the controller, the template and two ranks"
            memory = segments(*pids)
            assert len(memory) >= 3
            assert list(folder.glob("meshrl-at-*"))
            started.stdin.write("go on\n")
            started.stdin.flush()
            yield started, folder
            started.communicate(timeout=60)
        wait_until(lambda: not running(pids))
        assert is_read or not [path for path in memory if path.exists()]
        assert not list(folder.glob("meshrl-*"))


def test_a_killed_controller_leaves_nothing() -> None:
    with controller(HANG) as (started, _):
        started.kill()
    assert started.returncode == -signal.SIGKILL


def test_a_killed_controller_leaves_nothing_though_what_it_has_forked_goes_on() -> None:
    with controller(FORK, is_read=True) as (started, folder):
        wait_until((folder / "note").exists)
        started.kill()
        forked = [pid for pid in psutil.pids() if pid != started.pid and _group(pid) == started.pid]
    assert running(forked)
    os.killpg(started.pid, signal.SIGKILL)
    wait_until(lambda: not running(forked))
    sweep()


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


def test_a_controller_that_exits_without_closing_its_engine_leaves_nothing() -> None:
    with controller("await asyncio.sleep(0.5); raise SystemExit(3)") as (started, _):
        pass
    assert started.returncode == 3


def test_an_interrupt_is_the_controllers_alone_which_cancels_its_calls_and_ends() -> None:
    with controller(HANG, CLOSE) as (started, folder):
        os.killpg(started.pid, signal.SIGINT)
        started.wait(60)
        assert (folder / "note").read_text() == "cancelled"
    assert started.returncode == -signal.SIGINT
