"""What is wrong with a task's rows is told before a model loads, with file and line; and long ones can be left out."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Terminal = Callable[..., tuple[int, str, str]]

MINE = """
algorithm = "grpo"
prompts = 2
steps = 2
run.name = "mine"
task = { source = "task.jsonl", held_out = 0 }
policy = { model = "model", chat = true }
reward.function = "mine.py:judge"
sampling = { max_tokens = 8, n = 2 }
"""
JUDGE = "def judge(prompt, completion, row):\n    return float(completion == row['answer'])\n"
ROWS: list[dict[str, Any]] = [{"question": f"{number} + 1", "answer": str(number + 1)} for number in range(8)]
LONG = {"question": "What is " + "1 + " * 20 + "1?", "answer": "21"}
FAKES = ("policy.backend=fake", "sampler.backend=fake")
NEW = "{characters = '0123456789 +', max_tokens = 64}"


@pytest.fixture
def mine(tmp_path: Path, chat_model: Callable[..., Path]) -> Path:
    """A project in which nothing is wrong."""
    (tmp_path / "mine.toml").write_text(MINE, "utf-8")
    (tmp_path / "mine.py").write_text(JUDGE, "utf-8")
    chat_model(tmp_path / "model", longest=64)
    write(tmp_path, *ROWS)
    return tmp_path


def write(folder: Path, *rows: object) -> None:
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    (folder / "task.jsonl").write_text("\n".join(lines), "utf-8")


def told(terminal: Terminal, *arguments: str) -> str:
    status, out, err = terminal(*arguments)
    return " ".join((err if status else out + err).split())


def test_nothing_is_wrong(mine: Path, terminal: Terminal) -> None:
    assert told(terminal, "check", "mine.toml") == "mine.toml: no mistakes found"


@pytest.mark.parametrize(
    ("row", "mistake"),
    [
        ('{"question": "1 + 1", "answer":', "task: {folder}/task.jsonl, line 9: not JSON"),
        (
            {"answer": "2"},
            "task.jsonl, line 9: prompt: the template '{{question}}' needs 'question', which the row lacks",
        ),
        (
            {"question": "1 + 1"},
            "which the row lacks; it has 'question': set task.answer to a template over these keys",
        ),
        (LONG, "task: {folder}/task.jsonl, line 9: the prompt has 108 tokens: 'What is 1 + 1 + 1"),
    ],
    ids=["no JSON", "no question", "no answer", "too long"],
)
def test_each_line_is_looked_at(row: object, mistake: str, mine: Path, terminal: Terminal) -> None:
    write(mine, *ROWS, row)
    for command in ("check", "run"):
        assert mistake.format(folder=mine) in told(terminal, command, "mine.toml")
    assert not (mine / "runs").exists()


def test_a_prompt_that_is_a_list_of_messages(mine: Path, terminal: Terminal) -> None:
    write(mine, *({"prompt": [{"role": "user", "content": row["question"]}], "answer": row["answer"]} for row in ROWS))
    wrong = told(terminal, "check", "mine.toml", "task.prompt={prompt}")
    assert "`prompt` is a list of messages: write {prompt[0][content]}, with policy.chat = true" in wrong
    assert "no mistakes found" in told(terminal, "check", "mine.toml", "task.prompt={prompt[0][content]}")


def test_a_list_of_numbers_in_a_prompt(mine: Path, terminal: Terminal) -> None:
    write(mine, *({"numbers": [number, 1], "answer": str(number + 1)} for number in range(8)))
    assert "no mistakes found" in told(terminal, "check", "mine.toml", "task.prompt=sum {numbers}")


@pytest.mark.parametrize("command", ["check", "run"])
def test_many_lines_that_are_no_rows_are_counted(mine: Path, terminal: Terminal, command: str) -> None:
    write(mine, *ROWS, "{", *ROWS, "[1]", "", '{"question"', "{", "{")
    wrong = told(terminal, command, "mine.toml")
    assert wrong.count("not JSON") == 2
    assert "task.jsonl, line 9: not JSON" in wrong
    assert '; line 18: a row must be an object such as {"question": ...}, not a list; line 20: not JSON' in wrong
    assert "; and 2 lines more" in wrong


def test_many_mistakes_of_a_kind_are_counted(mine: Path, terminal: Terminal) -> None:
    write(mine, *ROWS, *({"question": "1"} for _ in range(9)))
    assert "and 6 more rows" in told(terminal, "check", "mine.toml")


def test_a_long_file_is_looked_at_as_far_as_is_cheap(
    mine: Path, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshrl.run.check_rows._OF_A_FILE", 4)
    assert told(terminal, "check", "mine.toml").endswith("of the task's rows, only the first 4 were checked")


def test_long_rows_are_left_out_where_one_asks_for_it(mine: Path, terminal: Terminal) -> None:
    write(mine, *ROWS, LONG)
    wrong = told(terminal, "check", "mine.toml")
    assert "the model takes 64 tokens, which with 8 new ones (sampling.max_tokens) leaves 56" in wrong
    assert "set task.max_prompt_tokens = 56 to leave longer ones out" in wrong
    found = told(terminal, "run", "mine.toml", "task.max_prompt_tokens=56")
    assert "1 of 9 prompts are left out: they have more than 56 tokens" in found
    assert (mine / "runs/mine/model").is_dir()
    assert "1 of 9 prompts are left out" in told(terminal, "run", "runs/mine/config.toml", "steps=1")


def test_the_fakes_leave_long_rows_out_too(mine: Path, terminal: Terminal) -> None:
    write(mine, *ROWS, LONG)
    shorter = told(terminal, "run", "mine.toml", *FAKES, "task.max_prompt_tokens=20")
    assert shorter.count("1 of 9 prompts are left out") == 1
    wrong = told(terminal, "run", "mine.toml", *FAKES, "task.max_prompt_tokens=1")
    assert "each of its 9 prompts has more than task.max_prompt_tokens = 1 tokens" in wrong


def test_long_rows_are_counted_by_what_there_is_without_a_policy(mine: Path, terminal: Terminal) -> None:
    reward = ("reward_model/quickstart", f"reward.model={NEW}", "reward.backend=fake", "steps=1", "rejected='x'")
    task = ("task.source=task.jsonl", "task.prompt={question}", "task.options={}", "task.held_out=1")
    write(mine, *ROWS, LONG)
    fewer = (*reward, *task, "task.held_out_fraction=0.5", "reward.optimizer.total_steps=1", "rows=2")
    assert "1 of 9 prompts are left out" in told(terminal, "run", *fewer, "task.max_prompt_tokens=20")
    assert "has more than task.max_prompt_tokens = 1 tokens" in told(
        terminal, "check", *fewer, "task.max_prompt_tokens=1"
    )


def test_where_nobody_counts_tokens_it_is_told_with_the_rest(
    mine: Path, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshrl.tasks.lengths.count_tokens", lambda *_: None)
    wrong = told(terminal, "check", "mine.toml", "task.max_prompt_tokens=20", "run.log=tensorbord")
    assert "task: task.max_prompt_tokens = 20: there is no tokenizer to count tokens with" in wrong
    assert "did you mean 'tensorboard'" in wrong


def test_letters_that_a_new_model_has_not(mine: Path, terminal: Terminal) -> None:
    write(mine, *ROWS, {"question": "9 * 9", "answer": "81"})
    found = told(terminal, "check", "mine.toml", f"policy.model={NEW}", "policy.chat=false")
    assert f"task: {mine}/task.jsonl, line 9: the text '9 * 9' has '*', which the tokenizer does not know" in found


def test_a_model_without_a_tokenizer(mine: Path, terminal: Terminal) -> None:
    for file in (mine / "model").glob("tokenizer*"):
        file.unlink()
    assert "the folder's tokenizer cannot be loaded (tokenizer.json or" in told(terminal, "check", "mine.toml")


def test_an_evaluation_of_no_prompts(mine: Path, terminal: Terminal) -> None:
    write(mine, ROWS[0])
    found = told(terminal, "check", "mine.toml", "evaluation.every=1")
    assert "[evaluation] needs held-out prompts, and these rows have none" in found
    assert "held_out = 5, but held_out_fraction" in told(terminal, "check", "mine.toml", "task.held_out=5")


def test_a_sampler_whose_engine_is_not_installed(
    mine: Path, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshrl_inference.options.find_spec", lambda _: None)
    missing = "backend 'vllm' needs the package 'vllm', which is not installed: pip install 'meshrl[vllm]'"
    for command in ("check", "run"):
        assert missing in told(terminal, command, "mine.toml", "sampler.backend=vllm")
    assert terminal("run", "mine.toml")[0] == 0
    status, _, err = terminal("serve", "mine")
    assert status == 1
    assert missing in " ".join(err.split())
    assert "Traceback" not in err


def test_a_reward_that_gives_the_tasks_own_answer_nothing(mine: Path, terminal: Terminal) -> None:
    (mine / "mine.py").write_text(JUDGE.replace("completion ==", "f'<{completion}' =="), "utf-8")
    found = told(terminal, "check", "mine.toml")
    assert "reward.function: the task's own answer scores 0: the first row's, '1', as the completion" in found
    assert "no mistakes found" in found
    assert "own answer" not in told(terminal, "check", "mine.toml", "reward.function=reasoning_format")
