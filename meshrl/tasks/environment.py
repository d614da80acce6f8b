"""Environments, which answer a model turn by turn: the user's Python class, whose errors end only their episode.

`environment.source` names the class.
"""

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Final, NamedTuple, Protocol, TypeAlias, cast

import numpy as np
from pydantic import Field, JsonValue, field_validator

from meshrl.config import CODE
from meshrl.data import IMAGES, OUTCOMES, Batch, Images, OnError, mark_of, name_of, names_in, opened, unmarked
from meshrl.errors import ConfigError, DataError, is_unknown, shortened
from meshrl.mesh import Actor, Gather, Shard, endpoint
from meshrl.roles import RoleConfig
from meshrl.tasks import verifiers
from meshrl.tasks.builtin import exact_match, finite
from meshrl.tasks.function import PURE, RewardFunction, awaited, gathered, load_function, nothing
from meshrl.tasks.images import file_in
from meshrl.tasks.sandboxes import Sandboxes, check_sandbox, started
from meshrl.tasks.sources import Row
from meshrl.tasks.user_process import CodeHere, UserCode, has_processes
from meshrl.user_code import RAISED, FirstErrors, load_name, signature_of, tried_again, unless_cancelled

Observation: TypeAlias = str | Sequence[object]
"""What a model is shown: a text, or a list of texts and images. An image is its file's bytes, or an image of Pillow."""
Step: TypeAlias = tuple[Observation, float, bool]
"""The result of a step: the observation, the reward of this turn, and whether the episode is over."""


class _ObservedText(NamedTuple):
    """An observation as a text, with the files of the images that it names."""

    text: str
    files: Mapping[str, bytes]


_LIMIT: Final = "the environment took longer than environment.turn_timeout"


class EnvironmentInstance(Protocol):
    """The class that a user writes. Each episode has an instance, and its `close()`, if it has one, is called last."""

    def reset(self, row: Row, /) -> Observation | Awaitable[Observation]:
        """Begin the episode of a task's row, and return the first prompt. The same row must give the same prompt.

        With `environment.sandbox` it has a second parameter, `sandbox` (`Sandbox`).
        """
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
    turn_timeout: float | None = Field(default=None, gt=0)
    """Time limit of each call of a method in seconds. Beyond it the episode fails."""
    sandbox: str = ""
    """The sandbox of each episode, which `reset(row, sandbox)` gets: `local`, `container:IMAGE`, or one that a package
    adds. It is stopped after `close`."""
    errors: OnError = "mask"
    """What becomes of an episode whose environment raises. `mask`: its reward is unknown: nothing is learned from it.
    `zero`: its reward is 0. `stop`: the run ends."""

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
        """Begin an episode for each row, by `episode` (int64).

        Adds `prompt`, `rewards` (float32, 0, or NaN if it is unknown already) and `reward_error` (text or None). If
        prompts name images, `images` has them.
        """

    @endpoint
    @abstractmethod
    async def step(self, batch: Shard[Batch]) -> Gather[Batch]:
        """Answer each row's `completion`, the text of its last turn.

        Adds `observation` (text), `rewards` (float32, for this turn, NaN if it is unknown whatever `errors` says),
        `done` (bool) and `reward_error`. A row with an error is done. If observations name images, `images` has them.
        """

    @endpoint
    @abstractmethod
    async def close(self, batch: Shard[Batch]) -> Gather[Batch]:
        """Drop the episodes of these rows, which end before the environment says so."""


class FunctionEnvironment(Environment):
    """Calls the user's class. An exception is reported in its row, and ends only that episode."""

    def __init__(self, config: EnvironmentConfig) -> None:
        make = partial(Instances, config)
        runs_here = config.source in _SHIPPED or config.source.removeprefix("reward:") in PURE or not has_processes()
        self._code = CodeHere(make) if runs_here else UserCode(make, config.turn_timeout, _LIMIT)
        self._concurrency = config.concurrency
        self._has_sandbox = bool(config.sandbox)
        self._running: set[int] = set()
        self._errors = FirstErrors(f"an environment raised; its episode gets {OUTCOMES[config.errors]}")

    async def reset(self, batch: Batch) -> Batch:
        """Make an instance for each row."""
        rows = batch.objects("row") if "row" in batch else ({},) * len(batch)
        answers = batch.objects("answer") if "answer" in batch else (None,) * len(batch)
        prompts, numbers = batch.objects("prompt"), _numbers(batch)
        for index, prompt in enumerate(prompts):
            if not isinstance(prompt, str):
                raise DataError(
                    f"{batch.place(index)}: the prompt is a list of messages, and an environment begins with a text: "
                    "set task.prompt to a template such as {prompt[0][content]}; `reset` gets the whole row"
                )

        async def one(index: int) -> tuple[_ObservedText, float, str | None]:
            row = cast("Row", rows[index]) | {"prompt": prompts[index]}
            row |= {} if answers[index] is None else {"answer": answers[index]}

            async def begin() -> _ObservedText:
                await self._drop(numbers[index])  # it is begun again
                self._running.add(numbers[index])
                if self._has_sandbox:
                    await started(self._code.call("start", numbers[index], check=nothing), "environment.turn_timeout")
                return await self._code.call("reset", numbers[index], copy.deepcopy(row), check=_prompt)

            try:
                return await tried_again(begin), 0.0, None
            except RAISED as error:  # a user's class may raise anything, which is recorded
                unless_cancelled(error)
                return _ObservedText(str(prompts[index]), {}), *await self._fail(numbers[index], error)

        begun = await gathered(one, len(batch), self._concurrency)
        return _with_images(batch, "prompt", [shown for shown, _, _ in begun]).assign(
            rewards=np.array([reward for _, reward, _ in begun], np.float32),
            reward_error=[error for _, _, error in begun],
        )

    async def step(self, batch: Batch) -> Batch:
        """Call each row's instance, and drop it if the episode is done. DataError if the row has no instance here."""
        texts, numbers = batch.objects("completion"), _numbers(batch)

        async def one(index: int) -> tuple[tuple[_ObservedText, float, bool], str | None]:
            number = numbers[index]
            if number not in self._running:
                raise DataError(f"episode {number} has no environment on this rank: it is over, or never began here")
            try:
                answer = await self._code.call("step", number, str(texts[index]), check=_checked)
            except RAISED as error:
                unless_cancelled(error)
                reward, message = await self._fail(number, error)
                return (_ObservedText("", {}), reward, True), message
            _, _, done = answer
            return answer, await self._drop(number) if done else None

        steps = await gathered(one, len(batch), self._concurrency)
        return _with_images(batch, "observation", [shown for (shown, _, _), _ in steps]).assign(
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
        if number not in self._running:
            return None
        self._running.remove(number)
        try:
            await self._code.call("close", number, check=nothing)
        except RAISED as error:
            unless_cancelled(error)
            return self._errors.describe(error)
        return None

    async def _fail(self, number: int, error: BaseException) -> tuple[float, str]:
        """Drop an instance. Returns the reward of its episode, NaN if it is unknown in any case, and the error."""
        await self._drop(number)
        return np.nan if is_unknown(error) else 0.0, self._errors.describe(error)


class Instances(Sandboxes):
    """The environments of running episodes, in their process. A method returns what the user's returns."""

    def __init__(self, config: EnvironmentConfig) -> None:
        """Load the class. Raises as `load_environment`."""
        super().__init__(config.sandbox)
        self._has_sandbox = bool(config.sandbox)
        self._make = load_environment(config)
        self._instances: dict[int, EnvironmentInstance] = {}

    def reset(self, number: int, row: Row) -> object:
        """Make an instance, and call its `reset`."""
        instance = self._instances[number] = self._make()
        reset = cast("Callable[..., object]", instance.reset)
        return reset(row, sandbox=self.of(number)) if self._has_sandbox else reset(row)

    def step(self, number: int, completion: str) -> object:
        """Call an instance's `step`. RuntimeError if another episode has ended the process that had it."""
        if number not in self._instances:
            raise RuntimeError("the environment is lost, because another episode ended their process")
        return self._instances[number].step(completion)

    def close(self, number: int) -> object:
        """Drop an instance, call its `close`, if it has one, and stop its sandbox."""
        close: Callable[[], object] | None = getattr(self._instances.pop(number, None), "close", None)
        if self._has_sandbox:
            return self._close_all(number, close)
        return close() if close is not None else None

    async def _close_all(self, number: int, close: Callable[[], object] | None) -> None:
        try:
            if close is not None:
                await awaited(close())
        finally:
            await self.stop(number)


class _OneTurn:
    """An environment of one turn, scored by a reward function."""

    def __init__(self, function: RewardFunction) -> None:
        self._function = function
        self._row: Row = {}

    def reset(self, row: Row) -> str:
        self._row = row
        return str(row["prompt"])

    def step(self, completion: str) -> Step | Awaitable[Step]:
        reward = self._function(str(self._row["prompt"]), completion, self._row)
        return self._later(reward) if inspect.isawaitable(reward) else ("", finite(reward), True)

    @staticmethod
    async def _later(reward: Awaitable[float]) -> Step:
        return "", finite(await reward), True


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
        signature_of(cls).bind(**config.options)
    except TypeError as error:
        raise ConfigError(
            f"environment {config.source!r}: options {dict(config.options)} do not fit: {error}"
        ) from error
    check_sandbox("environment.sandbox", config.sandbox, [cast("type[EnvironmentInstance]", cls).reset])
    return lambda: cast("EnvironmentInstance", cls(**config.options))


def _numbers(batch: Batch) -> list[int]:
    return cast("list[int]", batch.row("episode").tolist())


def _with_images(batch: Batch, name: str, shown: Sequence[_ObservedText]) -> Batch:
    """Add a column of texts, and the `images` that each names: new ones, and those that its row had."""
    images = batch.columns.get(IMAGES)
    had = images if isinstance(images, Images) else Images([()] * len(batch), {})
    pool = {**had.pool, **{key: file for each in shown for key, file in each.files.items()}}
    texts = [unmarked(each.text, {*own, *each.files}) for each, own in zip(shown, had, strict=True)]
    return batch.assign(images=Images(map(names_in, texts), pool), **{name: texts})


def _prompt(value: object) -> _ObservedText:
    return _shown(value, "reset")


def _shown(value: object, what: str) -> _ObservedText:
    if not isinstance(value, str | list | tuple):
        raise TypeError(f"{what} must return a text, or a list of texts and images, not {value!r}")
    text, files = "", dict[str, bytes]()
    for part in [value] if isinstance(value, str) else cast("Sequence[object]", value):
        if isinstance(part, str):
            text += part
        elif (data := file_in(part, what)) is not None:
            opened(data, what)
            files[name_of(data)] = data
            text += mark_of(name_of(data))
        else:
            raise TypeError(f"{what} returned {shortened(part)}: an image is the bytes of its file, or one of Pillow")
    return _ObservedText(text, files)


def _checked(result: object) -> tuple[_ObservedText, float, bool]:
    if not isinstance(result, tuple) or len(cast("tuple[object, ...]", result)) != 3:
        raise TypeError(f"step must return (observation, reward, done), not {result!r}")
    observation, reward, done = cast("tuple[object, object, object]", result)
    return _shown(observation, "step"), finite(reward), bool(done)
