"""Nothing of a program outlives its episode, its call, or the process that plays it."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from meshrl import Batch, RewardConfig
from meshrl.agents import Agent, AgentConfig
from meshrl.supervisor import supervised
from meshrl.tasks.function import FunctionReward
from tests.agents.talks import served

pytestmark = pytest.mark.process

WAIT = f"[{sys.executable!r}, '-c', 'import time; time.sleep(600)']"
TOOLS = {
    "session": f"subprocess.Popen({WAIT}, start_new_session=True, pass_fds=[held])",
    "bare": f"subprocess.Popen({WAIT}, start_new_session=True, pass_fds=[held], env={{}})",
    "daemon": f"""
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        os.set_inheritable(held, True)
        os.execv(*{WAIT}[:1], {WAIT})
    os._exit(0)
os.wait()
""",
}
"""What holds the end of a pipe until it ends."""


def holding(fifo: Path, tool: str) -> str:
    return f"""
import os, signal, subprocess, time
held = os.open({str(fifo)!r}, os.O_WRONLY)
{TOOLS[tool]}
os.write(held, b"x")
"""


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "held")
    return tmp_path / "held"


@pytest.mark.parametrize("hangs", [False, True], ids=["ends", "hangs"])
@pytest.mark.parametrize("tool", TOOLS)
async def test_the_tools_of_a_command_end_with_its_episode(fifo: Path, tool: str, hangs: bool) -> None:
    end = "time.sleep(600)" if hangs else "print(1.0)"
    agent = Agent(AgentConfig(command=(sys.executable, "-c", holding(fifo, tool) + end)))
    playing = asyncio.create_task(served(agent))
    with await asyncio.to_thread(fifo.open, "rb") as held:
        assert await asyncio.to_thread(held.read, 1) == b"x"
        if hangs:
            playing.cancel()
            await asyncio.wait([playing])
        else:
            assert (await playing).reward == 1.0
        assert await asyncio.to_thread(held.read) == b""


async def test_a_reward_functions_tools_end_with_its_call(fifo: Path, tmp_path: Path) -> None:
    body = holding(fifo, "session") + "time.sleep(600)"
    function = "def f(prompt, completion, row):" + body.replace("\n", "\n    ")
    (tmp_path / "mine.py").write_text(function, "utf-8")
    reward = FunctionReward(RewardConfig(function=f"{tmp_path / 'mine.py'}:f", row_timeout=1.0))
    scoring = asyncio.create_task(reward.score(Batch.of(prompt=["p"], completion=["c"])))
    with await asyncio.to_thread(fifo.open, "rb") as held:
        assert await asyncio.to_thread(held.read) == b"x"
    assert "took longer" in str((await scoring).objects("reward_error")[0])


def test_the_tools_end_if_the_supervisor_is_killed_as_ray_kills_children(fifo: Path) -> None:
    command = supervised([sys.executable, "-c", holding(fifo, "session") + "time.sleep(600)"])
    with subprocess.Popen(command, start_new_session=True) as process, fifo.open("rb") as held:
        assert held.read(1) == b"x"
        process.kill()
        assert held.read() == b""


CONTROLLER = """
import asyncio, sys
from meshrl import Batch, RewardConfig
from meshrl.agents import Agent, AgentConfig
from meshrl.tasks.function import FunctionReward
from tests.agents.talks import served

async def main():
    command = AgentConfig(command=(sys.executable, "-c", {program!r}))
    container = AgentConfig(command=command.command, image="image")
    reward = FunctionReward(RewardConfig(function={function!r}))
    scored = reward.score(Batch.of(prompt=["p"], completion=["c"]))
    await asyncio.gather(served(Agent(command)), served(Agent(container)), scored)

asyncio.run(main())
"""
DOCKER = """#!/bin/sh
case $1 in
run) while [ "$1" != image ]; do shift; done; shift; exec "$@";;
rm) printf "$*" > {ended};;
esac
"""


def test_all_programs_end_with_the_controller(fifo: Path, tmp_path: Path) -> None:
    os.mkfifo(ended := tmp_path / "ended")
    (tmp_path / "docker").write_text(DOCKER.format(ended=ended), "utf-8")
    (tmp_path / "docker").chmod(0o755)
    program = holding(fifo, "session") + "time.sleep(600)"
    (tmp_path / "mine.py").write_text("def f(p, c, r):" + program.replace("\n", "\n    "), "utf-8")
    script = CONTROLLER.format(program=program, function=f"{tmp_path / 'mine.py'}:f")
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(Path.cwd())}
    controllers = [subprocess.Popen([sys.executable, "-c", script], env=environment) for _ in range(2)]
    with fifo.open("rb") as held:
        assert held.read(6) == b"xxxxxx"
        for controller, number in zip(controllers, (signal.SIGKILL, signal.SIGTERM), strict=True):
            controller.send_signal(number)
            assert controller.wait() == -number
        assert held.read() == b""
    assert ended.read_text("utf-8").startswith("rm --force --volumes meshrl-")
