"""`meshrl new`: a folder that runs."""

import json
from pathlib import Path

import pytest

from meshrl import RunConfig
from meshrl.cli import main
from meshrl.run import find_mistakes, load_job
from meshrl.run.jobs import shipped_scripts
from tests.first_hour.chat_model import save_tokenizer

FAKES = ["policy.backend=fake", "sampler.backend=fake"]


def type_in(*arguments: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert not ended.value.code


@pytest.mark.parametrize("algorithm", shipped_scripts())
def test_each_page_is_copied_with_what_it_runs_on(
    algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    type_in("new", algorithm, "mine")
    job = load_job(Path("mine/config.toml"), [], RunConfig)
    assert job.run.name == "mine"
    assert 'held_out = "all"  # keep a tenth of the prompts for judging' in Path("mine/config.toml").read_text("utf-8")
    mistakes = find_mistakes(job.config)
    told = capsys.readouterr().out
    for mistake in mistakes:
        assert "/model: there is no folder" in mistake.replace("'", "")
        assert f"first: {mistake}" in told, "the missing step is told"
    assert ("first: " in told) == bool(mistakes)
    for name in ("quickstart-sft", "quickstart-agent-sft", "quickstart"):
        (tmp_path / "runs" / name / "model").mkdir(parents=True)
        (tmp_path / "runs" / name / "model" / "config.json").write_text("{}", "utf-8")
        save_tokenizer(tmp_path / "runs" / name / "model")
    assert find_mistakes(job.config) == []


def test_the_folder_runs_from_where_it_was_made_and_from_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    type_in("new", "grpo", "mine")
    assert "`meshrl run sft/quickstart` writes it" in capsys.readouterr().out
    fake = [*FAKES, "steps=1", "prompts=2", "policy.optimizer.total_steps=1"]
    type_in("run", "mine/config.toml", *fake)
    assert "reward_after" in json.loads((tmp_path / "runs/mine/summary.json").read_bytes())
    monkeypatch.chdir(tmp_path / "mine")
    type_in("run", "config.toml", *fake)
    assert (tmp_path / "mine/runs/mine/summary.json").is_file()


def test_an_agent_is_copied_with_its_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task's row becomes the prompt as it is: the chat template of the model ends it."""
    monkeypatch.chdir(tmp_path)
    type_in("new", "agent", "mine")
    program = Path("mine/program.py")
    asked = 'row["prompt"]}]\n'
    tell = "    with open('said', 'a') as file:\n        print(row['prompt'], file=file)\n"
    program.write_text(program.read_text("utf-8").replace(asked, asked + tell), "utf-8")
    few = ["steps=1", "prompts=2", "task.held_out=2", "policy.optimizer.total_steps=1"]
    type_in("run", "mine/config.toml", *FAKES, *few)
    words = {json.loads(line)["question"] for line in Path("mine/task.jsonl").read_text("utf-8").splitlines()}
    assert set(Path("said").read_text("utf-8").split()) <= words


def test_the_command_may_be_pasted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    type_in("new", "grpo", "my exp")
    assert "run it with: meshrl run 'my exp/config.toml'" in capsys.readouterr().out


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    type_in("new", "grpo", str(tmp_path / "mine"))
    before = {path: path.read_bytes() for path in (tmp_path / "mine").glob("*.*")}
    with pytest.raises(SystemExit):
        main(["new", "rloo", str(tmp_path / "mine")])
    assert "exists already and is not overwritten" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in (tmp_path / "mine").glob("*.*")} == before
