import ctypes
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from meshrl import Actor, current_rank, endpoint, respawn
from meshrl.errors import RankDied
from tests.engines.conftest import NO_CORE, RAY, Reserve, on_processes

in_one_loop = pytest.mark.asyncio(loop_scope="session")
MIB = 2**20


class Talks(Actor):
    @endpoint
    async def say(self, text: str) -> None:
        print(f"{text} of rank {current_rank().index}")  # noqa: T201 -- what is tested
        os.write(2, b"as a library writes\n")
        subprocess.run(["echo", "as a child writes"], check=True)  # noqa: ASYNC221, S607

    @endpoint
    async def flood(self, mib: int) -> None:
        for _ in range(16 * mib):
            os.write(1, (b"x" * 1023 + b"\n") * 64)

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


@in_one_loop
@pytest.mark.parametrize("engine", ["processes", "ray"], indirect=True)
async def test_a_rank_that_dies_leaves_its_last_lines(reserve: Reserve, tmp_path: Path) -> None:
    before, logs = tmp_path / "before", tmp_path / "after" / "logs"
    mesh = await reserve(2, NO_CORE, "main", str(before / "logs"))
    talks = await mesh.spawn(Talks)
    await talks.say("born")
    before.rename(tmp_path / "after")
    kept = ""
    for how in ("kill", "exit", "segfault"):
        await talks.say(f"before the {how}")
        with pytest.raises(RankDied) as died:
            await talks.die(how)
        assert "--- the end of logs/main-1.log ---" in str(died.value)
        assert ("in die" if how == "segfault" else "these were my last words") in died.value.written
        assert "rank 0" not in died.value.written
        assert ("born" in died.value.written) is (how == "kill"), "the lines of the process that died alone"
        text = (logs / "main-1.log").read_text()
        assert text.startswith(kept), "what the one before wrote stays"
        own = text[len(kept) :]
        for line in f"the {how} of rank 1", "as a library writes", "as a child writes", "these were my last words":
            assert line in own
        assert f"--- process {died.value.pid} on " in own
        assert ("Fatal Python error: Segmentation fault" in own) is (how == "segfault")
        await respawn(talks)
        kept = text
    await talks.say("again")
    await mesh.stop()
    assert "again of rank 1" in (logs / "main-1.log").read_text()[len(kept) :]
    assert "again of rank 0" in (logs / "main-0.log").read_text()
    assert sorted(path.name for path in logs.iterdir()) == ["main-0.log", "main-1.log"]
    assert not before.exists()


@in_one_loop
@on_processes
async def test_without_a_folder_or_where_it_cannot_be_written_nothing_is_kept(reserve: Reserve, tmp_path: Path) -> None:
    (tmp_path / "main-1.log").mkdir()
    for place in ((), ("main", str(tmp_path))):
        talks = await (await reserve(2, NO_CORE, *place)).spawn(Talks)
        await talks.say("hello")
        with pytest.raises(RankDied) as died:
            await talks.die("kill")
        assert died.value.written == ""
        assert "---" not in str(died.value)


@in_one_loop
@pytest.mark.parametrize("engine", ["processes"], indirect=True)
async def test_a_file_is_begun_anew_where_it_has_no_room(reserve: Reserve, tmp_path: Path) -> None:
    talks = await (await reserve(2, NO_CORE, "main", str(tmp_path))).spawn(Talks)
    await talks.flood(20)
    with pytest.raises(RankDied) as died:
        await talks.die("kill")
    names = [f"main-{rank}.log{end}" for rank in (0, 1) for end in ("", ".1")]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert all(0 < path.stat().st_size <= 16 * MIB for path in tmp_path.iterdir())
    last = died.value.written.splitlines()
    assert len(last) <= 31
    assert {len(each) for each in last[1:-1]} == {400}
    assert last[-1] == "these were my last words"


SCRIPT = """
import asyncio, os, sys
import meshrl as rl

class Talks(rl.Actor):
    @rl.endpoint
    async def die(self) -> None:
        print("to its errors", file=sys.stderr)
        print("to the terminal")
        os._exit(3)

async def main() -> None:
    async with rl.Run(rl.RunConfig(name="mine", folder=sys.argv[1], engine=sys.argv[2])) as run:
        talks = await (await run.mesh(1, rl.Resources(cpus=0))).spawn(Talks)
        await talks.die()

asyncio.run(main())
"""


@pytest.mark.process
@pytest.mark.parametrize("engine", ["processes", RAY])
def test_a_run_keeps_them_and_the_terminal_still_has_them(tmp_path: Path, engine: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path), engine]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "to the terminal" in done.stdout + done.stderr
    assert "to its errors" in done.stderr
    assert "--- the end of logs/1-0.log ---" in done.stderr
    (log,) = (tmp_path / "mine" / "logs").iterdir()
    assert "to the terminal" in log.read_text()
    assert "to the terminal" in (tmp_path / "mine" / "summary.json").read_text()
