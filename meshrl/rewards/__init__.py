"""TODO-room."""

from meshrl.rewards.builtin import exact_match, finite, overlong_penalty
from meshrl.rewards.function import RewardConfig, RewardFunction, gathered, load_function
from meshrl.rewards.sandbox import code_tests

__all__ = [
    "RewardConfig",
    "RewardFunction",
    "code_tests",
    "exact_match",
    "finite",
    "gathered",
    "load_function",
    "overlong_penalty",
]
