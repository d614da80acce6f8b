"""Reward functions: the shipped ones, the user's own, and a sandbox for code.

Errors of user code are confined: an exception is reported in its row, and affects only that row.
"""

from meshrl.rewards.builtin import exact_match, finite, overlong_penalty
from meshrl.rewards.function import (
    FunctionReward,
    RewardConfig,
    RewardFunction,
    gathered,
    is_own,
    load_function,
    try_reward,
)
from meshrl.rewards.reasoning import numeric_answer, reasoning_format
from meshrl.rewards.sandbox import code_tests
from meshrl.rewards.trl import from_trl

__all__ = [
    "FunctionReward",
    "RewardConfig",
    "RewardFunction",
    "code_tests",
    "exact_match",
    "finite",
    "from_trl",
    "gathered",
    "is_own",
    "load_function",
    "numeric_answer",
    "overlong_penalty",
    "reasoning_format",
    "try_reward",
]
