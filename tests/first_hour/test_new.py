"""`meshrl new` makes a folder that runs, and so does the recipe of docs/reasoning.md, as somebody types it."""

import json
import re
import shutil
import tomllib
from pathlib import Path

import pytest

from meshrl.observe import table_of
from meshrl.run import find_mistakes, load_job, shipped_configs
from meshrl.run.jobs import make_job, shipped, shipped_scripts
from tests.first_hour.chat_model import save_model, save_tokenizer
from tests.first_hour.terminal import config_of, done, refused, type_in

FAKES = ("policy.backend=fake", "sampler.backend=fake", "steps=1", "prompts=2", "policy.optimizer.total_steps=1")


def test_each_page_is_copied_with_what_it_runs_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (model := tmp_path / "a model").mkdir()
    (model / "config.json").write_text('{"model_type": "llama"}', "utf-8")
    save_tokenizer(model)
    for algorithm in shipped_scripts():
        (folder := tmp_path / f"of {algorithm}").mkdir()
        monkeypatch.chdir(folder)
        told = done("new", algorithm, "mine").out
        splits = 'held_out = "all"  # keep a tenth of the prompts for judging'
        assert splits in Path("mine/config.toml").read_text("utf-8")
        job = load_job(Path("mine/config.toml"), [])
        assert job.run.name == "mine"
        mistakes = find_mistakes(job.config)
        assert all("/model: there is no folder" in mistake.replace("'", "") for mistake in mistakes), mistakes
        assert all(f"first: {mistake}" in told for mistake in mistakes), told
        assert ("first: " in told) == bool(mistakes)
        for name in ("quickstart-sft", "quickstart-agent-sft", "quickstart"):
            shutil.copytree(model, folder / "runs" / name / "model")
        assert find_mistakes(job.config) == []


def test_the_folder_runs_from_outside_and_from_inside_and_is_not_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "`meshrl run sft/quickstart` writes it" in done("new", "grpo", "mine").out
    assert Path("mine/grpo.py").read_bytes() == (shipped("algorithms") / "grpo.py").read_bytes()
    before = {path: path.read_bytes() for path in Path("mine").glob("*.*")}
    assert "exists already and is not overwritten" in refused("new", "rloo", "mine")
    assert {path: path.read_bytes() for path in Path("mine").glob("*.*")} == before
    told = [f"wrote my exp/{file}" for file in ("sft.py", "config.toml", "task.jsonl")]
    assert done("new", "sft", "my exp").out.splitlines() == [*told, "run it with: meshrl run 'my exp/config.toml'"]
    original = tomllib.loads(shipped_configs()["sft/quickstart"].read_text("utf-8"))
    copied = tomllib.loads(Path("my exp/config.toml").read_text("utf-8"))
    own = {"algorithm": "sft.py", "run": {**original["run"], "name": "my-exp"}, "task": copied["task"]}
    assert copied == {**original, **own}

    done("run", "mine/config.toml", *FAKES)
    assert "reward_after" in json.loads(Path("runs/mine/summary.json").read_bytes())
    monkeypatch.chdir("mine")
    done("run", "config.toml", *FAKES)
    assert Path("runs/mine/summary.json").is_file()


def test_an_agent_is_copied_with_its_program() -> None:
    done("new", "agent", "mine")
    program = Path("mine/program.py")
    asked = 'row["prompt"]}]\n'
    tell = "    with open('said', 'a') as file:\n        print(row['prompt'], file=file)\n"
    program.write_text(program.read_text("utf-8").replace(asked, asked + tell), "utf-8")
    done("run", "mine/config.toml", *FAKES, "task.held_out=2")
    words = {json.loads(line)["question"] for line in Path("mine/task.jsonl").read_text("utf-8").splitlines()}
    assert set(Path("said").read_text("utf-8").split()) <= words


PAGE = Path(__file__).parents[2] / "docs" / "reasoning.md"
RECIPE, GPU = re.findall(r"^```toml\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
ROWS = [{"question": f"What is {number} times 3?", "answer": f"So\n#### {3 * number}"} for number in range(60)]


@pytest.fixture(autouse=True)
def _files() -> None:
    Path("reason.toml").write_text(RECIPE, "utf-8")
    Path("train.jsonl").write_text("\n".join(map(json.dumps, ROWS)), "utf-8")
    save_model(Path("models/instruct"))


def test_the_recipe_and_what_it_adds_for_a_gpu_are_right(tmp_path: Path) -> None:
    done("check", "reason.toml")
    told = type_in("check", "reason.toml", "sampler.dtype=float32").told
    assert 'sampler: dtype = "float32", but the policy publishes bfloat16' in told

    whole, added = tomllib.loads(RECIPE), tomllib.loads(GPU)
    for name, table in added.items():
        whole[name] = whole.get(name, {}) | table
    job = make_job(tmp_path / "reason.toml", whole, tmp_path)
    assert job.run.engine == "processes"
    policy, sampler = (table_of(job.resolved, role) for role in ("policy", "sampler"))
    assert (policy["dtype"], sampler["dtype"]) == ("bfloat16", "bfloat16")
    assert table_of(sampler, "vllm")["sleep"] is True
    assert "model" not in added["sampler"]


def test_the_recipe_runs_on_a_model() -> None:
    short = ("steps=2", "prompts=2", "evaluation.every=1", "evaluation.rows=2", "sampling.max_tokens=8")
    done("run", "reason.toml", *short)
    done("eval", "reason", "--n", "2", "--rows", "2")
    done("report", "reason")
    run = Path("runs/reason")
    last = json.loads((run / "metrics.jsonl").read_text("utf-8").splitlines()[-1])
    assert {"reward/right", "reward/form"} <= set(last)
    assert {"reward_before", "reward_after"} <= set(json.loads((run / "summary.json").read_bytes()))
    recorded = config_of(run)
    assert {recorded[role]["dtype"] for role in ("policy", "sampler", "reference")} == {"bfloat16"}
    assert set(json.loads((run / "eval.json").read_bytes())["pass_at"]) == {"1", "2"}
    assert (run / "report.html").is_file()
    assert (run / "model/config.json").is_file()
