"""A run that does not come to its first step leaves an earlier run's folder as it was."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from meshrl import cli
from tests.first_hour.terminal import Terminal

SCRIPT = """
from meshrl import AlgorithmConfig, Metrics, Policy, PolicyConfig, Run, TaskConfig


class MineConfig(AlgorithmConfig):
    task: TaskConfig | None = None
    policy: PolicyConfig = PolicyConfig(backend="fake", model="none")
    steps: int = 2
    fails: str = ""


async def mine(run: Run, config: MineConfig) -> None:
    if config.fails == "before":
        raise MemoryError("the model does not fit")
    if config.fails == "waits":
        print("waiting", flush=True)
        await __import__("asyncio").Event().wait()
    await run.spawn(Policy, config.policy)
    async for step in run.steps(config.steps):
        if config.fails == "first" and step == 0:
            raise ArithmeticError("of the first step")
        await run.record(Metrics.of(loss=(1.0, 1.0)))
        if config.fails == "second" and step == 1:
            raise ArithmeticError("of the second step")
"""

MISTAKES = """
task = { source = "nowhere.jsonl" }
policy = { backend = "torch", model = "no/such/folder" }
run.meshes.mian = { ranks = 2 }
"""


@pytest.fixture
def project(tmp_path: Path, terminal: Terminal) -> Path:
    """A folder in which a run has ended well."""
    (tmp_path / "mine.py").write_text(SCRIPT, "utf-8")
    (tmp_path / "mine.toml").write_text('algorithm = "mine.py"\nrun.name = "mine"\n', "utf-8")
    assert terminal("run", "mine.toml").status == 0
    return tmp_path


def files(folder: Path) -> dict[str, bytes]:
    """What is in each file."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def runs(project: Path) -> list[str]:
    return sorted(path.name for path in (project / "runs").iterdir())


def test_run_tells_all_that_check_finds_and_makes_no_folder(terminal: Terminal, project: Path) -> None:
    before = files(project / "runs")
    (project / "bad.toml").write_text((project / "mine.toml").read_text("utf-8") + MISTAKES, "utf-8")
    status, _, err = terminal("run", "bad.toml")
    assert status == 1
    assert err == terminal("check", "bad.toml").err
    assert [line.strip().partition(" '")[0] for line in err.splitlines()] == [
        "error: 3 mistakes:",
        "bad.toml: task: task source",
        "bad.toml: policy: model",
        "bad.toml: run.meshes.mian: no role has `mesh =",
    ]
    assert files(project / "runs") == before


def test_a_run_that_makes_no_step_displaces_nothing(terminal: Terminal, project: Path) -> None:
    before = files(project / "runs/mine")
    (project / "model").mkdir()
    (project / "model" / "config.json").write_text("{}", "utf-8")
    for fails in (["fails=before"], ["fails=first"], ["policy.backend=torch", "policy.model=model"]):
        status, _, err = terminal("run", "mine.toml", *fails)
        assert status == 1
        assert "no step was made: runs/mine is the earlier run's, and this one's files are in runs/.mine.next" in err
        assert files(project / "runs/mine") == before
        assert runs(project) == [".mine.next", "mine"]
        assert b'"failed"' in (project / "runs/.mine.next/summary.json").read_bytes()
    assert "Policy.__init__ on rank 0" in err

    assert terminal("run", "mine.toml", "steps=3").status == 0
    assert files(project / "runs/mine-1") == before
    assert runs(project) == ["mine", "mine-1"]
    assert len((project / "runs/mine/metrics.jsonl").read_bytes().splitlines()) == 3
    assert (project / "runs/mine/events.jsonl").read_bytes().count(b'"kind":"step"') == 3


def test_a_run_that_makes_a_step_or_ends_well_has_the_folder(terminal: Terminal, project: Path) -> None:
    before = files(project / "runs/mine")
    assert terminal("run", "mine.toml", "fails=second").status == 1
    assert files(project / "runs/mine-1") == before
    assert len((project / "runs/mine/metrics.jsonl").read_bytes().splitlines()) == 2
    status, out, _ = terminal("run", "mine.toml", "steps=0")
    assert (status, "runs/mine \n" in out) == (0, True)
    assert runs(project) == ["mine", "mine-1", "mine-2"]


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_start_that_is_ended_displaces_nothing(terminal: Terminal, project: Path, number: signal.Signals) -> None:
    before = files(project / "runs/mine")
    code = "import signal; signal.signal(2, signal.default_int_handler); from meshrl.cli import main; main()"
    command = [sys.executable, "-c", code, "run", "mine.toml", "fails=waits"]
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[2])}
    with subprocess.Popen(
        command, cwd=project, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(number)
        _, err = process.communicate()
    assert process.returncode != 0
    if number == signal.SIGINT:
        assert err.endswith("Interrupted. What was recorded so far is in runs/.mine.next\n")
    assert files(project / "runs/mine") == before
    assert terminal("run", "mine.toml").status == 0
    assert runs(project) == ["mine", "mine-1"]
