"""Environments of verifiers, played by the real package in a Python of its own: `make test-verifiers` makes it."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshrl import Batch, Sampling, Task, TaskConfig
from meshrl.agents import Agent, AgentConfig, Agents, Episode, Gateway
from meshrl.errors import ConfigError
from meshrl.run import copy_script
from meshrl.testing import ScriptedSampler
from tests.agents.talks import ASSISTANT, END, ChatML, line, merged

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-verifiers/bin/python"
PACKAGES = next((ROOT / ".venv-verifiers").glob("lib/python*/site-packages"), ROOT)
PROGRAMS = Path(__file__).parent / "programs"
HERE: dict[str, Any] = {"runtime": {"type": "subprocess"}}
SAMPLING = Sampling(max_tokens=1000)

pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason="verifiers is in an environment of its own: `make test-verifiers`"
)


@pytest.fixture(autouse=True)
def _programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["examples/verifiers", str(PROGRAMS)]))  # as the docs say


def options(**env: object) -> dict[str, Any]:
    return {"python": str(PYTHON), "env": env}


def called(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def first_row(source: str, given: dict[str, Any]) -> dict[str, Any]:
    task = Task.load(TaskConfig(source=source, options={**given, "size": 1}, held_out=0))
    row: Any = task.train.objects("row")[0]
    return dict(row)


async def played(
    source: str, given: dict[str, Any], said: Callable[[str], str] | Iterable[str], **config: Any
) -> tuple[Episode, list[str]]:
    sampler = ScriptedSampler(said)
    agent = Agent(AgentConfig.model_validate({"source": source, "options": given, **config}))
    async with Gateway(sampler, ChatML()).serving() as gateway:
        return await agent.play(gateway, first_row(source, given), SAMPLING), sampler.asked


def learned(rows: Batch) -> list[str]:
    """What is learned in each row, in the characters that the sampler drew."""
    masks = [np.asarray(mask, np.bool_) for mask in rows.loss_mask]
    return ["".join(map(chr, np.asarray(tokens)[mask])) for tokens, mask in zip(rows.tokens, masks, strict=True)]


async def test_tools_of_a_taskset_are_called_and_the_row_is_what_was_drawn() -> None:
    given = options(agent=HERE)
    task = Task.load(TaskConfig(source="verifiers:spelling", options={**given, "size": 3}, held_out=0))
    questions, answers = task.train.objects("prompt"), task.train.objects("answer")
    assert [str(each)[::-1] for each in questions] == [*answers]
    word = str(first_row("verifiers:spelling", given)["question"])
    said = [f"I think: the tool.{called('reverse', word=word)}", word[::-1]]  # `th` is drawn as two tokens
    episode, asked = await played("verifiers:spelling", given, said)
    assert (episode.error, episode.reward, episode.turns) == (None, 1.0, 2)
    assert episode.metrics == {"calls": 1.0, "spelled": 1.0}
    (row,) = learned(episode.rows)
    assert row == "".join(f"{each}{END}" for each in said)
    (tokens,) = episode.rows.tokens
    assert "".join(map(chr, np.asarray(tokens))) == f"{asked[1]}{said[1]}{END}"
    assert asked[1] == f"{asked[0]}{said[0]}{END}\n{merged(line('tool', word[::-1]))}{ASSISTANT}"
    wrong, _ = await played("verifiers:spelling", given, [word])
    assert (wrong.reward, wrong.metrics) == (0.0, {"calls": 0.0, "spelled": 0.0})


async def test_each_trace_of_an_episode_has_its_own_reward_and_advantage() -> None:
    given = options(id="best-of-n", n=2, agent=HERE)
    word = str(first_row("verifiers:spelling", given)["question"])
    said = [word, called("reverse", word=word), word[::-1]]
    sampler = ScriptedSampler(said)
    agent = Agent(AgentConfig.model_validate({"source": "verifiers:spelling", "options": given}))
    agents = Agents(sampler, agent, Gateway(sampler, ChatML()))
    prompts = Batch.of(row=[first_row("verifiers:spelling", given)], groups=np.zeros(1, np.int64))
    async with agents.serving():
        batch = Batch.concat([each async for each in agents.generate(prompts, SAMPLING)])
    assert batch.rewards.tolist() == [0.5]
    assert [each.tolist() for each in batch.ragged("trace_rewards")] == [[0, 1, 1]]
    assert [each.tolist() for each in batch.ragged("turn_traces")] == [[0, 1, 1]]
    assert [each.tolist() for each in batch.ragged("turn_seats")] == [[0, 0, 0]]
    assert batch.objects("agent_metrics") == ({"calls": 0.5, "spelled": 0.5, "best": 0.5, "pass_at_n": 1.0},)


async def test_a_seat_that_is_not_trainable_is_asked_and_not_learned() -> None:
    loop = {"harness": {"id": "loop"}}
    given = options(solver=loop, judge=loop)
    row = first_row("verifiers:seats", given)
    assert [row[name] for name in ("question", "system", "answer")] == ["2+2", "Digits only.", "4"]
    episode, asked = await played("verifiers:seats", given, ["4", "0.75"])
    assert "Is 4 right?" in asked[1]
    assert (episode.error, episode.reward, episode.metrics) == (None, 0.75, {"solver/judged": 0.75})
    assert learned(episode.rows) == [f"4{END}", ""]


def files_of_workers(parent: int) -> int:
    """Open files of all workers below a process."""
    tasks = Path(f"/proc/{parent}/task").glob("*/children")
    children = [int(each) for path in tasks for each in path.read_text().split()]
    workers = [each for each in children if Path(f"/proc/{each}/cmdline").read_text().startswith(f"{PYTHON}\0")]
    return sum(len([*Path(f"/proc/{each}/fd").iterdir()]) for each in workers) + sum(map(files_of_workers, children))


@pytest.mark.skipif(sys.platform != "linux", reason="counts files in /proc")
async def test_episodes_leave_no_files_open() -> None:
    loop = {"harness": {"id": "loop"}}
    given = options(solver=loop, judge=loop)
    counts = list[int]()
    sampler = ScriptedSampler(["4", "1"] * 6)
    agent = Agent(AgentConfig.model_validate({"source": "verifiers:seats", "options": given}))
    row = first_row("verifiers:seats", given)
    async with Gateway(sampler, ChatML()).serving() as gateway:
        for _ in range(6):
            episode = await agent.play(gateway, row, SAMPLING)
            assert (episode.error, episode.reward) == (None, 1.0)
            counts.append(files_of_workers(os.getpid()))
    assert 0 < max(counts[1:]) <= counts[0] + 2, counts


async def test_a_failure_is_data_and_a_process_that_ends_is_started_again() -> None:
    loop = {"harness": {"id": "loop"}}
    given = options(solver=loop, judge=loop)
    episode, _ = await played("verifiers:seats", given, ["4", "no number"])
    assert str(episode.error).startswith("EpisodeFailed: EnvError: ")
    assert "no number" in str(episode.error)
    assert np.isnan(episode.reward)
    episode, _ = await played("verifiers:seats", given, ["hang"], timeout=2)
    assert str(episode.error).startswith("TimeoutError: no result in 2 seconds")

    episode, _ = await played("verifiers:seats", given, ["end"])
    assert "its process has ended" in str(episode.error)
    episode, _ = await played("verifiers:seats", given, ["4", "1"], errors="zero")
    assert (episode.error, episode.reward) == (None, 1.0)
    episode, _ = await played("verifiers:seats", given, ["end"], errors="zero")
    assert np.isnan(episode.reward)  # no program's fault


async def test_a_blocked_process_is_ended_and_started_again() -> None:
    loop = {"harness": {"id": "loop"}}
    given = options(solver=loop, judge=loop)
    row = first_row("verifiers:seats", given)
    sampler = ScriptedSampler(["block", "4", "1"])
    config = {"source": "verifiers:seats", "options": given}
    async with Gateway(sampler, ChatML()).serving() as gateway:
        episode = await Agent(AgentConfig.model_validate(config | {"timeout": 2})).play(gateway, row, SAMPLING)
        assert str(episode.error).startswith("TimeoutError: no result in 2 seconds")
        agent = Agent(AgentConfig.model_validate(config))
        episode = await agent.play(gateway, row, SAMPLING)  # waits in line, and is lost with the process
        assert "its process has ended" in str(episode.error)
        episode = await agent.play(gateway, row, SAMPLING)
        assert (episode.error, episode.reward) == (None, 1.0)


def test_a_new_configuration_plays_the_environment(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    assert [path.name for path in copy_script("verifiers:spelling", folder)] == ["agent.py", "config.toml"]
    told = tomllib.loads((folder / "config.toml").read_text("utf-8"))
    assert told["task"] == {"source": "verifiers:spelling", "held_out": "all", "options": {"env": {"agent": HERE}}}
    assert told["agent"] == {"source": "verifiers:spelling", "options": told["task"]["options"]}


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match="there is no Python 'nowhere/bin/python' here"):
        first_row("verifiers:spelling", {"python": "nowhere/bin/python"})
    with pytest.raises(ConfigError, match=r"cannot be loaded by .*: taskset 'speling' not found"):
        first_row("verifiers:speling", options())
    with pytest.raises(ConfigError, match="Harbor's tasks need a container"):
        first_row("verifiers:harbor", options(id="best-of-n", agent=HERE))


@contextmanager
def served(process: subprocess.Popen[str], port: Callable[[], int]) -> Generator[str]:
    """The address of a server that a process starts."""
    with process:
        try:
            while process.poll() is None:
                try:
                    socket.create_connection(("127.0.0.1", port())).close()
                    break
                except (ConnectionRefusedError, FileNotFoundError, ValueError):
                    pass
            yield f"http://127.0.0.1:{port()}"
        finally:
            process.terminate()


def openenv_server() -> AbstractContextManager[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return served(subprocess.Popen([PYTHON, "-P", PROGRAMS / "open_guess.py", str(port)], text=True), lambda: port)


async def test_an_openenv_server_plays_the_user() -> None:
    with openenv_server() as url:
        given = options(taskset={"base_url": url}, player={**HERE, "harness": {"id": "loop"}})
        episode, asked = await played("verifiers:openenv", given, ["5", "3"])
    assert (episode.error, episode.reward, episode.turns) == (None, 1.0, 2)
    assert ("1 to 9?" in asked[0], "less" in asked[1]) == (True, True)
    assert learned(episode.rows) == [f"5{END}3{END}"]


def nemo_gym_server(name: str, folder: Path) -> AbstractContextManager[str]:
    """The library's own script that serves a resource server of NeMo Gym, and writes the port that it chose."""
    script = PACKAGES / "verifiers/v1/tasksets/nemo_gym/server.py"
    env = {**os.environ, "NEMO_GYM_RESOURCE_SERVER": name}
    process = subprocess.Popen([PYTHON, "-P", script], env=env, cwd=folder, text=True)
    return served(process, lambda: int((folder / "nemo_gym.port").read_text()))


@pytest.mark.skipif(not (PACKAGES / "nemo_gym").exists(), reason="nemo-gym needs Python 3.12")
async def test_a_nemo_gym_server_has_the_tools_and_the_reward(tmp_path: Path) -> None:
    example = "resources_servers/example_session_state_mgmt"
    with nemo_gym_server(f"{example.replace('/', '.')}.app:StatefulCounterResourcesServer", tmp_path) as url:
        taskset = {"dataset": str(PACKAGES / example / "data/example.jsonl"), "task": {"resources_url": url}}
        given = options(taskset=taskset, agent={**HERE, "harness": {"id": "loop"}})
        calls = [called("increment_counter", count=1), called("increment_counter", count=2)]
        episode, asked = await played("verifiers:nemo_gym", given, [*calls, called("get_counter_value"), "6"])
        assert (episode.error, episode.reward, episode.turns) == (None, 1.0, 4)
        assert '{"count":6}' in asked[3]
        other, _ = await played("verifiers:nemo_gym", given, [calls[0], "6"])
        assert (other.error, other.reward) == (None, 0.0)


BOX = """#!/bin/sh
# Runs Python where /logs and /tests are empty, and all other folders are the machine's.
exec unshare --map-root-user --mount sh -c '
mount -t tmpfs none "$0"
for each in /*; do
    if [ -L "$each" ]; then cp -P "$each" "$0"
    elif [ -d "$each" ]; then mkdir "$0$each"; mount --rbind "$each" "$0$each"; fi
done
for each in logs tests; do mkdir -p "$0/$each"; mount -t tmpfs none "$0/$each"; done
exec chroot "$0" env --chdir "$PWD" {python} "$@"' {root} "$@"
"""


def run(*command: str) -> int:
    return subprocess.call(command, stderr=subprocess.DEVNULL)


def harbor_dataset(folder: Path) -> dict[str, str]:
    """A dataset of one task, in a repository of its own: the repository's last word is what Harbor downloads."""
    registered = {"name": "greet", "path": "greet", "git_url": str(folder)}
    dataset = {"name": "greetings", "version": "1", "description": "", "tasks": [registered]}
    files = {
        "greet/instruction.md": "Write hello to greeting.txt.",
        "greet/task.toml": 'version = "1.0"',
        "greet/tests/test.sh": f"grep -c hello greeting.txt > /logs/verifier/reward.txt; touch {folder.parent}/graded",
        "registry.json": json.dumps([dataset]),
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, "utf-8")
    git = ["git", "-C", str(folder), "-c", "user.name=A", "-c", "user.email=a@localhost"]
    for command in (["init"], ["add", "."], ["commit", "--message", "Greet"]):
        assert run(*git, *command) == 0
    return {"dataset": "greetings", "registry_path": str(folder / "registry.json")}


@pytest.mark.skipif(not (PACKAGES / "harbor").exists(), reason="harbor needs Python 3.12")
@pytest.mark.skipif(
    sys.platform != "linux" or run("unshare", "--map-root-user", "--mount", "true") != 0,
    reason="no namespace of mounts here",
)
async def test_the_script_of_a_harbor_task_is_the_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # Harbor has a cache there
    monkeypatch.setenv("HARBOR_TELEMETRY", "off")
    box, root = tmp_path / "python", tmp_path / "root"
    box.write_text(BOX.format(python=PYTHON, root=root), "utf-8")
    box.chmod(0o755)
    root.mkdir()
    taskset = harbor_dataset(tmp_path / "tasks")
    graded, before = tmp_path / "graded", list[bool]()

    def says(command: str) -> Callable[[str], str]:
        def say(_: str) -> str:
            before.append(graded.exists())
            return command

        return say

    given = {"python": str(box), "env": {"taskset": taskset, "agent": {**HERE, "harness": {"id": "shell"}}}}
    commands = ["echo hello > greeting.txt", "touch greeting.txt"]
    plays = [played("verifiers:harbor", given, says(command)) for command in commands]
    (hello, asked), (empty, _) = await asyncio.gather(*plays)
    assert "Write hello" in asked[0]
    assert [(each.error, each.reward) for each in (hello, empty)] == [(None, 1.0), (None, 0.0)]
    assert learned(hello.rows) == [f"{commands[0]}{END}"]
    assert before == [False, True]  # they share folders, so one waits for the other's reward
