"""Settings as people write them: homes and variables in paths, keys to remove, variables that ranks need."""

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import meshrl as rl
from meshrl.agents import Agent, AgentConfig
from meshrl.cli import app
from meshrl.config import load_toml
from meshrl.engines import ranks
from meshrl.errors import ConfigError, described
from meshrl.run import load_job
from meshrl.tasks import user_worker
from meshrl.tasks.function import boundary, load_function
from tests.agents.talks import served

FAKE = '{ backend = "fake", model = "none" }'
FILE = f"""
algorithm = "grpo"
run.name = "mine"
evaluation.every = 2
task.source = "meshrl:spell_backward"
task.options = {{ min_word_len = 3, max_word_len = 8, size = 60 }}
task.prompt = "{{word}}>"
task.held_out = 3
policy = {FAKE}
sampler = {FAKE}
reward = {FAKE}
sampling = {{ top_p = 0.9, max_tokens = 10 }}
loss.clip = 0.2
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in {"HOME": f"{tmp_path}/home", "SCRATCH": f"{tmp_path}/scratch", "RUNS": "$SCRATCH"}.items():
        monkeypatch.setenv(name, value)
    for folder in "home", "scratch", "here":
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "rows.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n')
        (tmp_path / folder / "judge.py").write_text("def judge(prompt, completion, row):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "mine.toml").write_text(FILE)
    return tmp_path / "mine.toml"


@pytest.mark.parametrize(("start", "folder"), [("~", "home"), ("$SCRATCH", "scratch"), ("${SCRATCH}", "scratch")])
def test_a_path_may_start_at_home_or_at_a_variable(start: str, folder: str, file: Path) -> None:
    written = [f"run.folder={start}/runs", f"task.source={start}/rows.jsonl", f"reward.function={start}/judge.py:judge"]
    job = load_job(file, ["~task.options", "~reward", *written])
    place = file.parent / folder
    resolved = str(job.resolved)
    assert job.run.folder == str(place / "runs")
    assert f"'{place}/rows.jsonl'" in resolved
    assert f"'{place}/judge.py:judge'" in resolved
    assert rl.RunConfig(folder=f"{start}/runs").folder == str(place / "runs"), "also in Python"


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ("run.folder=$ABSENT/runs", r"\$ABSENT is not set in the environment"),
        ("run.folder=${ABSENT}", r"\$\{ABSENT\} is not set in the environment"),
        ("run.replay=$RUNS/x", r"\$SCRATCH is not set"),
        ("task.source=~nobody-here/rows.jsonl", "the home folder of ~nobody-here is not known"),
        ('run.log=["$ABSENT/log.py:Log"]', r"\$ABSENT is not set"),
    ],
)
def test_a_path_of_an_unknown_home_is_refused(
    written: str, says: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "RUNS" in written:
        monkeypatch.setenv("RUNS", "$SCRATCH")
        monkeypatch.delenv("SCRATCH")
    with pytest.raises(ConfigError, match=rf"^command line: {re.escape(written.partition('=')[0])}.* = .*{says}"):
        load_job(file, [written])


def test_a_file_whose_name_has_a_dollar_sign_is_itself(file: Path) -> None:
    (file.parent / "here" / "$5.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n')
    job = load_job(file, ["~task.options", "task.source=$5.jsonl"])
    assert f"{file.parent}/here/$5.jsonl" in str(job.resolved)


@pytest.mark.parametrize(
    "keys", [("evaluation",), ("sampling.top_p",), ("run", "task.options.size"), ("task.options",)]
)
def test_keys_and_tables_are_removed(keys: tuple[str, ...], file: Path) -> None:
    wanted: Any = tomllib.loads(FILE)
    for key in keys:
        *above, last = key.split(".")
        table = wanted
        for each in above:
            table = table[each]
        del table[last]
    assert load_toml(file, [f"~{key}" for key in keys]) == wanted


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("~evaluatoin", "evaluatoin is not set, so it cannot be removed; did you mean ~evaluation?"),
        ("~sampling.top_k", "sampling.top_k is not set, so it cannot be removed; did you mean ~sampling.top_p?"),
        ("~evaluation=1", "evaluation is not set"),
        ("~algorithm.name", "algorithm.name is not set"),
        ("~", "cannot be removed; write ~key.sub"),
    ],
)
def test_what_cannot_be_removed_is_named(override: str, says: str, file: Path) -> None:
    with pytest.raises(ConfigError, match=f"^command line: .*{re.escape(says)}"):
        load_toml(file, [override])


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("evaluation=false", "a table"),
        ("evaluation=none", "a table"),
        ("sampling.top_p=null", "a number"),
        ("run.meshes=None", "a table"),
        ("sampling.max_tokens=''", "a whole number"),
    ],
)
def test_what_is_written_to_unset_a_key_is_answered_with_the_spelling_that_does(
    override: str, wanted: str, file: Path
) -> None:
    key = override.partition("=")[0]
    with pytest.raises(ConfigError, match=rf"command line: {key} = .*: must be {wanted}; to unset it, write '~{key}'"):
        load_job(file, [override])


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("task=false", "a table"),
        ("policy.model=false", "text in quotes, or must be a table"),
        ("run.environment=[false]", "text in quotes"),
    ],
)
def test_a_key_that_is_needed_is_not_to_be_unset(override: str, wanted: str, file: Path) -> None:
    with pytest.raises(ConfigError, match=rf"command line: .* = .*: must be {wanted}$"):
        load_job(file, [override])


def test_the_command_line_takes_several_removals(file: Path) -> None:
    shown = CliRunner().invoke(app, ["check", str(file), "~evaluation", "~run.name", "steps=2"])
    assert "no mistakes found" in shown.output, shown.output


JUDGES = """\
import os
def looks_up(prompt, completion, row):
    return float(os.environ["ABSENT_KEY"])
def pops(prompt, completion, row):
    return float(os.environ.pop("ABSENT_KEY"))
def reads_bytes(prompt, completion, row):
    return float(os.environb[b"ABSENT_KEY"])
def deletes(prompt, completion, row):
    del os.environ["ABSENT_KEY"]
    return 1.0
def misses(prompt, completion, row):
    return row["ABSENT_KEY"]
"""


@pytest.mark.parametrize("name", ["looks_up", "pops", "reads_bytes", "deletes", "misses"])
async def test_a_variable_that_a_rank_lacks_is_told_with_what_to_do(name: str, tmp_path: Path) -> None:
    (tmp_path / "judges.py").write_text(JUDGES)
    judge = load_function(f"{tmp_path}/judges.py:{name}")
    _, error = await boundary(judge, "", "", {})
    assert error is not None
    for text in described(error), ranks.reason_and_traceback(error)[0], *user_worker.raised(error)[2:3]:
        assert "ABSENT_KEY" in text
        assert ("run.environment" in text) == (name != "misses"), text


DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "NEURON_RT_VISIBLE_CORES", "RAY_AUTH_TOKEN", "RAY_ADDRESS")


class Started(Exception):
    """With what an engine would be made."""


def test_names_of_variables_are_checked_where_the_run_starts(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    for name in DEVICES:
        monkeypatch.setenv(name, "0,1")
    unset = "ROCR_VISIBLE_DEVICES", "RAY_NAMESPACE"
    for name in unset:
        monkeypatch.delenv(name, raising=False)
    for name in "CUDA_HOME", "HIP_PLATFORM":
        monkeypatch.setenv(name, "x")

    def start(*given: object) -> None:
        raise Started(given[-1])

    monkeypatch.setattr("meshrl.run.engine.make_engine", start)
    for names, wanted in {
        ("JUDGE_KEY",): {"JUDGE_KEY": "secret"},
        ("JUDGE_*", "SCRATCH"): {"JUDGE_KEY": "secret", "SCRATCH": f"{file.parent}/scratch"},
        ("HARBOR_NONE_*",): {},
        ("CUDA_*", "HIP_*", "RAY_*", "NEURON_*"): {"CUDA_HOME": "x", "HIP_PLATFORM": "x"},
    }.items():
        with pytest.raises(Started) as started:
            rl.Run(rl.RunConfig(environment=[*names]))
        assert started.value.args == (wanted,)
    with pytest.raises(ConfigError, match=r"run\.environment names ABSENT_KEY, which .* lacks"):
        rl.Run(rl.RunConfig(environment=["JUDGE_KEY", "ABSENT_KEY"]))
    for name in *DEVICES, *unset:
        rays = name.startswith("RAY_")
        why = (
            "and Ray's own variables belong to the cluster" if rays else "which the engine sets for each rank: .*`gpus`"
        )
        with pytest.raises(ConfigError, match=rf"run\.environment names {name}, {why}") as caught:
            rl.Run(rl.RunConfig(environment=["JUDGE_KEY", name]))
        assert ("gpus" in str(caught.value)) != rays
    with pytest.raises(ConfigError, match=r"run.environment\[0\] = 'JUDGE_KEY=secret'"):
        load_job(file, ['run.environment=["JUDGE_KEY=secret"]'])


@pytest.mark.process
async def test_a_program_of_an_agent_does_not_get_the_token_of_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    monkeypatch.setenv("JUDGE_KEY", "own")
    program = "import os; print(float((os.environ['JUDGE_KEY'], os.environ.get('RAY_AUTH_TOKEN')) == ('own', None)))"
    assert (await served(Agent(AgentConfig(command=(sys.executable, "-c", program))))).reward == 1.0
