import os
import signal
import subprocess
from pathlib import Path

import pytest

import meshrl
from tests.first_hour.terminal import COMMAND, done, type_in

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
        if config.fails == f"step {step}":
            raise ArithmeticError("of a step")
        await run.record(Metrics.of(loss=(1.0, 1.0)))
"""
MINE = Path("runs/mine")


@pytest.fixture(autouse=True)
def before() -> dict[str, bytes]:
    Path("mine.py").write_text(SCRIPT, "utf-8")
    Path("mine.toml").write_text('algorithm = "mine.py"\nrun.name = "mine"\n', "utf-8")
    done("run", "mine.toml")
    return files(MINE)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def runs() -> list[str]:
    return sorted(path.name for path in MINE.parent.iterdir())


def test_a_run_that_makes_no_step_displaces_nothing(before: dict[str, bytes]) -> None:
    Path("model").mkdir()
    Path("model/config.json").write_text("{}", "utf-8")
    for fails in (["fails=before"], ["fails=step 0"], ["policy.backend=torch", "policy.model=model"]):
        status, _, err = type_in("run", "mine.toml", *fails)
        assert status == 1
        assert "no step was made: runs/mine is the earlier run's, and this one's files are in runs/.mine.next" in err
        assert (files(MINE), runs()) == (before, [".mine.next", "mine"])
        assert b'"failed"' in Path("runs/.mine.next/summary.json").read_bytes()
    assert "Policy.__init__ on rank 0" in err
    assert "traceback" not in err.lower()

    status, _, err = type_in("run", "mine.toml", "fails=interrupt")
    assert (status, err.endswith("Interrupted. What was recorded so far is in runs/.mine.next\n")) == (130, True)
    assert files(MINE) == before

    done("run", "mine.toml", "steps=3")
    assert (files(Path("runs/mine-1")), runs()) == (before, ["mine", "mine-1"])
    assert (MINE / "metrics.jsonl").read_bytes().count(b"\n") == 3
    assert (MINE / "events.jsonl").read_bytes().count(b'"kind":"step"') == 3


def test_a_run_that_makes_a_step_or_ends_well_has_the_folder(before: dict[str, bytes]) -> None:
    assert type_in("run", "mine.toml", "fails=step 1").status == 1
    assert files(Path("runs/mine-1")) == before
    assert (MINE / "metrics.jsonl").read_bytes().count(b"\n") == 1
    assert "runs/mine \n" in done("run", "mine.toml", "steps=0").out
    assert runs() == ["mine", "mine-1", "mine-2"]


@pytest.mark.process
def test_a_start_that_is_killed_displaces_nothing(before: dict[str, bytes]) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(meshrl.__file__).parents[1])}
    killed = subprocess.run([*COMMAND, "run", "mine.toml", "fails=kill"], env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert files(MINE) == before
    done("run", "mine.toml")
    assert runs() == ["mine", "mine-1"]
