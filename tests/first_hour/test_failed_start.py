"""A run that does not come to its first step leaves an earlier run's folder as it was."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

import meshrl
from tests.first_hour.terminal import COMMAND, Terminal

SCRIPT = """
import asyncio
import signal

from meshrl import AlgorithmConfig, Metrics, Policy, PolicyConfig, Run, TaskConfig


class MineConfig(AlgorithmConfig):
    task: TaskConfig | None = None
    policy: PolicyConfig = PolicyConfig(backend="fake", model="none")
    steps: int = 2
    fails: str = ""


async def mine(run: Run, config: MineConfig) -> None:
    if config.fails == "before":
        raise MemoryError("the model does not fit")
    if config.fails == "interrupt":
        signal.raise_signal(signal.SIGINT)
        await asyncio.Event().wait()
    if config.fails == "kill":
        signal.raise_signal(signal.SIGKILL)
    await run.spawn(Policy, config.policy)
    async for step in run.steps(config.steps):
        if config.fails == "first" and step == 0:
            raise ArithmeticError("of the first step")
        await run.record(Metrics.of(loss=(1.0, 1.0)))
        if config.fails == "second" and step == 1:
            raise ArithmeticError("of the second step")
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
    assert "Traceback" not in err

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


def test_a_start_that_is_interrupted_displaces_nothing(terminal: Terminal, project: Path) -> None:
    before = files(project / "runs/mine")
    status, _, err = terminal("run", "mine.toml", "fails=interrupt")
    assert (status, err.endswith("Interrupted. What was recorded so far is in runs/.mine.next\n")) == (130, True)
    assert files(project / "runs/mine") == before


@pytest.mark.process
def test_a_start_that_is_killed_displaces_nothing(terminal: Terminal, project: Path) -> None:
    before = files(project / "runs/mine")
    environment = {**os.environ, "PYTHONPATH": str(Path(meshrl.__file__).parents[1])}
    command = [*COMMAND, "run", "mine.toml", "fails=kill"]
    done = subprocess.run(command, cwd=project, env=environment, check=False, capture_output=True)
    assert done.returncode == -signal.SIGKILL
    assert files(project / "runs/mine") == before
    assert terminal("run", "mine.toml").status == 0
    assert runs(project) == ["mine", "mine-1"]
