"""Where paths start: in a file at its folder, on the command line where one stands."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from meshrl.run import RunConfig, find_config, load_job
from tests.first_hour.terminal import Terminal

FAKES = """
policy = { backend = "fake", model = "models/start" }
sampler.backend = "fake"
reference.backend = "fake"
sampling.max_tokens = 4
prompts = 2
steps = 2
"""
TASK = '{"question": "1+1=", "answer": "2"}\n{"question": "1+2=", "answer": "3"}\n'
REWARD = "def score(prompt, completion, row):\n    return float(completion == row['answer'])\n"


def make_project(folder: Path) -> Path:
    """A folder with a configuration, and beside that its task, its reward and its script."""
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "sums.jsonl").write_text(TASK, "utf-8")
    (folder / "reward.py").write_text(REWARD, "utf-8")
    (folder / "models" / "start").mkdir(parents=True)
    grpo = Path(__file__).parents[2] / "algorithms" / "grpo.py"
    (folder / "mine.py").write_text(grpo.read_text("utf-8").replace("async def grpo", "async def mine"), "utf-8")
    own = 'task = { source = "data/sums.jsonl", held_out = 0 }\nreward.function = "reward.py:score"\n'
    (folder / "mine.toml").write_text(f'algorithm = "mine.py"\n{FAKES}{own}run.name = "mine"\n', "utf-8")
    return folder


def resolved(run: Path) -> dict[str, Any]:
    return tomllib.loads((run / "config.toml").read_text("utf-8"))


def test_a_configuration_runs_from_anywhere(
    terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = make_project(tmp_path / "mine")
    assert terminal("run", "mine/mine.toml")[0] == 0
    table = resolved(tmp_path / "runs" / "mine")
    assert table["algorithm"] == str(mine / "mine.py")
    assert table["task"]["source"] == str(mine / "data" / "sums.jsonl")
    assert table["reward"]["function"] == f"{mine / 'reward.py'}:score"
    assert table["policy"]["model"] == table["sampler"]["model"] == str(mine / "models" / "start")

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert terminal("run", "../runs/mine/config.toml")[0] == 0
    # What a run recorded is run where it was: the earlier one makes room.
    assert table["run"]["folder"] == str(tmp_path / "runs")
    assert resolved(tmp_path / "runs" / "mine") == resolved(tmp_path / "runs" / "mine-1") == table
    assert not list(elsewhere.iterdir())
    # A configuration of one's own is run where one stands.
    assert terminal("run", "../mine/mine.toml")[0] == 0
    assert resolved(elsewhere / "runs" / "mine") == table | {"run": table["run"] | {"folder": f"{elsewhere}/runs"}}


def test_a_value_of_the_command_line_starts_where_one_stands(terminal: Terminal, tmp_path: Path) -> None:
    make_project(tmp_path / "mine")
    (tmp_path / "other.jsonl").write_text(TASK, "utf-8")
    (tmp_path / "other.py").write_text(REWARD, "utf-8")
    given = ("task.source=other.jsonl", "reward={functions = {half = 'other.py:score'}}")
    assert terminal("run", "mine/mine.toml", *given)[0] == 0
    table = resolved(tmp_path / "runs" / "mine")
    assert table["task"]["source"] == str(tmp_path / "other.jsonl")
    assert table["reward"]["functions"] == {"half": f"{tmp_path / 'other.py'}:score"}
    assert table["policy"]["model"] == str(tmp_path / "mine" / "models" / "start")
    assert terminal("run", "mine/mine.toml", "algorithm=mine/mine.py", "run.name=again")[0] == 0


def test_a_file_that_is_at_the_other_root_is_told(terminal: Terminal, tmp_path: Path) -> None:
    make_project(tmp_path / "mine")
    (tmp_path / "mine" / "data").rename(tmp_path / "data")
    (tmp_path / "mine" / "models").rename(tmp_path / "models")

    def moved(file: str) -> str:
        return f"there is no {tmp_path}/mine/{file}, but there is {tmp_path}/{file}"

    status, _, err = terminal("run", "mine/mine.toml", "reward.function=reward.py:score")
    assert status == 1
    in_a_file = "paths in a file start at its folder: write"
    typed = "paths on the command line start at the current folder: write"
    at_the_file = f"there is no {tmp_path}/reward.py, but there is {tmp_path}/mine/reward.py"
    assert [line.strip() for line in err.splitlines()] == [
        "error: 3 mistakes:",
        f"mine/mine.toml: policy.model = 'models/start': {moved('models/start')}: {in_a_file} ../models/start",
        f"mine/mine.toml: task.source = 'data/sums.jsonl': {moved('data/sums.jsonl')}: {in_a_file} ../data/sums.jsonl",
        f"command line: reward.function = 'reward.py:score': {at_the_file}: {typed} mine/reward.py",
    ]
    assert not (tmp_path / "runs").exists()
    told = ("policy.model=models/start", "task.source=data/sums.jsonl", "reward.function=mine/reward.py:score")
    assert terminal("run", "mine/mine.toml", *told)[0] == 0


def test_the_paths_of_a_shipped_configuration_start_where_one_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    table = load_job(find_config("grpo/quickstart"), ["task.source=sums.jsonl", "task.options={}"], RunConfig).resolved
    assert f"'model': '{tmp_path}/runs/quickstart-sft/model'" in str(table["policy"])
    assert f"'source': '{tmp_path}/sums.jsonl'" in str(table["task"])
    assert table["algorithm"] == "grpo"


def test_a_name_is_no_path_and_a_folder_of_the_form_of_a_name_is_one(tmp_path: Path) -> None:
    def read(*overrides: str) -> str:
        return str(load_job(project / "mine.toml", overrides, RunConfig).resolved)

    project = make_project(tmp_path / "mine")
    for key, names in {
        "policy.model": ("ORG/NAME", "ORG/NAME@v1.0", "package:llm/model.gguf"),
        "task.source": ("reasoning_gym:spell_backward",),
        "reward.function": ("exact_match", "package.module:name"),
    }.items():
        for name in names:
            assert f"'{key.partition('.')[2]}': '{name}'" in read(f"{key}={name}")
    assert f"'model': '{project}/models/start'" in read()


def test_each_kind_of_path_starts_at_the_file(terminal: Terminal, tmp_path: Path) -> None:
    mine = make_project(tmp_path / "mine")
    own = """
        task.source = "data/sums.parquet"
        environment.source = "reward:reward.py:score"
        run.replay = "earlier"
        sampler.vllm.python = "venv/bin/python"
    """
    (mine / "mine.toml").write_text(f'algorithm = "multiturn"\n{FAKES}{own}', "utf-8")
    job = load_job(Path("mine/mine.toml"), [], RunConfig)
    assert job.run.replay == f"{mine}/earlier"
    for path in (f"{mine}/data/sums.parquet", f"{mine}/venv/bin/python", f"reward:{mine}/reward.py:score"):
        assert f"'{path}'" in str(job.resolved)
    found = load_job(Path("mine/mine.toml"), ["sampler.vllm.python=python3"], RunConfig)
    assert "'python': 'python3'" in str(found.resolved)


def test_what_a_run_recorded_is_judged_where_one_stands(terminal: Terminal, tmp_path: Path) -> None:
    make_project(tmp_path / "mine")
    assert terminal("run", "mine/mine.toml")[0] == 0
    status, _, err = terminal("eval", "runs/mine", "nowhere.jsonl")
    assert status == 1
    assert f"task source '{tmp_path}/nowhere.jsonl': there is no file" in err
    for task in ("mine/data/sums.jsonl", "mine/mine.toml"):
        status, _, err = terminal("eval", "runs/mine", task)
        assert status == 1
        assert "has neither a model" in err


def test_a_run_goes_on_from_anywhere_or_says_that_it_has_no_checkpoint(
    terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_project(tmp_path / "mine")
    assert terminal("run", "mine/mine.toml").status == 0
    anew = "there is no checkpoint in runs/mine: the run starts from the beginning"
    told = f"{anew}; set run.checkpoint_every = 50 to resume later runs"
    assert told in terminal("run", "mine/mine.toml", "run.resume=true").err
    assert f"{anew}\n" in terminal("run", "mine/mine.toml", "run.resume=true", "run.checkpoint_every=9").err

    keeps = ("run.name=kept", "run.checkpoint_every=1", "run.resume=true")
    warning = "run.resume = true, but there is no checkpoint in"
    assert warning not in terminal("run", "mine/mine.toml", *keeps).err
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    status, _, err = terminal("run", "../runs/kept/config.toml", "run.resume=true", "steps=3")
    assert (status, warning in err) == (0, False)
    assert f"{tmp_path}/runs/kept continues after step 2 of 3" in err
    assert len((tmp_path / "runs" / "kept" / "metrics.jsonl").read_bytes().splitlines()) == 3
