"""Environments, which answer a model turn by turn: the user's Python class, whose errors end only their episode.

`environment.source` names the class.
"""

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Protocol, TypeAlias, cast

import numpy as np
from pydantic import Field, JsonValue, field_validator

from meshrl.config import CODE
from meshrl.data import Batch
from meshrl.errors import ConfigError, DataError
from meshrl.mesh import Actor, Gather, Shard, endpoint
from meshrl.roles import RoleConfig
from meshrl.tasks import verifiers
from meshrl.tasks.builtin import exact_match, finite
from meshrl.tasks.function import RewardFunction, awaited, gathered, load_function
from meshrl.tasks.sources import Row
from meshrl.user_code import RAISED, FirstErrors, load_name, unless_cancelled

Step: TypeAlias = tuple[str, float, bool]
"""The result of a step: the observation, the reward of this turn, and whether the episode is over."""


class EnvironmentInstance(Protocol):
    """The class that a user writes. Each episode has an instance, and its `close()`, if it has one, is called last."""

    def reset(self, row: Row, /) -> str | Awaitable[str]:
        """Begin the episode of a task's row, and return the first prompt. The same row must give the same prompt."""
        ...

    def step(self, completion: str, /) -> Step | Awaitable[Step]:
        """Answer the model's completion of this turn."""
        ...


class EnvironmentConfig(RoleConfig):
    """The class that answers the model."""

    role = "Environment"

    backend: str = "function"
    """The backend that implements the role."""
    source: Annotated[str, CODE]
    """The environment: `retry` (`Retry`), `file.py:Class`, `package.module:Class`, or `reward:NAME`, one turn that is
    scored by the reward function NAME."""
    options: Mapping[str, JsonValue] = Field(default={})
    """Keyword arguments for each instance."""
    turns: int = Field(default=8, gt=0)
    """Turns of an episode at most. An episode that is not over then is `truncated`."""
    template: str = "{observation}"
    """Template of the text that the model sees for an observation. For a chat model it includes the special tokens,
    such as `"\\n<|im_start|>user\\n{observation}<|im_end|>\\n<|im_start|>assistant\\n"`."""
    concurrency: int = Field(default=64, gt=0)
    """Calls of async methods that run at once."""

    @field_validator("template")
    @classmethod
    def _shows_the_observation(cls, template: str) -> str:
        if template.count("{observation}") != 1:
            raise ValueError("must contain {observation} once, for the environment's text")
        return template


class Environment(Actor, ABC):
    """The role that answers a model, row by row. All calls of an episode go to the rank that began it."""

    @endpoint
    @abstractmethod
    async def reset(self, batch: Shard[Batch]) -> Gather[Batch]:
        """Begin an episode for each row, by `episode` (int64). Adds `prompt` and `reward_error` (text or None)."""

    @endpoint
    @abstractmethod
    async def step(self, batch: Shard[Batch]) -> Gather[Batch]:
        """Answer each row's `completion`, the text of its last turn.

        Adds `observation` (text), `rewards` (float32, for this turn), `done` (bool) and `reward_error`. A row with an
        error is done.
        """

    @endpoint
    @abstractmethod
    async def close(self, batch: Shard[Batch]) -> Gather[Batch]:
        """Drop the episodes of these rows, which end before the environment says so."""


class FunctionEnvironment(Environment):
    """Calls the user's class. An exception is reported in its row, and ends only that episode."""

    def __init__(self, config: EnvironmentConfig) -> None:
        self._make = load_environment(config)
        self._concurrency = config.concurrency
        self._instances: dict[int, EnvironmentInstance] = {}
        self._errors = FirstErrors("an environment raised; its episode ends with reward 0")

    async def reset(self, batch: Batch) -> Batch:
        """Make an instance for each row."""
        rows = batch.objects("row") if "row" in batch else ({},) * len(batch)
        answers = batch.objects("answer") if "answer" in batch else (None,) * len(batch)
        prompts, numbers = batch.objects("prompt"), _numbers(batch)

        async def one(index: int) -> tuple[str, str | None]:
            row = copy.deepcopy(cast("Row", rows[index]))
            row |= {"prompt": prompts[index]} | ({} if answers[index] is None else {"answer": answers[index]})
            try:
                instance = self._instances[numbers[index]] = self._make()
                return _text(await awaited(instance.reset(row)), "reset"), None
            except RAISED as error:  # a user's class may raise anything, which is recorded
                unless_cancelled(error)
                return str(prompts[index]), await self._fail(numbers[index], error)

        begun = await gathered(one, len(batch), self._concurrency)
        return batch.assign(prompt=[text for text, _ in begun], reward_error=[error for _, error in begun])

    async def step(self, batch: Batch) -> Batch:
        """Call each row's instance, and drop it if the episode is done. DataError if the row has no instance here."""
        texts, numbers = batch.objects("completion"), _numbers(batch)

        async def one(index: int) -> tuple[Step, str | None]:
            number = numbers[index]
            if number not in self._instances:
                raise DataError(f"episode {number} has no environment on this rank: it is over, or never began here")
            try:
                answer = _checked(await awaited(self._instances[number].step(str(texts[index]))))
            except RAISED as error:
                unless_cancelled(error)
                return ("", 0.0, True), await self._fail(number, error)
            _, _, done = answer
            return answer, await self._drop(number) if done else None

        steps = await gathered(one, len(batch), self._concurrency)
        return batch.assign(
            observation=[observation for (observation, _, _), _ in steps],
            rewards=np.array([reward for (_, reward, _), _ in steps], np.float32),
            done=np.array([done for (_, _, done), _ in steps], np.bool_),
            reward_error=[error for _, error in steps],
        )

    async def close(self, batch: Batch) -> Batch:
        """Drop the rows' instances."""
        for number in _numbers(batch):
            await self._drop(number)
        return batch

    async def _drop(self, number: int) -> str | None:
        """Drop an instance. Returns the error of its `close`, if it has one that raised."""
        instance = self._instances.pop(number, None)
        try:
            close: Callable[[], object] | None = getattr(instance, "close", None)
            if close is not None:
                await awaited(close())
        except RAISED as error:
            unless_cancelled(error)
            return self._errors.told(error)
        return None

    async def _fail(self, number: int, error: BaseException) -> str:
        await self._drop(number)
        return self._errors.told(error)


class _OneTurn:
    """An environment of one turn, scored by a reward function."""

    def __init__(self, function: RewardFunction) -> None:
        self._function = function
        self._row: Row = {}

    def reset(self, row: Row) -> str:
        self._row = row
        return str(row["prompt"])

    async def step(self, completion: str) -> Step:
        return "", finite(await awaited(self._function(str(self._row["prompt"]), completion, self._row))), True


class Retry:
    """Repeated attempts at the row's answer. Reward: 1 for the first, times `decay` for each later one, 0 if wrong."""

    def __init__(self, decay: float = 0.5, again: str = "{prompt}") -> None:
        """`again`: the text after a wrong attempt, with {prompt} and {completion}."""
        self._worth = 1.0
        self._decay = decay
        self._again = again
        self._row: Row = {}

    def reset(self, row: Row) -> str:
        """Return the task's prompt."""
        self._row = row
        return str(row["prompt"])

    def step(self, completion: str) -> Step:
        """Compare the completion with the answer."""
        prompt = str(self._row["prompt"])
        if exact_match(prompt, completion, self._row):
            return "", self._worth, True
        self._worth *= self._decay
        return self._again.format(prompt=prompt, completion=completion), 0.0, False


_SHIPPED: Mapping[str, type[EnvironmentInstance]] = {"retry": Retry}


def load_environment(config: EnvironmentConfig) -> Callable[[], EnvironmentInstance]:
    """Return the constructor of `config.source`. ConfigError if it is not a class with `reset` and `step`."""
    kind, _, name = config.source.partition(":")
    if kind == verifiers.NAME:
        raise ConfigError(
            f"environment {config.source!r}: an environment of that library is an agent: take the algorithm agent, "
            f'and write [agent] with source = "{config.source}" in place of [environment]'
        )
    if kind == "reward":
        function = load_function(name)
        return lambda: _OneTurn(function)
    shipped = (*_SHIPPED, "reward:NAME")
    cls = _SHIPPED.get(config.source) or load_name("environment", config.source, shipped, inspect.isclass)
    if not inspect.isclass(cls):
        raise ConfigError(f"environment {config.source!r}: is {cls!r}, not a class")
    if missing := [name for name in ("reset", "step") if not callable(getattr(cls, name, None))]:
        raise ConfigError(
            f"environment {config.source!r}: has no {' and no '.join(missing)}: it needs reset(row) -> prompt and "
            "step(completion) -> (observation, reward, done)"
        )
    try:
        inspect.signature(cls).bind(**config.options)
    except TypeError as error:
        raise ConfigError(
            f"environment {config.source!r}: options {dict(config.options)} do not fit: {error}"
        ) from error
    return lambda: cast("EnvironmentInstance", cls(**config.options))


def _numbers(batch: Batch) -> list[int]:
    return cast("list[int]", batch.row("episode").tolist())


def _text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{what} must return a text, not {value!r}")
    return value


def _checked(result: object) -> Step:
    if not isinstance(result, tuple) or len(cast("tuple[object, ...]", result)) != 3:
        raise TypeError(f"step must return (observation, reward, done), not {result!r}")
    observation, reward, done = cast("tuple[object, object, object]", result)
    return _text(observation, "the observation that step returns"), finite(reward), bool(done)
