"""Mistakes in an environment, and in rewards that are several or run code."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import numpy as np

from meshrl import AgentConfig, Batch, EnvironmentConfig
from meshrl.agents.config import load_agent
from meshrl.config import validate
from meshrl.environments.environment import FunctionEnvironment
from meshrl.rewards import RewardConfig
from meshrl.rewards.function import FunctionReward

GAMES = """
class Guess:
    def __init__(self, highest=9):
        self.highest = highest
    def reset(self, row):
        return row["question"]
    def step(self, completion):
        return "wrong", 0.0
class Oracle:
    def ask(self, row):
        return ""
def play(row):
    return ""
"""


def _environment(source: str, **options: int) -> FunctionEnvironment:
    Path("games.py").write_text(GAMES, "utf-8")
    table = {"source": source, "options": options}
    return FunctionEnvironment(validate(EnvironmentConfig, table, "environment"))


async def _told(*turns: str, **columns: list[object]) -> str:
    environment = _environment("games.py:Guess")
    batch = await environment.reset(Batch.of(prompt=["1 to 9>"], episode=np.zeros(1, np.int64), **columns))
    for turn in turns:
        batch = await environment.step(batch.assign(completion=[turn]))
    return str(batch.objects("reward_error")[0])


def weight_of_no_reward() -> None:
    table = {"functions": {"correct": "exact_match"}, "weights": {"corect": 2.0}}
    validate(RewardConfig, table, "mine.toml")


async def reward_that_runs_no_tests() -> str:
    scored = await FunctionReward(RewardConfig(function="code_tests")).score(
        Batch.of(prompt=["add"], completion=["def add(a, b): return a + b"], row=[{"test": "assert add(1, 2) == 3"}])
    )
    return str(scored.objects("reward_error")[0])


def verifiers_missing() -> None:
    with patch.dict(sys.modules, {"verifiers": None}):
        load_agent(AgentConfig(source="verifiers:wordle"))


def verifiers_of_another_version() -> None:
    other = ModuleType("verifiers")
    vars(other)["__version__"] = "0.4.0"
    with patch.dict(sys.modules, {"verifiers": other}):
        load_agent(AgentConfig(source="verifiers:wordle"))


MISTAKES: dict[str, Callable[[], object]] = {
    "two-kinds-of-rewards": lambda: validate(
        RewardConfig, {"function": "exact_match", "functions": {"short": "rewards.py:short"}}, "mine.toml"
    ),
    "reward-without-a-name": lambda: validate(RewardConfig, {"functions": {"error": "exact_match"}}, "mine.toml"),
    "unknown-environment": lambda: _environment("retri"),
    "environment-not-in-the-file": lambda: _environment("games.py:Gess"),
    "environment-that-is-no-class": lambda: _environment("games.py:play"),
    "environment-without-methods": lambda: _environment("games.py:Oracle"),
    "environment-of-other-options": lambda: _environment("games.py:Guess", most=9),
    "environment-of-verifiers": lambda: _environment("verifiers:wordle"),
    "template-without-the-observation": lambda: validate(
        EnvironmentConfig, {"source": "retry", "template": "{text}"}, "mine.toml"
    ),
    "environment-that-raises": lambda: _told(row=[{"word": "cat"}]),
    "step-without-done": lambda: _told("5", row=[{"question": "1 to 9>"}]),
    "step-after-the-end": lambda: _told("5", "5", row=[{"question": "1 to 9>"}]),
}
