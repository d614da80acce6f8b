"""Rewards: the shipped functions, the boundary around users' own, and finding them by name."""

import math
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError
from structlog.testing import capture_logs

from meshrl.data import Batch
from meshrl.tasks import RewardConfig, load_function
from meshrl.tasks.builtin import final_number, numeric_answer, reasoning_format
from meshrl.tasks.function import FunctionReward

FUNCTIONS = """
import asyncio
import numpy as np

class Judge:
    def __call__(self, prompt, completion, row):
        return 0.25

judge = Judge()
running = most = 0

def length(prompt, completion, row):
    return len(completion)

async def slow_length(prompt, completion, row):
    global running, most
    running += 1
    most = max(most, running)
    assert most <= 2
    await asyncio.sleep(0.001 * (5 - len(completion)))
    running -= 1
    return np.float32(len(completion))

def picky(prompt, completion, row):
    if completion == "bad":
        raise ValueError(f"cannot judge {prompt}")
    return "1" if completion == "text" else True

def greedy(prompt, completion, row):
    row["answer"] = row["extra"]["list"] = None
    row["extra"].clear()
    return 1
"""


@pytest.fixture
def functions(tmp_path: Path) -> str:
    path = tmp_path / "my_rewards.py"
    path.write_text(FUNCTIONS, "utf-8")
    return str(path)


def rollouts(*completions: str, **columns: list[object]) -> Batch:
    prompts = [f"prompt {index}" for index in range(len(completions))]
    rows: list[object] = [{"extra": {"list": [1]}} for _ in completions]
    given: dict[str, list[object]] = {"answer": ["right"] * len(completions), "row": rows, **columns}
    return Batch({"prompt": prompts, "completion": list(completions), **given})


async def scored(function: str, batch: Batch) -> tuple[list[float], list[object]]:
    done = await FunctionReward(RewardConfig(function=function)).score(batch)
    assert done.rewards.dtype == np.float32
    assert done.drop("rewards", "reward_error") == batch
    return done.rewards.tolist(), list(done.objects("reward_error"))


async def test_exact_match_compares_with_the_answer_column_without_white_space_around() -> None:
    values, errors = await scored("exact_match", rollouts("right", " right\n", "rights", "", "ri ght"))
    assert values == [1, 1, 0, 0, 0]
    assert errors == [None] * 5
    batch = rollouts("short", row=[{"answer": "a long explanation; short"}], answer=["short"])
    assert (await scored("exact_match", batch))[0] == [1]
    assert await scored("exact_match", rollouts()) == ([], [])


async def test_reasoning_gym_scores_with_the_rows_own_dataset() -> None:
    row = {"question": "q", "answer": "cba", "metadata": {"source_dataset": "spell_backward", "word": "abc"}}
    values, errors = await scored("reasoning_gym", rollouts("cba", "xyz", answer=["cba"] * 2, row=[row] * 2))
    assert values[0] == 1.0
    assert values[1] < 1.0
    assert errors == [None, None]


async def test_a_function_of_a_file(functions: str) -> None:
    assert await scored(f"{functions}:length", rollouts("a", "bcd", "")) == ([1, 3, 0], [None] * 3)
    assert await scored(f"{functions}:judge", rollouts("a")) == ([0.25], [None])
    without = rollouts("a", "b").only("prompt", "completion")
    assert await scored(f"{functions}:length", without) == ([1, 1], [None, None])
    batch = rollouts("a", "b")
    assert await scored(f"{functions}:greedy", batch) == ([1, 1], [None, None])
    assert batch == rollouts("a", "b"), "a function may change its row, and not the batch's"


async def test_an_async_function_keeps_the_rows_in_order_and_the_limit(functions: str) -> None:
    config = RewardConfig(function=f"{functions}:slow_length", concurrency=2)
    done = await FunctionReward(config).score(rollouts("a", "bcd", "", "ef"))
    assert done.rewards.tolist() == [1, 3, 0, 2]
    assert done.objects("reward_error") == (None,) * 4


async def test_what_a_function_raises_and_no_number_stay_on_the_row_and_are_logged_once(functions: str) -> None:
    with capture_logs() as logs:
        values, errors = await scored(f"{functions}:picky", rollouts("bad", "good", "bad", "text"))
    assert values == pytest.approx([math.nan, 1, math.nan, math.nan], nan_ok=True)
    assert errors[:3] == ["ValueError: cannot judge prompt 0", None, "ValueError: cannot judge prompt 2"]
    assert errors[3] == "TypeError: a reward must be a number, not '1'"
    assert [log["error"] for log in logs if "my_rewards.py, line " in log.get("at", "")] == errors[:1]


async def test_named_rewards_are_summed_and_told_apart(functions: str) -> None:
    named = {"correct": "exact_match", "length": f"{functions}:length", "picky": f"{functions}:picky"}
    config = RewardConfig(functions=named, weights={"length": 0.5, "picky": -1.0})
    with capture_logs():
        done = await FunctionReward(config).score(rollouts("right", "bad", "a"))
    assert done.rewards == pytest.approx([1 + 2.5 - 1, math.nan, 0.5 - 1], nan_ok=True)
    assert done.row("reward_correct").tolist() == [1, 0, 0]
    assert done.row("reward_length").tolist() == [5, 3, 1]
    assert done.row("reward_picky") == pytest.approx([1, math.nan, 1], nan_ok=True)
    assert done.objects("reward_error") == (None, "picky: ValueError: cannot judge prompt 1", None)
    assert (await FunctionReward(config).score(rollouts())).row("reward_length").dtype == np.float32


def test_weights_that_do_not_fit() -> None:
    with pytest.raises(ValidationError, match="there are none"):
        RewardConfig(weights={"short": 1.0})
    with pytest.raises(ValidationError, match="must be finite"):
        RewardConfig(functions={"a": "exact_match"}, weights={"a": math.inf})


def test_a_name_is_a_shipped_function_also_where_it_was_before() -> None:
    for place in ("meshrl.tasks", "meshrl.rewards.builtin"):
        assert load_function(f"{place}:exact_match") is load_function("exact_match")


def test_a_file_may_import_its_neighbour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "neighbour_of_rewards.py").write_text("VALUE = 2.0\n", "utf-8")
    path = tmp_path / "random.py"
    path.write_text("from neighbour_of_rewards import VALUE\ndef reward(p, c, row): return VALUE\n", "utf-8")
    assert load_function(f"{path}:reward")("", "", {}) == 2.0
    assert Path(str(sys.modules["random"].__file__)) != path, "a user's random.py is not the library's"


def test_a_file_that_changed_within_a_second_is_read_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = tmp_path / "rewards_of_today.py"
    for value in (1.0, 2.0):
        path.write_text(f"def reward(p, c, row): return {value}\n", "utf-8")
        os.utime(path, (1e9, 1e9))
        assert load_function(f"{path}:reward")("", "", {}) == value


def test_answers_are_compared_by_value() -> None:
    gsm8k: dict[str, object] = {"answer": "He has 3 boxes of 14, so <<3*14=42>>42.\n#### 42"}
    assert numeric_answer("", "3 * 14 = 42.0", gsm8k) == 1.0
    assert numeric_answer("", "42 is not what I think, but 41", gsm8k) == 0.0
    assert numeric_answer("", "", gsm8k) == 0.0
    with pytest.raises(ValueError, match="the row's answer has no number"):
        numeric_answer("", "42", {"answer": "many"})


FORMATS = {
    "<think>3 and 4</think>7": 1.0,
    "\n<think>\n3 and 4\n</think>\n\nIt is 7.": 1.0,
    "3 and 4</think>7": 1.0,  # the template opened the thought
    "7": 0.0,
    "<think>3 and 4": 0.0,
    "<think></think>7": 0.0,
    "<think>3 and 4</think> ": 0.0,
    "It is 7. <think>3 and 4</think>7": 0.0,
    "<think>3</think>7<think>4</think>7": 0.0,
    "<think>3</think>7</think>": 0.0,
}


def test_thought_and_answer_are_told_apart() -> None:
    assert {text: reasoning_format("", text, {}) for text in FORMATS} == FORMATS


def test_a_long_text_takes_time_in_proportion() -> None:
    for piece in ("1,", "1,111", "\\boxed{", "<think>", "9", "-", ".1", "1/", "\\frac{1}{"):
        final_number(piece * 200_000)
        assert reasoning_format("", piece * 200_000, {}) == 0.0
