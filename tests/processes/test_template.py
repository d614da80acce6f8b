"""What ranks have of the process that they are forked from, and what that process outlives."""

import asyncio
import gc
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from meshrl import Actor, ConfigError, Mesh, Same, each, endpoint
from meshrl.engines.processes import ProcessEngine
from tests.processes.conftest import NO_CORE, running, until

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]

PRINTS = """
import asyncio
from meshrl import Actor, ConfigError, Mesh, Resources, endpoint
from meshrl.engines.processes import ProcessEngine

class Prints(Actor):
    @endpoint
    async def say(self) -> None:
        print("a rank says so")

async def main():
    engine = ProcessEngine(modules=["says_hello"])
    prints = await (await Mesh.reserve(engine, 2, Resources(cpus=0))).spawn(Prints)
    await prints.say()
    await engine.close()

asyncio.run(main())
"""


class Rank(Actor):
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


async def check_an_engine_that_fails_once(folder: Path, patch: str, reason: str) -> None:
    """With a module that breaks something in the process that ranks are made of, for the first of them."""
    (folder / "breaks.py").write_text(patch)
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(folder)
        engine = ProcessEngine(modules=["breaks"])
        with pytest.raises(ConfigError, match=reason):
            await Mesh.reserve(engine, 1, NO_CORE)
        template = engine._launcher._template
        ranks = await (await Mesh.reserve(engine, 1, NO_CORE)).spawn(Rank)
        assert await ranks.draw() >= 0
        assert engine._launcher._template is template
        await engine.close()


def printed_by(script: Path) -> str:
    """What comes through a pipe."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": ""}
    command = [sys.executable, str(script)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, check=True, env=environment).stdout


async def test_what_ranks_print_into_a_pipe_is_there_and_what_they_are_made_of_prints_once(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(PRINTS)
    (tmp_path / "says_hello.py").write_text("print('hello')")
    printed = await asyncio.to_thread(printed_by, tmp_path / "script.py")
    assert sorted(printed.splitlines()) == ["a rank says so", "a rank says so", "hello"]


async def test_ranks_do_not_draw_the_same_numbers() -> None:
    engine = ProcessEngine(modules=["numpy.random"])
    ranks = await (await Mesh.reserve(engine, 4, NO_CORE)).spawn(Rank)
    assert len(set(await each(ranks.draw)())) == 4
    await engine.close()


async def test_a_machine_that_takes_no_more_processes_is_said_and_costs_one_rank(tmp_path: Path) -> None:
    breaks = """
import os
fork = os.fork

def refuse():
    os.fork = fork
    raise BlockingIOError(11, "Resource temporarily unavailable")

os.fork = refuse
"""
    await check_an_engine_that_fails_once(tmp_path, breaks, r"takes no more processes \(.*temporarily unavailable")


async def test_what_a_rank_raises_before_it_answers_is_printed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    breaks = """
import __main__
from pathlib import Path
become_rank = __main__._become_rank

def fail(*given):
    if not Path(__file__).with_name("failed").exists():
        Path(__file__).with_name("failed").touch()
        raise ValueError("a rank of straw")
    become_rank(*given)

__main__._become_rank = fail
"""
    await check_an_engine_that_fails_once(tmp_path, breaks, "did not start: it ended by itself with status 1")
    assert "ValueError: a rank of straw" in capfd.readouterr().err


async def test_a_rank_is_begun_though_what_ranks_are_made_of_has_just_died() -> None:
    engine = ProcessEngine()
    await (await Mesh.reserve(engine, 1, NO_CORE)).stop()
    template = engine._launcher._template
    assert template is not None
    template.kill()
    template.wait()  # before the loop can hear of it
    mesh = await Mesh.reserve(engine, 1, NO_CORE)
    assert await (await mesh.spawn(Rank)).draw() >= 0
    assert len(engine._launcher._ends) == 1
    await engine.close()


@pytest.mark.parametrize("end", ["the rank is killed", "its mesh is stopped", "its engine is closed"])
async def test_processes_that_a_rank_has_started_end_with_it(end: str) -> None:
    engine = ProcessEngine()
    mesh = await Mesh.reserve(engine, 1, NO_CORE)
    pids = await (await mesh.spawn(Rank)).fork()
    assert len(running(pids)) == 2
    if end == "the rank is killed":
        os.kill(pids[0], signal.SIGKILL)
    elif end == "its mesh is stopped":
        await mesh.stop()
    else:
        await engine.close()
    await until(lambda: not running(pids))
    await engine.close()


@pytest.mark.parametrize("paths", ["/the/users/own", None])
async def test_what_ranks_start_finds_modules_where_the_user_says(
    paths: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if paths:
        monkeypatch.setenv("PYTHONPATH", paths)
    engine = ProcessEngine()
    ranks = await (await Mesh.reserve(engine, 1, NO_CORE)).spawn(Rank)
    assert (await ranks.environment()).get("PYTHONPATH") == paths
    await engine.close()


async def test_ranks_are_made_ready_as_soon_as_there_is_an_engine_and_nothing_is_left_where_nobody_asks_for_any() -> (
    None
):
    engine = ProcessEngine()
    template, folder = engine._launcher._template, engine._launcher._folder
    assert template is not None
    assert folder is not None
    assert running([template.pid])
    await engine.close()
    assert not running([template.pid])
    assert not folder.exists()


async def test_what_is_set_after_the_engine_was_made_reaches_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ProcessEngine()
    monkeypatch.setenv("MINE", "set late")
    ranks = await (await Mesh.reserve(engine, 1, NO_CORE)).spawn(Rank)
    assert (await ranks.environment())["MINE"] == "set late"
    await engine.close()


async def test_ranks_may_open_as_many_files_as_this_user_may() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        engine = ProcessEngine()
        ranks = await (await Mesh.reserve(engine, 1, NO_CORE)).spawn(Rank)
        assert await ranks.files() > 512
        await engine.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_an_engine_that_is_dropped_leaves_nothing() -> None:
    engine = ProcessEngine()
    template, folder = engine._launcher._template, engine._launcher._folder
    assert template is not None
    assert folder is not None
    del engine
    gc.collect()
    assert not running([template.pid])
    assert not folder.exists()


async def test_an_engine_whose_end_is_cancelled_leaves_nothing() -> None:
    engine = ProcessEngine()
    await (await Mesh.reserve(engine, 1, NO_CORE)).stop()
    template, folder = engine._launcher._template, engine._launcher._folder
    assert template is not None
    assert folder is not None
    os.kill(template.pid, signal.SIGSTOP)  # so that its end is waited for
    closing = asyncio.create_task(engine.close())
    await asyncio.sleep(0.1)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert not running([template.pid])
    assert not folder.exists()
