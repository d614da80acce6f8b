"""What the processes of ranks write: kept in the run's folder, with the last lines in the error."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from meshrl import Actor, Mesh, RankDied, Resources, Run, RunConfig, current_rank, endpoint, respawn
from meshrl.engines.hosting import LogFolder
from meshrl.engines.hosting.rank_log import ROOM
from meshrl.mesh import Engine

NO_CORE = Resources(cpus=0)
on_engines = pytest.mark.parametrize("engine", ["processes", "ray"], indirect=True)


class Talks(Actor):
    """Writes, and dies on rank 1."""

    @endpoint
    async def say(self, text: str) -> None:
        print(f"{text} of rank {current_rank().index}")  # noqa: T201 -- what is tested
        os.write(2, b"as a library writes\n")
        subprocess.run(["echo", "as a child writes"], check=True)  # noqa: ASYNC221, S607

    @endpoint
    async def die(self, how: str) -> None:
        if current_rank().index != 1:
            return
        print("these were my last words")  # noqa: T201 -- what is tested
        if how == "exit":
            os._exit(3)
        if how == "segfault":
            ctypes.string_at(0)
        os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()


@on_engines
@pytest.mark.parametrize("how", ["kill", "exit", "segfault"])
async def test_a_rank_that_dies_leaves_its_last_lines(engine: Engine, tmp_path: Path, how: str) -> None:
    logs = tmp_path / "logs"
    mesh = await Mesh.reserve(engine, 2, NO_CORE, "main", str(logs))
    talks = await mesh.spawn(Talks)
    await talks.say("hello")
    with pytest.raises(RankDied) as died:
        await talks.die(how)
    told = str(died.value)
    assert "--- the end of logs/main-1.log ---" in told
    assert ("in die" if how == "segfault" else "these were my last words") in died.value.written
    assert "rank 0" not in died.value.written
    text = (logs / "main-1.log").read_text()
    for line in "hello of rank 1", "as a library writes", "as a child writes", "these were my last words":
        assert line in text
    if how == "segfault":
        assert "Fatal Python error: Segmentation fault" in text
    assert f"--- process {died.value.pid} on " in text
    assert sorted(path.name for path in logs.iterdir()) == ["main-0.log", "main-1.log"]

    await respawn(talks)
    await talks.say("again")
    await mesh.stop()
    after = (logs / "main-1.log").read_text()
    assert after.startswith(text), "what the first one wrote stays"
    assert "again of rank 1" in after[len(text) :]
    assert "again of rank 0" in (logs / "main-0.log").read_text()


@on_engines
async def test_the_last_lines_are_those_of_the_process_that_died(engine: Engine, tmp_path: Path) -> None:
    mesh = await Mesh.reserve(engine, 2, NO_CORE, "main", str(tmp_path))
    talks = await mesh.spawn(Talks)
    await talks.say("first")
    with pytest.raises(RankDied):
        await talks.die("kill")
    await respawn(talks)
    with pytest.raises(RankDied) as died:
        await talks.die("exit")
    assert "first" not in died.value.written
    assert "these were my last words" in died.value.written


@on_engines
async def test_without_a_folder_nothing_is_kept(engine: Engine) -> None:
    talks = await (await Mesh.reserve(engine, 2, NO_CORE)).spawn(Talks)
    with pytest.raises(RankDied) as died:
        await talks.die("kill")
    assert died.value.written == ""
    assert "---" not in str(died.value)


@on_engines
async def test_a_folder_that_is_renamed_goes_on(engine: Engine, tmp_path: Path) -> None:
    mesh = await Mesh.reserve(engine, 2, NO_CORE, "main", str(tmp_path / "before" / "logs"))
    talks = await mesh.spawn(Talks)
    await talks.say("one")
    (tmp_path / "before").rename(tmp_path / "after")
    await talks.say("two")
    with pytest.raises(RankDied) as died:
        await talks.die("kill")
    assert "two of rank 1" in died.value.written
    assert "two of rank 1" in (tmp_path / "after" / "logs" / "main-1.log").read_text()
    assert not (tmp_path / "before").exists()


def test_a_file_is_begun_anew_where_it_has_no_room(tmp_path: Path) -> None:
    log = LogFolder(tmp_path / "main").of(0)
    line = b"x" * 1023 + b"\n"
    for _ in range(3 * ROOM // len(line) // 64):
        log.append(line * 64)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["main-0.log", "main-0.log.1"]
    assert all(0 < path.stat().st_size <= ROOM for path in tmp_path.iterdir())
    last = log.last().splitlines()
    assert len(last) <= 31
    assert {len(each) for each in last[1:]} == {400}


def test_a_log_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    log = LogFolder(tmp_path / "main").of(0)
    (tmp_path / "main-0.log").mkdir()
    log.append(b"text\n")
    assert log.last() == ""


SCRIPT = """
import asyncio, os, sys
import meshrl as rl

class Talks(rl.Actor):
    @rl.endpoint
    async def say(self) -> None:
        print("to the terminal")
        print("to its errors", file=sys.stderr)

    @rl.endpoint
    async def die(self) -> None:
        print("last words")
        os._exit(3)

async def main() -> None:
    async with rl.Run(rl.RunConfig(name="mine", folder=sys.argv[1], engine=sys.argv[2])) as run:
        talks = await (await run.mesh(1, rl.Resources(cpus=0))).spawn(Talks)
        await talks.say()
        await talks.die()

asyncio.run(main())
"""


@pytest.mark.process
@pytest.mark.parametrize("engine", ["processes", "ray"])
def test_a_run_keeps_them_and_the_terminal_still_has_them(tmp_path: Path, engine: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path), engine]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "to the terminal" in done.stdout + done.stderr
    assert "to its errors" in done.stderr
    assert "last words" in done.stderr
    assert "--- the end of logs/1-0.log ---" in done.stderr
    (log,) = (tmp_path / "mine" / "logs").iterdir()
    assert "to the terminal" in log.read_text()
    assert "last words" in (tmp_path / "mine" / "summary.json").read_text()


def test_runs_that_have_no_processes_have_no_logs(tmp_path: Path) -> None:
    assert RunConfig(folder=str(tmp_path)).engine == "local"
    with Run(RunConfig(folder=str(tmp_path))).recorder as recorder:
        assert not (recorder.folder / "logs").exists()
