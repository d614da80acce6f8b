"""Episodes of command lines, on this machine and in containers."""

import asyncio
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from meshrl import Sampling
from meshrl.agents import Agent, AgentConfig, Gateway
from meshrl.errors import ConfigError
from meshrl.testing import ScriptedChat, ScriptedSampler
from tests.agents.talks import served

pytestmark = pytest.mark.process

COMMAND = """
import json, os, sys, urllib.request
row = json.load(sys.stdin)
body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": row["prompt"]}]}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
told = json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)))
print("it said", told["choices"][0]["message"]["content"])
print(json.dumps({"reward": float(told["choices"][0]["message"]["content"] == row["answer"])}))
"""


def python(code: str, **config: Any) -> Agent:
    return Agent(AgentConfig(command=(sys.executable, "-c", code), **config))


async def test_a_command_line_asks_no_proxy_for_the_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("NO_PROXY", "example.org")
    names = "print(os.environ['NO_PROXY'], os.environ['no_proxy'])\n"
    episode = await served(python(f"import os\n{names}{COMMAND}"), "2")
    assert (episode.reward, episode.error) == (1.0, None)
    assert "example.org,127.0.0.1 example.org,127.0.0.1" in episode.output
    assert "it said 2" in episode.output
    assert len(episode.rows) == 1


async def test_a_function_judges_a_command_that_knows_nothing_of_rewards(tmp_path: Path) -> None:
    judge = "def judge(transcripts, row, result):\n    return float(result == f'it said {row[\"answer\"]}\\n')\n"
    (tmp_path / "judges.py").write_text(judge, "utf-8")
    unaware = "\n".join(COMMAND.splitlines()[:-1])
    episode = await served(python(unaware, reward=f"{tmp_path / 'judges.py'}:judge"), "2")
    assert (episode.reward, episode.error) == (1.0, None)


async def test_commands_that_fail() -> None:
    late = "import time; time.sleep(600)"
    cases: list[tuple[str, dict[str, float], str]] = [
        ("import sys; sys.exit('broken')", {}, "ended with status 1: broken"),
        ("print('1.0'); print('bye')", {}, "its last line of output is not JSON: 'bye'"),
        ("", {}, "its last line of output is not JSON: ''"),
        ("import os; os.kill(os.getpid(), 9)", {}, "ended with status -9"),
        (f"print('a' * (2 << 20)); {late}", {"output_mib": 1}, "more than 1048576"),
        (late, {"timeout": 0.1}, "no result in 0.1 seconds"),
    ]
    episodes = await asyncio.gather(*(served(python(code, **config)) for code, config, _ in cases))
    told = [(episode.reward, error in str(episode.error)) for episode, (*_, error) in zip(episodes, cases, strict=True)]
    assert told == [(0.0, True)] * len(cases), [episode.error for episode in episodes]


CHILD = """
import time
held = open({fifo!r}, "w")
print("x", end="", file=held, flush=True)
print(flush=True)
time.sleep(600)
"""
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {child!r}], stdout=subprocess.PIPE)
child.stdout.readline()
if {hangs}: time.sleep(600)
print(1)
"""


@pytest.mark.parametrize("hangs", [False, True])
async def test_the_processes_of_a_command_end_with_it(tmp_path: Path, hangs: bool) -> None:
    """What one left that ended, and both of one that hangs."""
    fifo = tmp_path / "held"
    os.mkfifo(fifo)
    code = PARENT.format(child=CHILD.format(fifo=str(fifo)), hangs=hangs)
    playing = asyncio.create_task(served(python(code)))
    held = await asyncio.to_thread(fifo.open, "rb")
    assert await asyncio.to_thread(held.read, 1) == b"x"
    if hangs:
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
    else:
        assert (await playing).reward == 1.0
    assert await asyncio.to_thread(held.read) == b""  # the child that held it has ended
    held.close()


async def test_what_commands_write_is_kept(tmp_path: Path) -> None:
    code = "import json, sys; n = json.load(sys.stdin)['n']; print('try', n, file=sys.stderr); print(n)"
    for first, count in ((0, 3), (3, 1)):  # the second goes on with the folder
        config = AgentConfig(command=(sys.executable, "-c", code), outputs_kept=2)
        async with Gateway(ScriptedSampler([]), ScriptedChat()).serving() as gateway:
            for number in range(first, first + count):
                await Agent(config, tmp_path / "agents").play(gateway, {"n": number}, Sampling())
        kept = sorted((tmp_path / "agents").iterdir())
        assert [file.read_text("utf-8") for file in kept] == [f"{n}\ntry {n}\n" for n in range(first + count)][-2:]


DOCKER = f"""#!{sys.executable}
import os, pathlib, subprocess, sys
folder = pathlib.Path(__file__).parent
with (folder / "asked").open("a") as asked:
    print(*sys.argv[1:], file=asked)
if sys.argv[1] == "info":
    sys.exit((folder / "broken").exists() and "the daemon is asleep")
if sys.argv[1] == "run":
    at = sys.argv.index("node:22")
    names = [sys.argv[i + 1] for i, each in enumerate(sys.argv[:at]) if each == "--env"]
    sys.exit(subprocess.run(sys.argv[at + 1:], env={{name: os.environ[name] for name in names}}).returncode)
"""


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a `docker` that runs commands as they are, and writes down in `asked` what it is asked."""
    (tmp_path / "docker").write_text(DOCKER, "utf-8")
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


async def test_a_command_in_a_container_that_ends_with_its_episode(docker: Path) -> None:
    asked = docker / "asked"
    episode = await served(python(COMMAND, image="node:22"), "2")
    assert (episode.reward, episode.error) == (1.0, None)
    info, run = asked.read_text("utf-8").splitlines()[:2]
    assert info == "info"
    names = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "OPENAI_MODEL", "NO_PROXY", "no_proxy")
    variables = " ".join(f"--env {name}" for name in names)
    options = r"run --rm --init --interactive --network host --name meshrl-\w{16}"
    assert re.match(f"{options} {variables} node:22 {sys.executable} -c", run)

    playing = asyncio.create_task(served(python("import time; time.sleep(600)", image="node:22")))
    while asked.read_text("utf-8").count("--name") < 2:  # noqa: ASYNC110 -- it tells by a file
        await asyncio.sleep(0.01)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    run, last = asked.read_text("utf-8").splitlines()[-2:]
    assert last == f"rm --force --volumes {run.split('--name ')[1].split()[0]}"


def test_an_image_that_nothing_here_runs(docker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (docker / "broken").touch()
    with pytest.raises(ConfigError, match="needs docker, which does not work here: the daemon is asleep"):
        Agent(AgentConfig(image="node:22"))
    monkeypatch.setenv("PATH", str(docker))
    with pytest.raises(ConfigError, match="there is no program 'podman'"):
        Agent(AgentConfig(image="node:22", runtime="podman"))
