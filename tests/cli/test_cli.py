"""The command line, from the files that a user writes to what it prints."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import msgspec
import pytest

from meshrl import cli
from meshrl.config import Config
from meshrl.errors import MeshrlError
from meshrl.roles import RoleConfig
from meshrl.run import find_mistakes
from meshrl.run.jobs import load_script
from tests.first_hour.terminal import COMMAND, Terminal, type_in

SCRIPT = '''
"""Counts."""

import asyncio
import signal
from meshrl import Actor, Config, DataError, Metrics, Run
from meshrl.events import waiting


class CountConfig(Config):
    steps: int = 2
    fail: bool = False
    bug: bool = False
    terminate: bool = False


class Broken(Actor):
    def __init__(self) -> None:
        raise ValueError("a bug")


async def count(run: Run, config: CountConfig) -> None:
    async for step in run.steps(config.steps):
        await run.record(Metrics.of(loss=(1.0, 2.0)), reward=step / 2)
    if config.fail:
        raise DataError("the data is [bad]")
    if config.bug:
        await (await run.mesh(1)).spawn(Broken)
    if config.terminate:
        with waiting("the script", "nothing", "itself"):
            signal.raise_signal(signal.SIGTERM)
            await asyncio.Event().wait()
    run.summary(exact_match_after=0.5)
'''

TINY = "characters = 'act>', hidden_size = 8, ffn_size = 8, layers = 1, heads = 2, max_tokens = 16"

FAKES = """algorithm = "grpo"
task = { source = "data.jsonl", held_out = 0 }
policy = { backend = "fake", model = "none" }
sampler = { backend = "fake", model = "none" }
"""


@pytest.fixture
def meshrl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Run the command in a folder of its own, which has a file of data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "data.jsonl").write_text('{"question": "q", "answer": "a"}\n', "utf-8")
    return type_in


def write(folder: Path, config: str = "") -> None:
    (folder / "count.py").write_text(SCRIPT, "utf-8")
    (folder / "count.toml").write_text(f'# Counts.\nalgorithm = "count.py"\n{config}\n', "utf-8")


def test_run_writes_the_runs_folder_and_prints_its_summary(meshrl: Terminal, tmp_path: Path) -> None:
    write(tmp_path, '[run]\nname = "mine"')
    status, out, err = meshrl("run", "count.toml", "steps=3")
    assert status == 0
    assert "step 3/3" in err
    assert "exact_match_after  0.5" in out
    folder = tmp_path / "runs" / "mine"
    summary = msgspec.json.decode((folder / "summary.json").read_bytes(), type=dict[str, object])
    assert (summary["status"], summary["steps"], summary["last_reward"]) == ("finished", 3, 1.0)
    resolved = tomllib.loads((folder / "config.toml").read_text("utf-8"))
    assert (resolved["algorithm"], resolved["steps"], resolved["run"]["seed"]) == (str(tmp_path / "count.py"), 3, 0)


def test_an_error_of_the_users_is_told_without_a_traceback(meshrl: Terminal, tmp_path: Path) -> None:
    write(tmp_path)
    status, _, err = meshrl("run", "count.toml", "fail=true")
    assert status == 1
    assert re.search(rf"error: the data is \[bad\]\n\({tmp_path}/count\.py, line \d+\)\n$", err)
    assert "Traceback" not in err
    assert b'"failed"' in (tmp_path / "runs" / "run" / "summary.json").read_bytes()


def test_a_bug_on_a_rank_is_told_with_the_ranks_own_lines(meshrl: Terminal, tmp_path: Path) -> None:
    write(tmp_path)
    status, _, err = meshrl("run", "count.toml", "bug=true")
    assert status == 1
    assert 'raise ValueError("a bug")' in err
    assert "ValueError: a bug" in err


@pytest.mark.process
def test_sigterm_ends_a_run_cleanly(tmp_path: Path) -> None:
    write(tmp_path)
    command = [*COMMAND, "run", "count.toml", "terminate=true", "run.checkpoint_every=1"]
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[2])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 143
    assert "Interrupted. What was recorded so far is in runs/run\n" in done.stderr
    told = "To continue from its newest checkpoint: meshrl run runs/run/config.toml run.resume=true\n"
    assert done.stderr.endswith(told)
    assert "Traceback" not in done.stderr
    assert b'"interrupted"' in (tmp_path / "runs" / "run" / "summary.json").read_bytes()
    assert b'"what":"nothing"' in (tmp_path / "runs" / "run" / "events.jsonl").read_bytes()


def test_simulate_takes_the_steps_that_are_asked_for(meshrl: Terminal, tmp_path: Path) -> None:
    write(tmp_path, "steps = 9")
    for arguments, steps in (((), 9), (("steps=12",), 12), (("steps=12", "--steps", "15"), 15)):
        found = meshrl(
            "simulate", "count.toml", *arguments, "--rollout", "1", "--train", "1", "--json", "forecast.json"
        )
        assert found.status == 0
        assert msgspec.json.decode(Path("forecast.json").read_bytes(), type=dict[str, object])["steps"] == steps


def test_a_script_that_cannot_be_used_and_one_with_postponed_annotations(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    reserved = "from meshrl import Config\nclass C(Config):\n    run: int\nasync def script(run, config: C): ..."
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
    path = tmp_path / "count.py"
    path.write_text("from __future__ import annotations\n" + SCRIPT, "utf-8")
    assert load_script(path).schema.__name__ == "CountConfig"


def test_check_and_run_tell_all_that_is_wrong_before_a_model_loads(meshrl: Terminal, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        """
        algorithm = "grpo"
        task = { source = "data.jsonl", prompt = "{questoin}" }
        policy = { model = "no/such/folder", backend = "fake" }
        sampler = { model = "no/other/folder", backend = "functoin" }
        reward = { function = "exact_mach" }
        reference = { model = "no/such/model.gguf", backend = "function" }
        run.meshes.mian = { ranks = 2 }
        """,
        "utf-8",
    )
    status, _, err = meshrl("check", "mine.toml")
    assert status == 1
    assert meshrl("run", "mine.toml") == (status, "", err)
    assert not (tmp_path / "runs").exists()
    found = err.splitlines()
    assert found[0] == "error: 7 mistakes:"
    for line, expected in zip(
        found[1:],
        [
            f"mine.toml: task: {tmp_path}/data.jsonl, line 1: prompt: the template '{{questoin}}' needs 'questoin', ",
            "mine.toml: sampler: no backend 'functoin' is installed: did you mean 'function'?",
            f"mine.toml: sampler: model '{tmp_path}/no/other/folder': there is no folder {tmp_path}",
            "mine.toml: reward: reward function 'exact_mach': ",
            "mine.toml: reference: backend 'function' has no Reference: it has Environment, Reward",
            f"mine.toml: reference: model '{tmp_path}/no/such/model.gguf': there is no file {tmp_path}",
            "mine.toml: run.meshes.mian: no role has `mesh = 'mian'`; did you mean 'main'?",
        ],
        strict=True,
    ):
        assert line.strip().startswith(expected)


def test_check_asks_for_the_packages_of_a_reference_that_is_read(
    meshrl: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [name for name in sys.modules if name.startswith(("meshrl_torch.", "meshrl_hf."))]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "torch", None)  # as if it was not installed
    model = f"prompts = 1\nreward.function = 'exact_match'\nreference.model = {{ {TINY} }}"
    (tmp_path / "mine.toml").write_text(FAKES + model, "utf-8")
    assert meshrl("check", "mine.toml") == (0, "mine.toml: no mistakes found\n", "")
    status, _, err = meshrl("check", "mine.toml", "loss.kl=0.1")
    assert status == 1
    assert "mine.toml: reference: backend 'torch' needs the package 'torch', which is not installed" in err


def test_check_of_a_reward_that_holds_a_model(meshrl: Terminal, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(FAKES + "reference.backend = 'fake'\nreward = { model = 'judge' }", "utf-8")
    status, _, err = meshrl("check", "mine.toml", "reward.backend=sft")
    assert status == 1
    there = "fake, fsdp, function, http, megatron, sglang, sim, torch, vllm"
    assert [line.strip() for line in err.splitlines()[1:]] == [
        f"command line: reward: no backend 'sft' is installed: There are {there}",
        f"mine.toml: reward: model '{tmp_path / 'judge'}': there is no folder {tmp_path / 'judge'}",
    ]
    assert meshrl("check", "mine.toml", "reward.backend=fake")[0] == 0
    (tmp_path / "judge").mkdir()
    assert "has no config.json, so it is not the folder of a model" in meshrl("check", "mine.toml").err
    (tmp_path / "judge" / "config.json").touch()
    for backend in ("torch", "fsdp"):
        assert meshrl("check", "mine.toml", f"reward.backend={backend}")[0] == 0


def test_check_of_a_role_of_ones_own() -> None:
    class Judge(RoleConfig):
        pass

    class Whole(Config):
        judge: Judge = Judge()

    assert find_mistakes(Whole(judge=Judge(backend="function"))) == []
    (mistake,) = find_mistakes(Whole(judge=Judge(backend="zzz")))
    assert mistake.startswith("judge: no backend 'zzz' is installed: there are ")
