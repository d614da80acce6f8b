"""The recipe of docs/reasoning.md, as somebody types it who has a file of problems and a model."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from meshrl.observe import table_of
from meshrl.run.jobs import make_job
from tests.first_hour.chat_model import save_model
from tests.first_hour.terminal import config_of, done, type_in

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
