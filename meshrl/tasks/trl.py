"""Use reward functions that were written for TRL."""

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from meshrl.tasks.function import RewardFunction
from meshrl.tasks.sources import Row

_Rewards: TypeAlias = Sequence[float | None]
TrlReward: TypeAlias = Callable[..., _Rewards | Awaitable[_Rewards]]
"""`reward(prompts, completions, **columns) -> list[float | None]`, async or not."""


def from_trl(function: TrlReward, *, chat: bool = False) -> RewardFunction:
    """Convert a TRL reward function into one for meshrl. It is called with one row at a time.

    Its columns are those of the row, and `answer`. With `chat`, prompts and completions are lists of messages. A reward
    of None, which means "does not apply" in TRL, becomes 0.
    """
    takes = inspect.signature(function).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in takes.values())

    async def reward(prompt: str, completion: str, row: Row) -> float:
        columns = {**row, "prompts": _said("user", prompt, chat), "completions": _said("assistant", completion, chat)}
        values = function(**{name: [value] for name, value in columns.items() if takes_all or name in takes})
        if inspect.isawaitable(values):
            values = await values
        (value,) = values
        return 0.0 if value is None else value

    for own in ("__module__", "__name__", "__qualname__"):
        setattr(reward, own, getattr(function, own, getattr(reward, own)))
    return reward


def _said(role: str, text: str, chat: bool) -> object:
    return [{"role": role, "content": text}] if chat else text
