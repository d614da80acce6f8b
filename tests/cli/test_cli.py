"""The command line, from the files that a user writes to what it prints."""

import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import msgspec
import pytest

from meshrl import cli
from meshrl.config import Config
from meshrl.errors import MeshrlError, ModelError
from meshrl.roles import PolicyConfig, RoleConfig
from meshrl.run import about, find_mistakes, shipped_configs
from meshrl.run.check_model import check_model
from meshrl.run.jobs import load_script, shipped
from tests.first_hour.terminal import Terminal, type_in

SCRIPT = '''
"""Counts."""

import asyncio
from meshrl import Config, DataError, Metrics, Run
from meshrl.events import waiting


class CountConfig(Config):
    steps: int = 2
    fail: bool = False
    wait: bool = False


async def count(run: Run, config: CountConfig) -> None:
    async for step in run.steps(config.steps):
        await run.record(Metrics.of(loss=(1.0, 2.0)), reward=step / 2)
    if config.fail:
        raise DataError("the data is [bad]")
    if config.wait:
        with waiting("the script", "nothing", "itself"):
            print("waiting", flush=True)
            await asyncio.sleep(3600)
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


def write(folder: Path, config: str = "", script: str = SCRIPT) -> None:
    (folder / "count.py").write_text(script, "utf-8")
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


def test_an_error_of_the_users_is_told_without_a_traceback_and_a_bug_with_its_own_lines(
    meshrl: Terminal, tmp_path: Path
) -> None:
    write(tmp_path)
    status, _, err = meshrl("run", "count.toml", "fail=true")
    assert status == 1
    assert re.search(rf"error: the data is \[bad\]\n\({tmp_path}/count\.py, line \d+\)\n$", err)
    assert "Traceback" not in err
    assert b'"failed"' in (tmp_path / "runs" / "run" / "summary.json").read_bytes()
    write(tmp_path, script=SCRIPT.replace("DataError(", "ZeroDivisionError("))
    status, _, err = meshrl("run", "count.toml", "fail=true")
    assert status == 1
    assert err.count('  File "') == err.count("count.py") == 1
    assert err.endswith("ZeroDivisionError: the data is [bad]\n")


ON_A_RANK = """
from meshrl import Actor, Config, ModelError, Run


class CountConfig(Config):
    bug: bool = False


class Broken(Actor):
    def __init__(self, bug: bool) -> None:
        raise ValueError("a bug") if bug else ModelError("there is no folder x")


async def count(run: Run, config: CountConfig) -> None:
    await (await run.mesh(1)).spawn(Broken, config.bug)
"""


def test_an_error_that_a_rank_raised_on_purpose_is_told_without_its_traceback(meshrl: Terminal, tmp_path: Path) -> None:
    write(tmp_path, script=ON_A_RANK)
    status, _, err = meshrl("run", "count.toml")
    assert status == 1
    assert "error: there is no folder x\n(in Broken.__init__ on rank 0)\n" in err
    assert "Traceback" not in err
    status, _, err = meshrl("run", "count.toml", "bug=true")
    assert status == 1
    assert 'raise ValueError("a bug") if bug' in err, "the rank's own lines are told"
    assert "ValueError: a bug" in err


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"])
def test_a_signal_ends_a_run_cleanly(tmp_path: Path, number: signal.Signals, status: int) -> None:
    write(tmp_path)
    # Whoever runs the tests in the background may have them ignore interrupts, and their children too.
    code = "import signal; signal.signal(2, signal.default_int_handler); from meshrl.cli import main; main()"
    command = [sys.executable, "-c", code, "run", "count.toml", "wait=true", "run.checkpoint_every=1"]
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[2])}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(number)
        _, err = process.communicate()
    assert process.returncode == status
    assert "Interrupted. What was recorded so far is in runs/run\n" in err
    assert err.endswith("To continue from its newest checkpoint: meshrl run runs/run/config.toml run.resume=true\n")
    assert "Traceback" not in err
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


def test_all_mistakes_of_the_file_are_told_at_once(meshrl: Terminal, tmp_path: Path) -> None:
    write(tmp_path, "stepps = 3\nfail = 1\n[run]\nnam = 'mine'\n[runn]")
    status, _, err = meshrl("run", "count.toml", "steps=x")
    assert status == 1
    assert err.splitlines() == [
        "error: 5 mistakes:",
        "  command line: steps = 'x': must be a whole number",
        "  count.toml: fail = 1: must be true or false",
        "  count.toml: run.nam: no such key; did you mean run.name?",
        "  count.toml: stepps: no such key; did you mean steps?",
        "  count.toml: runn: no such key; did you mean run?",
    ]
    assert not (tmp_path / "runs").exists()


def test_what_is_not_there(meshrl: Terminal, tmp_path: Path) -> None:
    write(tmp_path)
    cases: list[tuple[tuple[str, ...], str]] = [
        (("cuont.toml",), "error: cuont.toml: no such file; did you mean count.toml?"),
        (("zzzzz",), "zzzzz: no such file or shipped configuration; the shipped ones are agent/quickstart, "),
        (("count.toml", "algorithm=other.py"), "count.toml: algorithm = 'other.py': there is no file /"),
        (("count.toml", "algorithm=3"), 'algorithm is missing: write algorithm = "NAME" (of '),
    ]
    for arguments, message in cases:
        for command in ("run", "check"):
            status, _, err = meshrl(command, *arguments)
            assert (status, "Traceback" in err) == (1, False)
            assert message in err
    assert meshrl("rnu", "x").status == 2


def test_a_script_that_cannot_be_used(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    reserved = "from meshrl import Config\nclass C(Config):\n    run: int\nasync def script(run, config: C): ..."
    for text, message in {
        "def script(run, config): ...": "'script' is not an async function; it needs",
        "async def script(run): ...": "script(run) has no config parameter that is a Config",
        reserved: "C.run: the key 'run' is reserved by meshrl: rename it",
        "async def script(run, config: 'Missing'): ...": "cannot be resolved: name 'Missing' is not defined",
        "def script(:": "failed: SyntaxError: ",
    }.items():
        path.write_text(text, "utf-8")
        with pytest.raises(MeshrlError) as caught:
            load_script(path)
        assert str(caught.value).startswith(f"algorithm {path}: ")
        assert message in str(caught.value)


def test_a_script_with_postponed_annotations(tmp_path: Path) -> None:
    path = tmp_path / "count.py"
    path.write_text("from __future__ import annotations\n" + SCRIPT.replace('"""Counts."""', ""), "utf-8")
    assert load_script(path).schema.__name__ == "CountConfig"


def test_new_copies_a_script_and_a_configuration(meshrl: Terminal, tmp_path: Path) -> None:
    status, out, _ = meshrl("new", "sft", "mine")
    assert status == 0
    assert out.splitlines() == [
        *(f"wrote {Path('mine', name)}" for name in ("sft.py", "config.toml", "task.jsonl")),
        f"run it with: meshrl run {Path('mine', 'config.toml')}",
    ]
    assert (tmp_path / "mine" / "sft.py").read_bytes() == (shipped("algorithms") / "sft.py").read_bytes()
    original = tomllib.loads(shipped_configs()["sft/quickstart"].read_text("utf-8"))
    copied = tomllib.loads((tmp_path / "mine" / "config.toml").read_text("utf-8"))
    own = {"algorithm": "sft.py", "run": {**original["run"], "name": "mine"}, "task": copied["task"]}
    assert copied == {**original, **own}

    status, _, err = meshrl("new", "grop", ".")
    assert (status, err) == (1, "error: no algorithm 'grop' is shipped; did you mean 'grpo'?\n")
    assert {path.name for path in tmp_path.iterdir()} == {"data.jsonl", "mine"}


def test_configs_lists_each_with_its_first_line(meshrl: Terminal) -> None:
    status, out, _ = meshrl("configs")
    assert status == 0
    for name, path in shipped_configs().items():
        assert name in out
        assert about(path) in out


def test_check_finds_all_that_is_wrong_before_a_model_loads(meshrl: Terminal, tmp_path: Path) -> None:
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


def test_where_a_model_may_be(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ModelError, match=r"has no config\.json, so it is not the folder of a model"):
        check_model(str(tmp_path / "model"))
    (tmp_path / "model" / "config.json").touch()
    check_model(str(tmp_path / "model"))
    check_model(str(tmp_path / "model.gguf"))
    assert PolicyConfig(model=str(tmp_path / "model")).backend == "torch"
