"""The recipe of docs/reasoning.md, as somebody types it who has a file of problems and a model."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from meshrl import RunConfig
from meshrl.run import table_of
from meshrl.run.jobs import make_job
from tests.first_hour.chat_model import save_model
from tests.first_hour.terminal import Terminal

PAGE = Path(__file__).parents[2] / "docs" / "reasoning.md"
ROWS = [{"question": f"What is {number} times 3?", "answer": f"So\n#### {3 * number}"} for number in range(60)]


@pytest.fixture
def folder(tmp_path: Path, terminal: Terminal) -> Path:
    """With the page's files."""
    recipe, gpu = re.findall(r"^```toml\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    (tmp_path / "reason.toml").write_text(recipe, "utf-8")
    (tmp_path / "gpu.toml").write_text(gpu, "utf-8")
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, ROWS)), "utf-8")
    save_model(tmp_path / "models/instruct")
    return tmp_path


def test_the_recipe_and_what_it_adds_for_a_gpu_are_right(folder: Path, terminal: Terminal) -> None:
    status, _, err = terminal("check", "reason.toml")
    assert status == 0, err
    told = terminal("check", "reason.toml", "sampler.dtype=float32").told
    assert 'sampler: dtype = "float32", but the policy publishes bfloat16' in told

    whole, added = (tomllib.loads((folder / name).read_text("utf-8")) for name in ("reason.toml", "gpu.toml"))
    for name, table in added.items():
        whole[name] = whole.get(name, {}) | table
    job = make_job(folder / "reason.toml", whole, RunConfig, folder)
    assert job.run.engine == "processes"
    assert (table_of(job.resolved, "sampler")["dtype"], table_of(job.resolved, "policy")["dtype"]) == ("bfloat16",) * 2
    assert table_of(table_of(job.resolved, "sampler"), "vllm")["sleep"] is True
    assert "model" not in added["sampler"]


def test_a_reward_that_raises_on_every_row_ends_the_recipe(folder: Path, terminal: Terminal) -> None:
    code = "return 1.0 if completion in ('', row['answer']) else completion[999]"
    (folder / "mine.py").write_text(f"def judge(prompt, completion, row):\n    {code}\n", "utf-8")
    reward = ("reward.weights={}", "reward.functions={judge = 'mine.py:judge'}")
    fakes = ("policy.backend=fake", "sampler.backend=fake")
    found = terminal("run", "reason.toml", *fakes, *reward, "steps=3", "prompts=4", "sampling.max_tokens=4")
    assert found.status == 1
    assert "the reward raised on each of the 32 rows of a step" in found.told
    assert "IndexError: string index out of range" in found.told


def test_the_recipe_runs_on_a_model(folder: Path, terminal: Terminal) -> None:
    short = ("steps=2", "prompts=2", "evaluation.every=1", "evaluation.rows=2", "sampling.max_tokens=8")
    assert terminal("run", "reason.toml", *short).status == 0
    last = json.loads((folder / "runs/reason/metrics.jsonl").read_text("utf-8").splitlines()[-1])
    assert {"reward/right", "reward/form"} <= set(last)
    assert {"reward_before", "reward_after"} <= set(json.loads((folder / "runs/reason/summary.json").read_bytes()))
    assert terminal("eval", "reason", "--n", "2", "--rows", "2").status == 0
    assert terminal("report", "reason").status == 0
    recorded = tomllib.loads((folder / "runs/reason/config.toml").read_text("utf-8"))
    assert {recorded[role]["dtype"] for role in ("policy", "sampler", "reference")} == {"bfloat16"}
    assert set(json.loads((folder / "runs/reason/eval.json").read_bytes())["pass_at"]) == {"1", "2"}
    assert (folder / "runs/reason/report.html").is_file()
    assert (folder / "runs/reason/model/config.json").is_file()
