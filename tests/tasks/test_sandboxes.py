"""Sandboxes that stay: one contract for all kinds, who gets one, and what a start that fails is."""

import asyncio
import importlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshrl as rl
from meshrl.agents import Agent, AgentConfig, Gateway
from meshrl.errors import ConfigError, MachineFault, SandboxError
from meshrl.tasks import open_sandbox, sandbox
from meshrl.tasks.environment import FunctionEnvironment
from meshrl.tasks.function import FunctionReward
from meshrl.testing import ScriptedChat, ScriptedSampler, simulate
from tests.support.sandboxes import install, keeps_the_contract

RUNTIME = """#!/bin/sh
# A runtime whose containers are folders. As runc does, it runs each command in its own session.
printf '%s\\n' "$(basename "$0") $*" >> {here}/asked
case "$(basename "$0") $1 $2" in
*" run "*)
    while [ "$1" != --name ]; do shift; done
    name=$2 image=$5; shift 5
    if [ "$image" = missing ]; then echo "Unable to find image 'missing'" >&2; exit 125; fi
    mkdir {here}/$name && cd {here}/$name && exec sh "$@";;
"apptainer instance start")
    while [ $# -gt 2 ]; do shift; done
    if [ "$1" = docker://missing ]; then echo "FATAL: missing" >&2; exit 255; fi
    mkdir {here}/$2;;
"apptainer instance stop") rm -r {here}/$3;;
*" exec "*)
    if [ "$2" = --interactive ]; then shift; fi
    if [ "$2 $3 $4" = "--cleanenv --pwd /tmp" ]; then shift 3; unset SECRET; fi
    cd {here}/"${{2#instance://}}" || exit 1
    shift 2; exec setsid "$@";;
*" rm "*) rm -r {here}/$4;;
esac
"""


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    def put(name: str) -> Path:
        (folder := tmp_path / "bin").mkdir()
        if name == "apptainer":  # the others pass nothing on
            monkeypatch.setenv("SECRET", "mine")
        (folder / name).write_text(RUNTIME.format(here=tmp_path), "utf-8")
        (folder / name).chmod(0o755)
        tools = "sh cat mkdir basename dirname rm setsid sleep seq printf kill head"
        for tool in tools.split():
            if (found := Path("/usr/bin", tool)).exists():
                (folder / tool).symlink_to(found)
        monkeypatch.setenv("PATH", str(folder))  # without the runtimes of this machine
        return tmp_path / "asked"

    return put


@pytest.mark.process
@pytest.mark.parametrize("kind", ["local", "docker", pytest.param("podman", marks=pytest.mark.wide), "apptainer"])
async def test_commands_files_limits_and_ends_of_each_kind(kind: str, runtime: Callable[[str], Path]) -> None:
    asked = None if kind == "local" else runtime(kind)
    async with open_sandbox("local" if asked is None else "container:image:3") as sandbox:
        await keeps_the_contract(sandbox)
    with pytest.raises(SandboxError, match="ended"):
        await sandbox.exec("true")
    if asked is None:
        return
    lines = asked.read_text("utf-8").splitlines()
    name = lines[0].partition("--name ")[2].split()[0] if kind != "apptainer" else lines[0].split()[-1]
    begins = (
        f"{kind} run --rm --interactive --network none --memory 4096m --pids-limit 64 --name {name} --entrypoint sh"
    )
    apptainers = "apptainer instance start --containall --writable-tmpfs --net --network none docker://image:3"
    assert lines[0] == (f"{apptainers} {name}" if kind == "apptainer" else f"{begins} image:3 -c echo ready; cat; exit")
    assert lines[-1].endswith(f"instance stop {name}" if kind == "apptainer" else f"rm --force --volumes {name}")
    assert not (asked.parent / name).exists()


@pytest.mark.process
@pytest.mark.parametrize("kind", ["docker", "apptainer"])
async def test_a_container_that_does_not_start(kind: str, runtime: Callable[[str], Path]) -> None:
    runtime(kind)
    with pytest.raises(MachineFault, match=r"'container:missing' did not start: .*missing"):
        async with open_sandbox("container:missing"):
            pass


@pytest.mark.process
def test_a_container_ends_with_the_controller(runtime: Callable[[str], Path], tmp_path: Path) -> None:
    runtime("docker")
    os.mkfifo(fifo := tmp_path / "held")
    docker = tmp_path / "bin" / "docker"
    docker.write_text(docker.read_text("utf-8").replace("exec sh", f"exec 3> {fifo} && exec sh"), "utf-8")
    script = """
import asyncio
from meshrl.tasks import open_sandbox
async def main():
    async with open_sandbox("container:image"):
        print("open", flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""
    own = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=own) as controller:
        assert controller.stdout is not None
        with fifo.open("rb") as held:
            assert controller.stdout.readline() == b"open\n"
            controller.send_signal(signal.SIGKILL)
            assert held.read() == b"", "it ends"


@pytest.mark.process
async def test_a_local_sandbox_has_the_limits_of_a_models_code() -> None:
    async with open_sandbox("local") as sandbox:
        line = "import socket; socket.create_connection(('127.0.0.1', 1))"
        assert "ermitted" in (await sandbox.exec(["python3", "-c", line])).output
        assert "ermission denied" in (await sandbox.exec(["cat", str(Path(__file__))])).output
        await sandbox.exec("kill -9 -1; kill -9 $PPID")
        assert (await sandbox.exec("echo alive")).output == "alive\n"
        orphans = await sandbox.exec("for each in $(seq 200); do (: & :) || exit; done")
        assert (orphans.status, orphans.output) == (0, ""), "they do not count once they have ended"


STUB = """
import asyncio
from meshrl.tasks import Ran

noted, fails = [], []

class Stub:
    def __init__(self, argument):
        self.argument = argument
    async def start(self):
        noted.append(f"start {self.argument}")
        await asyncio.sleep(1)
        if fails:
            raise fails.pop()
    async def exec(self, command, *, seconds=60.0, stdin=b"", output_bytes=65536):
        noted.append(f"exec {command}")
        return Ran(0, "42", 0)
    async def stop(self):
        noted.append("stop")
"""
USER = """
class Shell:
    async def reset(self, row, sandbox):
        self.sandbox = sandbox
        return row["prompt"]
    async def step(self, completion):
        ran = await self.sandbox.exec(completion)
        return ran.output, 0.5, False

class Bare:
    def reset(self, row):
        return ""
    def step(self, completion):
        return "", 0.0, True

async def judge(prompt, completion, row, sandbox):
    return float((await sandbox.exec(completion)).output)

def plain(prompt, completion, row, sandbox):
    return 1.0

async def solve(client, row, sandbox):
    told = await client.completions.create(model="policy", prompt=row["prompt"])
    return (await sandbox.exec(told.choices[0].text)).output

async def after(transcripts, row, result, sandbox):
    await sandbox.exec("tests")
    return float(result)
"""


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A package with a rented sandbox, as an index would install it."""
    (tmp_path / "rented_stub.py").write_text(STUB, "utf-8")
    (tmp_path / "mine.py").write_text(USER, "utf-8")
    install(tmp_path, monkeypatch, "stub = rented_stub:Stub\nbroken = not_there:Stub")
    monkeypatch.delitem(sys.modules, "rented_stub", raising=False)
    return importlib.import_module("rented_stub")


ROWS = rl.Batch.of(prompt=["p"], completion=["ls"], row=[{}])


def test_who_asks_gets_a_sandbox_of_his_own(stub: Any, tmp_path: Path) -> None:
    mine = str(tmp_path / "mine.py")

    async def main() -> None:
        reward = FunctionReward(rl.RewardConfig(function=f"{mine}:judge", sandbox="stub:x"))
        assert (await reward.score(ROWS)).rewards.tolist() == [42.0]
        assert stub.noted == ["start x", "exec ls", "stop"]
        stub.noted.clear()
        config = rl.EnvironmentConfig(source=f"{mine}:Shell", sandbox="stub:y", turns=2)
        episodes = rl.Episodes(ScriptedSampler(["a", "b"]), FunctionEnvironment(config), config)
        batch = await rl.rollout(episodes, ROWS.drop("completion"), rl.Sampling())
        assert batch.rewards.tolist() == [1.0]
        assert stub.noted == ["start y", "exec a", "exec b", "stop"]
        stub.noted.clear()
        agent = Agent(AgentConfig(source=f"{mine}:solve", reward=f"{mine}:after", sandbox="stub:z", timeout=0.5))
        gateway = Gateway(ScriptedSampler(["c"]), ScriptedChat())
        episode = await agent.play(gateway, {"prompt": "p"}, rl.Sampling(max_tokens=9))
        assert (episode.reward, episode.error) == (42.0, None), "its start does not count as time of the episode"
        assert stub.noted == ["start z", "exec c", "exec tests", "stop"]
        await gateway.aclose()

    simulate(main)


def test_a_start_that_fails_is_a_fault_of_the_machine(stub: Any, tmp_path: Path) -> None:
    mine = str(tmp_path / "mine.py")

    async def main() -> None:
        stub.fails[:] = [RuntimeError("no machine is free")] * 2
        config = rl.RewardConfig(function=f"{mine}:judge", sandbox="stub:", errors="zero")
        assert (await FunctionReward(config).score(ROWS)).rewards.tolist() == [42.0]
        assert stub.noted == ["start ", "stop"] * 2 + ["start ", "exec ls", "stop"]
        stub.fails[:] = [RuntimeError("no machine is free")] * 100
        scored = await FunctionReward(config).score(ROWS)
        assert np.isnan(scored.rewards).all(), "never a reward, though errors count as 0"
        assert "'stub:' did not start: RuntimeError: no machine is free" in str(scored.objects("reward_error")[0])
        shell = rl.EnvironmentConfig(source=f"{mine}:Shell", sandbox="stub:", errors="zero")
        episodes = rl.Episodes(ScriptedSampler(["a"] * 99), FunctionEnvironment(shell), shell)
        assert np.isnan((await rl.rollout(episodes, ROWS.drop("completion"), rl.Sampling())).rewards).all()
        agent = Agent(AgentConfig(source=f"{mine}:solve", reward=f"{mine}:after", sandbox="stub:", errors="zero"))
        gateway = Gateway(ScriptedSampler(["c"]), ScriptedChat())
        with pytest.raises(MachineFault, match="no machine is free"):
            await agent.play(gateway, {"prompt": "p"}, rl.Sampling(max_tokens=9))
        await gateway.aclose()

    simulate(main)


def test_sandboxes_end_with_what_is_cancelled(stub: Any, tmp_path: Path) -> None:
    mine = str(tmp_path / "mine.py")

    async def main() -> None:
        for seconds in (0.5, 1.5):  # while it starts, and while the model draws
            config = rl.EnvironmentConfig(source=f"{mine}:Shell", sandbox="stub:", turns=99)
            agent = Agent(AgentConfig(source=f"{mine}:solve", sandbox="stub:"))
            gateway = Gateway(Waiting(["c"]), ScriptedChat())
            environment = rl.Episodes(Waiting(["a"]), FunctionEnvironment(config), config)
            for playing in (
                rl.rollout(environment, ROWS.drop("completion"), rl.Sampling()),
                agent.play(gateway, {"prompt": "p"}, rl.Sampling(max_tokens=9)),
            ):
                task: asyncio.Task[object] = asyncio.ensure_future(playing)
                await asyncio.wait([task], timeout=seconds)
                task.cancel()
                await asyncio.wait([task])
                assert task.cancelled()
                assert stub.noted == ["start ", "stop"]
                stub.noted.clear()
            await gateway.aclose()

    simulate(main)


class Waiting(ScriptedSampler):
    async def generate(self, prompts: rl.Batch, sampling: rl.Sampling) -> AsyncIterator[rl.Batch]:
        await asyncio.sleep(1000)
        async for batch in super().generate(prompts, sampling):
            yield batch


def test_sandboxes_that_do_not_fit(stub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = str(tmp_path / "mine.py")

    async def main() -> None:
        def environment(**keys: Any) -> object:
            return FunctionEnvironment(rl.EnvironmentConfig(**keys))

        def reward(**keys: Any) -> object:
            return FunctionReward(rl.RewardConfig(**keys))

        cases: list[tuple[Callable[[], object], str]] = [
            (lambda: environment(source=f"{mine}:Shell"), "takes a sandbox: set environment.sandbox"),
            (lambda: environment(source=f"{mine}:Bare", sandbox="local"), "nothing takes one"),
            (lambda: environment(source=f"{mine}:Shell", sandbox="stubb:1"), "stub:ARGUMENT; did you mean 'stub'"),
            (
                lambda: environment(source=f"{mine}:Shell", sandbox="broken:1"),
                "does not load not_there:Stub: .*not_there",
            ),
            (lambda: reward(function=f"{mine}:plain", sandbox="stub:"), "write `async def`"),
            (lambda: reward(function=f"{mine}:judge"), "takes a sandbox: set reward.sandbox"),
            (lambda: Agent(AgentConfig(source=f"{mine}:solve")), "takes a sandbox: set agent.sandbox"),
        ]
        for make, match in cases:
            with pytest.raises(ConfigError, match=match):
                make()
        monkeypatch.setattr(sandbox, "enforced", sandbox.Enforced)
        with pytest.raises(ConfigError, match=r"^the sandbox local runs .* or take one of the kind container:IMAGE$"):
            environment(source=f"{mine}:Shell", sandbox="local")
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(ConfigError, match="one of docker, podman, apptainer on PATH"):
            async with open_sandbox("container:image"):
                pass

    simulate(main)
