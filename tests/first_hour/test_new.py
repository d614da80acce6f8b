"""`meshrl new`: a folder that runs."""

import json
import tomllib
from pathlib import Path

import pytest

from meshrl.run import find_mistakes, load_job, shipped_configs
from meshrl.run.jobs import shipped, shipped_scripts
from tests.first_hour.chat_model import save_tokenizer
from tests.first_hour.terminal import done, refused

FAKES = ("policy.backend=fake", "sampler.backend=fake", "steps=1", "prompts=2", "policy.optimizer.total_steps=1")


def test_each_page_is_copied_with_what_it_runs_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
            (model := folder / "runs" / name / "model").mkdir(parents=True)
            (model / "config.json").write_text("{}", "utf-8")
            save_tokenizer(model)
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
    """A task's row becomes the prompt as it is: the chat template of the model ends it."""
    done("new", "agent", "mine")
    program = Path("mine/program.py")
    asked = 'row["prompt"]}]\n'
    tell = "    with open('said', 'a') as file:\n        print(row['prompt'], file=file)\n"
    program.write_text(program.read_text("utf-8").replace(asked, asked + tell), "utf-8")
    done("run", "mine/config.toml", *FAKES, "task.held_out=2")
    words = {json.loads(line)["question"] for line in Path("mine/task.jsonl").read_text("utf-8").splitlines()}
    assert set(Path("said").read_text("utf-8").split()) <= words
