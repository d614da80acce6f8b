from pathlib import Path

import pytest

from meshrl.run import find_config, load_job
from tests.first_hour.terminal import config_of, done, refused

FAKES = """
policy = { backend = "fake", model = "models/start" }
sampler.backend = "fake"
reference.backend = "fake"
sampling.max_tokens = 4
prompts = 2
steps = 2
run.name = "mine"
"""
OWN = 'task = { source = "data/sums.jsonl", held_out = 0 }\nreward.function = "reward.py:score"\n'
TASK = '{"question": "1+1=", "answer": "2"}\n{"question": "1+2=", "answer": "3"}\n'
REWARD = "def score(prompt, completion, row):\n    return float(completion == row['answer'])\n"


@pytest.fixture(autouse=True)
def mine(tmp_path: Path) -> Path:
    for each in ("mine/data", "mine/models/start", "elsewhere"):
        Path(each).mkdir(parents=True)
    grpo = Path(__file__).parents[2] / "algorithms" / "grpo.py"
    for file, text in {
        "mine/data/sums.jsonl": TASK,
        "mine/reward.py": REWARD,
        "mine/mine.py": grpo.read_text("utf-8").replace("async def grpo", "async def mine"),
        "mine/mine.toml": f'algorithm = "mine.py"\n{FAKES}{OWN}',
    }.items():
        Path(file).write_text(text, "utf-8")
    return tmp_path / "mine"


def resolved(*overrides: str) -> str:
    return str(load_job(Path("mine/mine.toml"), overrides).resolved)


def test_a_run_is_made_and_judged_anywhere(mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done("run", "mine/mine.toml")
    assert f"task source '{tmp_path}/nowhere.jsonl': there is no file" in refused("eval", "runs/mine", "nowhere.jsonl")
    for task in ("mine/data/sums.jsonl", "mine/mine.toml"):
        assert "has neither a model" in refused("eval", "runs/mine", task)
    table = config_of("runs/mine")
    assert table["algorithm"] == f"{mine}/mine.py"
    assert table["task"]["source"] == f"{mine}/data/sums.jsonl"
    assert table["reward"]["function"] == f"{mine}/reward.py:score"
    assert table["policy"]["model"] == table["sampler"]["model"] == f"{mine}/models/start"
    assert table["run"]["folder"] == f"{tmp_path}/runs"

    monkeypatch.chdir("elsewhere")
    done("run", "../runs/mine/config.toml")
    # What a run recorded is run where it was: the earlier one makes room.
    assert config_of("../runs/mine") == config_of("../runs/mine-1") == table
    assert not list(Path().iterdir())
    # A configuration of one's own is run where one stands.
    done("run", "../mine/mine.toml")
    assert config_of("runs/mine") == table | {"run": table["run"] | {"folder": f"{tmp_path}/elsewhere/runs"}}


def test_a_file_that_is_at_the_other_root_is_told(mine: Path, tmp_path: Path) -> None:
    (mine / "data").rename("data")
    (mine / "models").rename("models")
    told = refused("run", "mine/mine.toml", "reward.function=reward.py:score")
    in_a_file = "paths in a file start at its folder: write"
    typed = "paths on the command line start at the current folder: write"
    for key, file, given, other, where in (
        ("mine/mine.toml: policy.model", "models/start", mine, tmp_path, f"{in_a_file} ../models/start"),
        ("mine/mine.toml: task.source", "data/sums.jsonl", mine, tmp_path, f"{in_a_file} ../data/sums.jsonl"),
        ("command line: reward.function", "reward.py", tmp_path, mine, f"{typed} mine/reward.py"),
    ):
        assert f"{key} = '{file}" in told
        assert f"there is no {given}/{file}, but there is {other}/{file}: {where}" in told
    assert "error: 3 mistakes:" in told
    assert not Path("runs").exists()
    right = ("policy.model=models/start", "task.source=data/sums.jsonl", "reward.function=mine/reward.py:score")
    done("run", "mine/mine.toml", *right)


def test_the_paths_of_a_shipped_configuration_start_where_one_stands(tmp_path: Path) -> None:
    table = load_job(find_config("grpo/quickstart"), ["task.source=sums.jsonl", "task.options={}"]).resolved
    assert f"'model': '{tmp_path}/runs/quickstart-sft/model'" in str(table["policy"])
    assert f"'source': '{tmp_path}/sums.jsonl'" in str(table["task"])
    assert table["algorithm"] == "grpo"


def test_a_name_is_no_path_and_each_kind_of_path_starts_where_it_is_written(mine: Path, tmp_path: Path) -> None:
    given = ("task.source=other.jsonl", "reward={functions = {half = 'other.py:score'}}", "algorithm=mine/mine.py")
    table = resolved(*given)
    for path in ("other.jsonl", "other.py:score", "mine/mine.py", "mine/models/start"):
        assert f"'{tmp_path}/{path}'" in table
    for key, names in {
        "policy.model": ("ORG/NAME", "ORG/NAME@v1.0", "package:llm/model.gguf"),
        "task.source": ("reasoning_gym:spell_backward",),
        "reward.function": ("exact_match", "package.module:name"),
    }.items():
        for name in names:
            assert f"'{key.partition('.')[2]}': '{name}'" in resolved(f"{key}={name}")
    assert f"'model': '{mine}/models/start'" in resolved(), "a folder of the form of a name is a path"

    own = """
        task.source = "data/sums.parquet"
        environment.source = "reward:reward.py:score"
        run.replay = "earlier"
        sampler.vllm.python = "venv/bin/python"
    """
    Path("mine/mine.toml").write_text(f'algorithm = "multiturn"\n{FAKES}{own}', "utf-8")
    table = resolved()
    for path in ("data/sums.parquet", "venv/bin/python", "earlier"):
        assert f"'{mine}/{path}'" in table
    assert f"'reward:{mine}/reward.py:score'" in table
    assert "'python': 'python3'" in resolved("sampler.vllm.python=python3")


def test_a_run_goes_on_from_anywhere_or_has_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done("run", "mine/mine.toml")
    again = ("run", "mine/mine.toml", "run.resume=true")
    anew = "there is no checkpoint in runs/mine: the run starts from the beginning"
    assert f"{anew}; set run.checkpoint_every = 50 to resume later runs" in done(*again).err
    assert f"{anew}\n" in done(*again, "run.checkpoint_every=9").err

    warning = "run.resume = true, but there is no checkpoint in"
    assert warning not in done(*again, "run.name=kept", "run.checkpoint_every=1").err
    monkeypatch.chdir("elsewhere")
    told = done("run", "../runs/kept/config.toml", "run.resume=true", "steps=3").err
    assert warning not in told
    assert f"{tmp_path}/runs/kept continues after step 2 of 3" in told
    assert len(Path("../runs/kept/metrics.jsonl").read_bytes().splitlines()) == 3
