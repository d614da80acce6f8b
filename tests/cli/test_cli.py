import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from meshrl import cli, log
from meshrl.errors import MeshrlError
from meshrl.run.jobs import load_script
from tests.first_hour.terminal import COMMAND, config_of, done, refused, type_in

SCRIPT = '''
"""Counts."""

import asyncio
import json
import os
import signal
import sys
import threading
import time
from meshrl import Actor, Batch, Metrics, Run
from meshrl.config import Config
from meshrl.errors import DataError
from meshrl.events import waiting


class CountConfig(Config):
    steps: int = 4
    then: str = ""


class Broken(Actor):
    def __init__(self) -> None:
        raise ValueError("a bug")


def wrong(then: str) -> None:
    if then == "fail":
        raise DataError("the data is [bad]")
    if then == "column":
        Batch.of(prompt=["1"])["advantage"]
    if then == "bug":
        json.loads("{")


def terminate() -> None:
    """From outside, once the loop waits."""
    main = threading.main_thread().ident
    while sys._current_frames()[main].f_code.co_name != "select":
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGTERM)


async def count(run: Run, config: CountConfig) -> None:
    async for step in run.steps(config.steps):
        await run.record(Metrics.of(loss=(1.0, 2.0)), reward=step / 2)
    wrong(config.then)
    if config.then == "break":
        await (await run.mesh(1)).spawn(Broken)
    if config.then == "terminate":
        with waiting("the script", "nothing", "itself"):
            threading.Thread(target=terminate).start()
            await asyncio.Event().wait()
    run.summary(exact_match_after=0.5)
'''


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("COLUMNS", "200")
    Path("count.py").write_text(SCRIPT, "utf-8")
    Path("count.toml").write_text('# Counts.\nalgorithm = "count.py"\n', "utf-8")


def summary() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path("runs/run/summary.json").read_bytes())
    return found


def test_run_writes_the_runs_folder_and_prints_its_summary(tmp_path: Path) -> None:
    shown = done("run", "count.toml", "steps=3")
    assert "step 3/3" in shown.err
    assert "exact_match_after  0.5" in shown.out
    found = summary()
    assert (found["status"], found["steps"], found["last_reward"]) == ("finished", 3, 1.0)
    resolved = config_of("runs/run")
    assert (resolved["algorithm"], resolved["steps"], resolved["run"]["seed"]) == (f"{tmp_path}/count.py", 3, 0)


def test_a_users_error_has_no_traceback_and_a_bug_the_lines_of_the_script_or_the_rank(tmp_path: Path) -> None:
    page = f"{tmp_path}/count.py"
    for then, told, source in (
        ("fail", "the data is [bad]", 'raise DataError("the data is [bad]")'),
        ("column", "the batch has no column `advantage`", 'Batch.of(prompt=["1"])["advantage"]'),
    ):
        found = refused("run", "count.toml", f"then={then}")
        line = 1 + [each.strip() for each in SCRIPT.splitlines()].index(source)
        assert f"error: {told}" in found
        assert found.endswith(f" ({page}, line {line})")
        assert summary()["status"] == "failed"
    err = type_in("run", "count.toml", "then=bug").err
    lines = [("count", "wrong(config.then)"), ("wrong", 'json.loads("{")')]
    assert re.findall(r'File "(.+)", line \d+, in (\w+)\n +(.+)', err) == [(page, *line) for line in lines]
    assert err.splitlines()[-1].startswith("JSONDecodeError: ")
    status, _, err = type_in("run", "count.toml", "then=break")
    assert (status, 'raise ValueError("a bug")' in err, "ValueError: a bug" in err) == (1, True, True)


@pytest.mark.process
def test_sigterm_ends_a_run_cleanly() -> None:
    command = [*COMMAND, "run", "count.toml", "then=terminate", "run.checkpoint_every=1"]
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[2])}
    ended = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    assert (ended.returncode, "Traceback" in ended.stderr) == (143, False)
    assert "Interrupted. What was recorded so far is in runs/run\n" in ended.stderr
    told = "To continue from its newest checkpoint: meshrl run runs/run/config.toml run.resume=true\n"
    assert ended.stderr.endswith(told)
    assert summary()["status"] == "interrupted"
    assert b'"what":"nothing"' in Path("runs/run/events.jsonl").read_bytes()


def test_simulate_takes_the_steps_that_are_asked_for() -> None:
    command = ("simulate", "count.toml", "--rollout", "1", "--train", "1", "--json", "forecast.json")
    for arguments, steps in (((), 4), (("steps=12",), 12), (("steps=12", "--steps", "15"), 15)):
        assert "step time, mean" in done(*command, *arguments).out
        assert json.loads(Path("forecast.json").read_bytes())["steps"] == steps


def test_a_script_that_cannot_be_used_and_one_with_postponed_annotations(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    reserved = "from meshrl.config import Config\nclass C(Config):\n    run: int\nasync def script(run, config: C): ..."
    for text, message in {
        "def script(run, config): ...": "'script' is not an async function; it needs",
        reserved: "C.run: the key 'run' is reserved by meshrl: rename it",
        "async def script(run, config: 'Missing'): ...": "cannot be resolved: name 'Missing' is not defined",
        "def script(:": "failed: SyntaxError: ",
    }.items():
        path.write_text(text, "utf-8")
        with pytest.raises(MeshrlError) as caught:
            load_script(path)
        assert str(caught.value).startswith(f"algorithm {path}: ")
        assert message in str(caught.value)
    path.write_text("from __future__ import annotations\n" + SCRIPT.replace("count", "script"), "utf-8")
    assert load_script(path).schema.__name__ == "CountConfig"


def test_a_closed_pipe_does_not_end_who_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    stderr = os.fdopen(writes, "w", buffering=1)
    monkeypatch.setattr(sys, "stderr", stderr)
    with pytest.raises(BrokenPipeError):
        print("nobody reads it", file=stderr)
    log.info("one")
    log.warning("two")
    with suppress(BrokenPipeError):
        stderr.close()
