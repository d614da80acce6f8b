import asyncio
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable
from functools import partial
from math import isnan, nan
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from pydantic import ValidationError

from meshrl import Sampling
from meshrl.agents import Agent, AgentConfig, Episode, Gateway, Session
from meshrl.errors import ConfigError, DataError
from meshrl.testing import ScriptedChat, ScriptedSampler, simulate
from tests.agents.talks import ROW, client_of, served


@pytest.fixture
def agent(tmp_path: Path) -> Callable[..., Agent]:
    """`agent(body)`: one whose async `solve(client, row)` has this body."""

    def made(body: str, head: str = "async def", **config: Any) -> Agent:
        file = tmp_path / "my_agent.py"
        file.write_text(f"import asyncio\n\n{head} solve(client, row):\n{textwrap.indent(body, '    ')}\n", "utf-8")
        return Agent(AgentConfig(source=f"{file}:solve", **config))

    return made


ASK = """
messages = [{"role": "user", "content": row["prompt"]}]
told = await client.chat.completions.create(model="gpt", messages=messages)
"""


def played(agent: Agent, *script: str, says: Callable[[str], str] | None = None) -> Episode:
    async def main() -> Episode:
        gateway = Gateway(ScriptedSampler(says or script), ScriptedChat())
        return await agent.play(gateway, ROW, Sampling(max_tokens=100))

    return simulate(main)


def test_the_reward_goes_to_the_episodes_rows(agent: Callable[..., Agent]) -> None:
    solve = agent(ASK * 2 + 'return float(told.choices[0].message.content == row["answer"])')
    episode = played(solve, "3", "2")
    assert (episode.reward, episode.error) == (1.0, None)
    assert episode.rows.rewards.tolist() == [1.0, 1.0]
    assert episode.rows.objects("completion") == ("3", "2")
    assert len(played(agent("return 1")).rows) == 0


def test_a_result_with_rewards_of_turns(agent: Callable[..., Agent]) -> None:
    for result, rewards, error in (
        ('{"reward": 1, "turns": [0.25, -0.5]}', [1.0, 0.25, -0.5], "None"),
        ('{"reward": 0.5, "tries": 2}', [0.5, 0.0, 0.5], "None"),
        ('{"reward": 1, "turns": [1]}', [nan] * 3, "the model answered 2 times"),
    ):
        episode = played(agent(f"{ASK * 2}return {result}"), "3", "2")
        assert [episode.reward, *episode.turn_rewards] == pytest.approx(rewards, nan_ok=True)
        assert error in str(episode.error)


def test_traces_have_rewards_of_their_own_and_one_without_is_not_learned(agent: Callable[..., Agent]) -> None:
    ask = """
await client.chat.completions.create(
    model="policy", messages=[{"role": "user", "content": "hello"}], extra_headers={"X-Session-ID": NAME}
)
"""
    asks = "".join(ask.replace("NAME", repr(name)) for name in "aba")
    result = '{"reward": 1, "traces": {"a": 0.5, "b": None}, "seats": {"b": 1}, '
    result += '"metrics": {"calls": 3, "lost": float("nan")}}'
    episode = played(agent(f"{asks}return {result}"), "1", "2", "3")
    assert (episode.error, episode.turn_traces.tolist(), episode.metrics) == (None, [0, 1, 0], {"calls": 3.0})
    assert episode.turn_seats.tolist() == [0, 1, 0]
    assert episode.trace_rewards.tolist() == pytest.approx([0.5, nan, 0.5], nan_ok=True)
    assert [bool(mask.any()) for mask in episode.rows.loss_mask] == [True, False, True]
    episode = played(agent(f"{asks}return {{'reward': 1, 'metrics': 3}}"), "1", "2", "3")
    assert "`metrics` of the result is 3: give a table of numbers" in str(episode.error)
    episode = played(agent(f"{asks}return {{'reward': 1, 'metrics': {{'calls': 'many'}}}}"), "1", "2", "3")
    assert "`metrics` of the result, 'calls': " in str(episode.error)
    episode = played(agent(f"{asks}return {{'reward': 1, 'metrics': {{'calls': None}}}}"), "1", "2", "3")
    assert "'calls': a metric must be a number, not None" in str(episode.error)


def test_a_function_judges_what_was_said_by_a_row_of_its_own(agent: Callable[..., Agent], tmp_path: Path) -> None:
    body = """
    said = [transcript.said.content for transcript in transcripts]
    asked = {message.content for transcript in transcripts for message in transcript.messages}
    return {"reward": float(said == ["3", row["answer"]] and asked == {row["prompt"]}), "turns": [0.25, result]}
"""
    for judging, error in ((body, None), ("    raise ValueError('no verdict')\n", "ValueError: no verdict")):
        judge = f"async def judge(transcripts, row, result):\n{judging}"
        (tmp_path / "judges.py").write_text(judge, "utf-8")
        solve = agent(ASK * 2 + "row.clear()\nreturn 2", reward=f"{tmp_path / 'judges.py'}:judge")
        episode = played(solve, "3", "2")
        assert episode.error == error
        wanted = [nan] * 3 if error else [1.0, 0.25, 2.0]
        assert [episode.reward, *episode.turn_rewards] == pytest.approx(wanted, nan_ok=True)
        assert ROW == {"prompt": "1+1=", "answer": "2"}


def test_what_goes_wrong_is_told_on_the_rows(agent: Callable[..., Agent]) -> None:
    for body, error in {
        "raise ValueError('no idea')": "ValueError: no idea",
        "return 'good'": "TypeError: an agent returns its reward",
        "return float('nan')": "nan",
        "raise SystemExit(3)": "SystemExit: 3",
        "await asyncio.sleep(1e9)": "TimeoutError: no result in 600 seconds",
        "raise asyncio.CancelledError": "CancelledError",
    }.items():
        episode = played(agent(ASK + body), "2")
        assert isnan(episode.reward)
        assert error in str(episode.error)
        assert np.isnan(episode.rows.rewards).tolist() == [True]
        assert not episode.rows.loss_mask.values.any()
        assert episode.rows.objects("reward_error") == (episode.error,)
    zero = played(agent(ASK + "raise ValueError", errors="zero"), "2")
    assert (zero.reward, zero.rows.rewards.tolist(), bool(zero.rows.loss_mask.values.any())) == (0, [0], True)
    with pytest.raises(DataError, match=r'agent.errors = "stop": ValueError: no idea; its row is .*1\+1='):
        played(agent(ASK + "raise ValueError('no idea')", errors="stop"), "2")


def test_a_sampler_that_fails_is_no_fault_of_the_agent(agent: Callable[..., Agent]) -> None:
    with pytest.raises(IndexError):
        played(agent(ASK * 2 + "return 1"), "only one answer")
    tries = f"try:\n{textwrap.indent(ASK, '    ')}\nexcept Exception:\n    "
    with pytest.raises(IndexError):
        played(agent(f"{tries}raise ValueError"))
    assert played(agent(f"{tries}return 0.5")).reward == 0.5

    faults = [RuntimeError("device-side assert")]

    def fails_once(prompt: str) -> str:
        if faults:
            raise faults.pop()
        return "hi"

    episode = played(agent(ASK + "raise ValueError('my own')"), says=fails_once)  # the client asks again
    assert "my own" in str(episode.error)
    assert episode.rows.objects("completion") == ("hi",)


SWALLOWS = """
while True:
    try:
        await asyncio.sleep(600)
    except:
        await asyncio.sleep(1)
"""
NEVER_ENDS = """
while True:
    try:
        await asyncio.sleep(1)
    except:
        pass
"""


class Remembers(Gateway):
    def open(self, sampling: Sampling) -> Session:
        self.last = super().open(sampling)
        return self.last


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Python tells of the one that is freed
def test_an_async_agent_that_ends_late_or_never_is_left_and_its_session_closed(agent: Callable[..., Agent]) -> None:
    async def main(body: str) -> None:
        gateway = Remembers(ScriptedSampler(lambda prompt: "ok"), ScriptedChat())
        solve, now = agent(ASK + body, timeout=60), asyncio.get_running_loop().time
        episode = await solve.play(gateway, ROW, Sampling(max_tokens=100))
        assert "no result in 60 seconds" in str(episode.error)
        assert len(episode.rows) == 1
        playing = asyncio.create_task(solve.play(gateway, ROW, Sampling(max_tokens=100)))
        await asyncio.sleep(1)
        playing.cancel()
        await asyncio.wait([playing])
        assert playing.cancelled()
        assert now() < 60 + 1 + 2 * 10  # in virtual time
        assert asyncio.all_tasks() == {asyncio.current_task()}
        async with client_of(gateway, gateway.last.url, gateway.last.token) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.completions.create(model="", prompt="late")

    for body in (SWALLOWS, NEVER_ENDS):
        simulate(partial(main, body))


def test_async_functions_in_other_shapes(tmp_path: Path) -> None:
    (tmp_path / "shapes.py").write_text(
        "import functools\n"
        "async def solve(client, row):\n    return 1\n"
        "@functools.wraps(solve)\ndef decorated(client, row):\n    return solve(client, row)\n"
        "class Solver:\n    async def __call__(self, client, row):\n        return 1\n"
        "called = Solver()\n",
        "utf-8",
    )
    for name in ("decorated", "called"):
        assert played(Agent(AgentConfig(source=f"{tmp_path / 'shapes.py'}:{name}"))).reward == 1.0


async def test_a_plain_client_asks_no_proxy(agent: Callable[..., Agent], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    solve = agent(ASK.replace("await ", "") + "return float(told.choices[0].message.content == '2')", "def")
    episode = await served(solve, "2")
    assert (episode.reward, episode.error) == (1.0, None)
    assert len(episode.rows) == 1


async def test_plain_functions_that_hang_hold_up_no_other(agent: Callable[..., Agent], tmp_path: Path) -> None:
    body = "import os, time\nwhile not os.path.exists(row['until']):\n    time.sleep(0.02)\nreturn 1"
    last, many = tmp_path / "last", min(32, (os.cpu_count() or 1) + 4) + 2  # more than a pool has threads
    async with Gateway(ScriptedSampler([]), ScriptedChat()).serving() as gateway:
        solve, hasty = agent(body, "def"), agent(body, "def", timeout=0.1)
        hanging = [asyncio.create_task(solve.play(gateway, {"until": str(last)}, Sampling())) for _ in range(many)]
        left = await hasty.play(gateway, {"until": str(last)}, Sampling())
        assert "no result in 0.1 seconds" in str(left.error)
        quick = await solve.play(gateway, {"until": str(tmp_path)}, Sampling())
        last.touch()
        assert [each.error for each in (quick, *await asyncio.gather(*hanging))] == [None] * (many + 1)


async def test_what_is_refused_and_what_needs_a_server(agent: Callable[..., Agent], tmp_path: Path) -> None:
    for solve in (agent("return 1", "def"), Agent(AgentConfig(command=(sys.executable,)))):
        with pytest.raises(ConfigError, match=r"gateway\.serving\(\)"):
            await solve.play(Gateway(ScriptedSampler([]), ScriptedChat()), ROW, Sampling())
    mine = tmp_path / "mine.py"
    mine.write_text("solve = 3\ndef other(client):\n    pass\n", "utf-8")
    with pytest.raises(ValidationError, match="give one of source"):
        AgentConfig()
    for config, why in (
        (AgentConfig(source=f"{mine}:solve"), "not a function"),
        (AgentConfig(source=f"{mine}:other"), "a client and a row"),
        (AgentConfig(command=("true",), reward=f"{mine}:other"), "the transcripts, a row and what the program"),
    ):
        with pytest.raises(ConfigError, match=why):
            Agent(config)


def test_an_episode_that_fails_is_played_again(agent: Callable[..., Agent]) -> None:
    body = "if told.choices[0].message.content == 'no':\n    raise ValueError(told.id)\nreturn 1"
    episode = played(agent(ASK + body, retries=2), "no", "no", "yes")
    assert (episode.reward, episode.error, episode.tries) == (1.0, None, 3)
    assert episode.rows.objects("completion") == ("yes",)
    lost = played(agent(ASK + body, retries=1), "no", "no", "yes")
    assert (isnan(lost.reward), lost.tries) == (True, 2)
    assert "ValueError" in str(lost.error)


def test_episodes_wait_for_room(agent: Callable[..., Agent]) -> None:
    solve = agent("await asyncio.sleep(10)\nreturn 1", concurrency=3)

    async def main() -> float:
        gateway = Gateway(ScriptedSampler([]), ScriptedChat())
        await asyncio.gather(*(solve.play(gateway, ROW, Sampling()) for _ in range(7)))
        return asyncio.get_running_loop().time()

    assert simulate(main) == 30.0


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


@pytest.mark.process
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


@pytest.mark.process
async def test_a_function_judges_a_command_that_knows_nothing_of_rewards(tmp_path: Path) -> None:
    judge = "def judge(transcripts, row, result):\n    return float(result == f'it said {row[\"answer\"]}\\n')\n"
    (tmp_path / "judges.py").write_text(judge, "utf-8")
    unaware = "\n".join(COMMAND.splitlines()[:-1])
    episode = await served(python(unaware, reward=f"{tmp_path / 'judges.py'}:judge"), "2")
    assert (episode.reward, episode.error) == (1.0, None)


@pytest.mark.process
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
    for episode, (*_, error) in zip(episodes, cases, strict=True):
        assert isnan(episode.reward), episode
        assert error in str(episode.error)


@pytest.mark.process
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


@pytest.mark.process
async def test_a_command_in_a_container_that_ends_with_its_episode(docker: Path) -> None:
    asked = docker / "asked"
    episode = await served(python(COMMAND, image="node:22"), "2")
    assert (episode.reward, episode.error) == (1.0, None)
    info, run = asked.read_text("utf-8").splitlines()[:2]
    assert info == "info"
    names = (f"{of}_{name}" for of in ("OPENAI", "ANTHROPIC") for name in ("BASE_URL", "API_KEY", "MODEL"))
    variables = " ".join(f"--env {name}" for name in (*names, "NO_PROXY", "no_proxy"))
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


@pytest.mark.process
def test_an_image_that_nothing_here_runs(docker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (docker / "broken").touch()
    with pytest.raises(ConfigError, match="needs docker, which does not work here: the daemon is asleep"):
        Agent(AgentConfig(image="node:22"))
    monkeypatch.setenv("PATH", str(docker))
    with pytest.raises(ConfigError, match="there is no program 'podman'"):
        Agent(AgentConfig(image="node:22", runtime="podman"))


HERE = Path(__file__).parent / "node"
PAGE = Path(__file__).parents[2] / "docs" / "agent-programs.md"
CALL = '<tool_call>{"name": "add", "arguments": {"numbers": [2, 3]}}</tool_call>'


@pytest.mark.process
@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node on this machine")
@pytest.mark.skipif(
    not (HERE / "node_modules/openai").exists(),
    reason="the package openai of npm is not installed: npm ci --prefix tests/agents/node",
)
async def test_the_agent_in_javascript_that_the_page_shows(tmp_path: Path) -> None:
    (shown,) = re.findall(r"^```js\n(// agent\.js\n.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    (tmp_path / "agent.mjs").write_text(shown, "utf-8")
    (tmp_path / "node_modules").symlink_to(HERE / "node_modules")
    agent = Agent(AgentConfig(command=("node", str(tmp_path / "agent.mjs"))))
    says = ScriptedSampler(lambda prompt: "5" if CALL in prompt else CALL)
    async with Gateway(says, ScriptedChat()).serving() as gateway:
        rows = [{"prompt": "2 + 3?", "answer": answer} for answer in ("5", "6")]
        right, wrong = await asyncio.gather(*(agent.play(gateway, row, Sampling(max_tokens=200)) for row in rows))
    assert (right.error, wrong.error) == (None, None)
    assert (right.reward, wrong.reward) == (1.0, 0.0)
    assert int(right.rows.loss_mask[0].sum()) == len(CALL) + len("5") + 2
    assert len(right.rows) == 1
