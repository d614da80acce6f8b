"""Mistakes in a reward function: found when it is named, or told on the row it was called for."""

from pathlib import Path

from meshrl import Batch, RewardConfig
from meshrl.rewards import FunctionReward

JUDGE = """
SCALE = 2.0
def judge(prompt, completion, row):
    return SCALE
def pair(completion, answer):
    return float(completion == answer)
def shout(prompt, completion, row):
    return float(row["word"] == completion)
def divide(prompt, completion, row):
    return float("nan")
def forget(prompt, completion, row):
    print(completion)
"""


def _reward(function: str) -> FunctionReward:
    Path("judge.py").write_text(JUDGE, "utf-8")
    return FunctionReward(RewardConfig(function=function))


async def _told(function: str, **columns: list[str]) -> str:
    scored = await _reward(function).score(Batch.of(prompt=["cat>"], completion=["tac"], **columns))
    assert scored.rewards.tolist() == [0.0]
    return str(scored.objects("reward_error")[0])


def unknown_reward() -> None:
    _reward("exactmatch")


def reward_file_missing() -> None:
    _reward("rewards/judge.py:judge")


def reward_package_missing() -> None:
    _reward("judges.words:judge")


def reward_file_that_raises() -> None:
    Path("broken.py").write_text("import numpyy\n", "utf-8")
    _reward("broken.py:judge")


def reward_not_in_the_file() -> None:
    _reward("judge.py:juge")


def reward_that_is_no_function() -> None:
    _reward("judge.py:SCALE")


def reward_with_other_parameters() -> None:
    _reward("judge.py:pair")


async def reward_that_raises() -> str:
    return await _told("judge.py:shout")


async def reward_that_is_nan() -> str:
    return await _told("judge.py:divide")


async def reward_that_is_none() -> str:
    return await _told("judge.py:forget")


async def no_answer_to_compare() -> str:
    return await _told("exact_match")


async def row_of_no_dataset() -> str:
    return await _told("reasoning_gym", answer=["tac"])
