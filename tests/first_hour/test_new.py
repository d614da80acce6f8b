"""`meshrl new`: a folder that runs."""

import json
import tomllib
from pathlib import Path

import pytest

from meshrl import RunConfig
from meshrl.run import find_mistakes, load_job, shipped_configs
from meshrl.run.jobs import shipped, shipped_scripts
from tests.first_hour.chat_model import save_tokenizer
from tests.first_hour.terminal import Terminal

FAKES = ("policy.backend=fake", "sampler.backend=fake", "steps=1", "prompts=2", "policy.optimizer.total_steps=1")


def test_each_page_is_copied_with_what_it_runs_on(
    terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong: list[str] = []
    for algorithm in shipped_scripts():
        (folder := tmp_path / f"of {algorithm}").mkdir()
        monkeypatch.chdir(folder)
        status, told, _ = terminal("new", algorithm, "mine")
        text = Path("mine/config.toml").read_text("utf-8")
        job = load_job(Path("mine/config.toml"), [], RunConfig)
        mistakes = find_mistakes(job.config)
        missing = all("/model: there is no folder" in mistake.replace("'", "") for mistake in mistakes)
        is_told = all(f"first: {mistake}" in told for mistake in mistakes) and ("first: " in told) == bool(mistakes)
        splits = 'held_out = "all"  # keep a tenth of the prompts for judging' in text
        for name in ("quickstart-sft", "quickstart-agent-sft", "quickstart"):
            (model := folder / "runs" / name / "model").mkdir(parents=True)
            (model / "config.json").write_text("{}", "utf-8")
            save_tokenizer(model)
        if status or job.run.name != "mine" or not (missing and is_told and splits) or find_mistakes(job.config):
            wrong.append(f"{algorithm}: {told} {mistakes}")
    assert not wrong, "\n".join(wrong)


def test_the_folder_runs_from_where_it_was_made_and_from_inside_and_is_not_overwritten(
    terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "`meshrl run sft/quickstart` writes it" in terminal("new", "grpo", "mine").out
    assert Path("mine/grpo.py").read_bytes() == (shipped("algorithms") / "grpo.py").read_bytes()
    before = {path: path.read_bytes() for path in (tmp_path / "mine").glob("*.*")}
    found = terminal("new", "rloo", "mine")
    assert (found.status, "exists already and is not overwritten" in found.err) == (1, True)
    assert {path: path.read_bytes() for path in (tmp_path / "mine").glob("*.*")} == before
    told = [f"wrote my exp/{file}" for file in ("sft.py", "config.toml", "task.jsonl")]
    assert terminal("new", "sft", "my exp").out.splitlines() == [*told, "run it with: meshrl run 'my exp/config.toml'"]
    original = tomllib.loads(shipped_configs()["sft/quickstart"].read_text("utf-8"))
    copied = tomllib.loads(Path("my exp/config.toml").read_text("utf-8"))
    own = {"algorithm": "sft.py", "run": {**original["run"], "name": "my-exp"}, "task": copied["task"]}
    assert copied == {**original, **own}

    assert terminal("run", "mine/config.toml", *FAKES).status == 0
    assert "reward_after" in json.loads((tmp_path / "runs/mine/summary.json").read_bytes())
    monkeypatch.chdir(tmp_path / "mine")
    assert terminal("run", "config.toml", *FAKES).status == 0
    assert (tmp_path / "mine/runs/mine/summary.json").is_file()


def test_an_agent_is_copied_with_its_program(terminal: Terminal) -> None:
    """A task's row becomes the prompt as it is: the chat template of the model ends it."""
    assert terminal("new", "agent", "mine").status == 0
    program = Path("mine/program.py")
    asked = 'row["prompt"]}]\n'
    tell = "    with open('said', 'a') as file:\n        print(row['prompt'], file=file)\n"
    program.write_text(program.read_text("utf-8").replace(asked, asked + tell), "utf-8")
    assert terminal("run", "mine/config.toml", *FAKES, "task.held_out=2").status == 0
    words = {json.loads(line)["question"] for line in Path("mine/task.jsonl").read_text("utf-8").splitlines()}
    assert set(Path("said").read_text("utf-8").split()) <= words
