"""Rewards that are Python functions: the shipped ones, and the user's, whose errors are confined to their rows."""

import asyncio
import copy
import importlib.util
import inspect
import math
import re
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Annotated, Final, Self, SupportsFloat, TypeAlias, TypeVar, cast

import numpy as np
from pydantic import (
    Field,
    PlainSerializer,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from meshrl import log
from meshrl.config import CODE
from meshrl.data import OUTCOMES, Batch, OnError, Prompt, with_rewards
from meshrl.errors import ConfigError, described, did_you_mean, is_unknown
from meshrl.roles import BackendOptions, Reward, RoleConfig, backends, models_of
from meshrl.tasks import harness
from meshrl.tasks.builtin import exact_match, finite, math_answer, numeric_answer, reasoning_format, reasoning_gym
from meshrl.tasks.judge import NAME as JUDGE
from meshrl.tasks.judge import Judge, JudgeConfig, Judged
from meshrl.tasks.sandbox import check_safe, code_tests
from meshrl.tasks.sandboxes import Sandboxes, check_awaits, check_sandbox, started, takes_sandbox
from meshrl.tasks.sources import Row
from meshrl.tasks.user_process import CodeHere, UserCode, has_processes
from meshrl.user_code import (
    RAISED,
    FirstErrors,
    is_async,
    load_name,
    pickled,
    signature_of,
    tried_again,
    unless_cancelled,
)

T = TypeVar("T")

RewardFunction: TypeAlias = Callable[[str, str, Row], float | Awaitable[float]]
"""`reward(prompt, completion, row) -> float`, plain or async."""
_NOBODY: Final = "no reward function judges the row"
_LIMIT: Final = "the reward took longer than reward.row_timeout"


class NotJudged(Exception):
    """Raised by a reward function that does not judge the row, which is no error. Others may judge it."""


def named(function: str | Callable[..., object]) -> str:
    """Return the name of a function in a configuration file: `module:name`, or `file.py:name` in the main program.

    The name of a function that no file can name, such as a lambda, contains `<`.
    """
    if isinstance(function, str):
        return function
    if shipped := [name for name, each in _SHIPPED.items() if each is function]:
        return shipped[0]
    name: str = getattr(function, "__qualname__", f"<{type(function).__name__}>")
    main: object = getattr(sys.modules["__main__"], "__file__", None)
    if function.__module__ == "__main__" and isinstance(main, str):
        return f"{Path(main).resolve()}:{name}"
    return f"{function.__module__}:{name}"


Function: TypeAlias = Annotated[str | Callable[..., object], CODE, PlainSerializer(named, when_used="json")]
"""A reward function, or its name."""


class RewardConfig(RoleConfig):
    """The function that scores completions."""

    role = "Reward"

    backend: str = "function"
    """The backend that implements the role."""
    function: Function = "exact_match"
    """The reward function: `exact_match`, `numeric_answer`, `math_answer`, `reasoning_format`, `reasoning_gym` (the
    dataset's scorer), `lm_eval` or `lm_eval:MEASURE` (the scorer of a task by name), `code_tests`
    (`sandbox.code_tests`), `judge` (a model, of the table `judge`), `file.py:name` or `package.module:name`. In Python
    also the function itself.

    Beware of scorers that give partial credit: some give nearly full marks to junk after the right answer.
    """
    functions: Mapping[str, Function] = Field(default={})
    """Several functions instead of `function`, as a table with names of your choice, or as a list. The reward is their
    weighted sum."""
    weights: Mapping[str, float] = Field(default={})
    """Weights of `functions`, as a table with the same names, or as a list in the same order. Default: 1 each."""
    judge: JudgeConfig | None = None
    """The model that judges, if `judge` is among the functions."""
    concurrency: int = Field(default=64, gt=0)
    """Calls of an async function that run at once."""
    row_timeout: float | None = Field(default=None, gt=0)
    """Time limit of a call in seconds. Beyond it the row gets an error, and a function that is not async is ended."""
    sandbox: str = ""
    """The sandbox of each call of a function with a parameter `sandbox`: `local`, `container:IMAGE`, or one that a
    package adds."""
    unsafe: bool = False
    """Allow `code_tests` to run a model's code without a sandbox, with access to this user's files and processes."""
    errors: OnError = "mask"
    """What becomes of a row on which a function raises, takes too long or returns no finite number. `mask`: its reward
    is unknown, so nothing is learned from it. `zero`: the function counts as 0. `stop`: the run ends."""

    @field_validator("backend")
    @classmethod
    def _calls_a_function(cls, backend: str) -> str:
        if _holds_a_model(backend):
            raise ValueError(
                "a reward of this backend needs a model: give `model`, its folder, and leave `function` out; "
                '"function" calls a Python function'
            )
        return backend

    @classmethod
    def _options_schema(cls, backend: str) -> type[BackendOptions] | None:
        return None if _holds_a_model(backend) else super()._options_schema(backend)

    @model_validator(mode="before")
    @classmethod
    def _lists_have_names(cls, table: object) -> object:
        functions = table.get("functions") if isinstance(table, dict) else None
        if isinstance(table, dict) and isinstance(table.get("function"), list | tuple):
            raise ValueError("`function` is a single reward: use `functions`, a list or a table, for several")
        if not isinstance(table, dict) or not isinstance(functions, list | tuple):
            return table
        names = [named(each).rpartition(":")[2].rpartition(".")[2] for each in functions]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"functions: several are called {twice.pop()}: give a table, with a name for each")
        weights = table.get("weights", {})
        if isinstance(weights, list | tuple):
            if len(weights) != len(names):
                raise ValueError(f"weights: there are {len(weights)} for {len(names)} functions: give one for each")
            weights = dict(zip(names, weights, strict=True))
        return {**table, "functions": dict(zip(names, functions, strict=True)), "weights": weights}

    @model_validator(mode="after")
    def _names_fit(self) -> Self:
        if (self.judge is None) == (JUDGE in self.parts.values()):
            raise ValueError(
                'function "judge" and the table `judge` belong together: give [reward.judge] a url and a model, and '
                'name "judge" as the function or among `functions`'
            )
        if self.functions and "function" in self.model_fields_set:
            raise ValueError("`function` is one reward and `functions` are several: remove one of them")
        for name in self.functions:
            if not re.fullmatch(r"\w+", name) or name == "error":
                raise ValueError(f"functions.{name}: a name may have letters, digits and _, and must not be `error`")
        for name, weight in self.weights.items():
            if name not in self.functions:
                has = did_you_mean(name, self.functions) or f"there are {', '.join(self.functions) or 'none'}"
                raise ValueError(f"weights.{name}: no function in `functions` has this name; {has}")
            if not math.isfinite(weight):
                raise ValueError(f"weights.{name}: must be finite, not {weight}")
        return self

    @model_serializer(mode="wrap")
    def _one_form(self, dump: SerializerFunctionWrapHandler) -> dict[str, object]:
        """Omit the default of `function` next to `functions`, so that the result can be read back."""
        table = cast("dict[str, object]", dump(self))
        if self.functions:
            table.pop("function", None)
        return table

    @property
    def parts(self) -> Mapping[str, str | Callable[..., object]]:
        """Each function by the name of its reward. "" is the name of a single function."""
        return self.functions or {"": self.function}

    @property
    def called(self) -> Mapping[str, str | Callable[..., object]]:
        """The parts that are functions: all but the judge."""
        return {name: function for name, function in self.parts.items() if function != JUDGE}


def _holds_a_model(backend: str) -> bool:
    """True if a backend's reward is a model, which needs another table than `RewardConfig`."""
    return backend in backends() and models_of(backend) == "read"


@dataclass(frozen=True)
class _Part:
    name: str
    function: RewardFunction | None
    """None: the judge."""
    shipped: bool
    weight: float


class FunctionReward(Reward):
    """Calls each function once for each row. An exception is reported in the row, and affects only that reward."""

    def __init__(self, config: RewardConfig) -> None:
        if "code_tests" in config.parts.values() and not config.unsafe:
            check_safe()
        own = placed([*config.called.values()], config.row_timeout, config.sandbox)
        functions = dict(zip(config.called, own, strict=True))
        self._parts = [
            _Part(name, functions.get(name), not is_own(given), config.weights.get(name, 1.0))
            for name, given in config.parts.items()
        ]
        self._judge = Judge(config.judge) if config.judge else None
        self._concurrency = config.concurrency
        self._on_error: OnError = config.errors
        self._errors = FirstErrors(f"a reward function gave no reward; its row gets {OUTCOMES[config.errors]}")

    async def score(self, batch: Batch) -> Batch:
        """Add `rewards` and `reward_error`. For `functions`, also add `reward_NAME`, float32, before its weight.

        With a judge also add `judge_prompt` and `judge_answer`, text or None, and with its repeats
        `reward_judge_agreement`, float32.

        A function's `row` is the task's, with the rendered `answer`. `reward_NAME` is NaN where its function does not
        judge the row, or failed and does not count as 0.
        """
        prompts, completions = batch.objects("prompt"), batch.objects("completion")
        answers = batch.objects("answer") if "answer" in batch else ("",) * len(batch)
        rows = batch.objects("row") if "row" in batch else ({},) * len(batch)
        judged = await self._judge.judge(batch) if self._judge else None

        async def one(call: int) -> tuple[float, str | None]:
            index, at = divmod(call, len(self._parts))
            part = self._parts[at]
            if part.function is None:
                return self._with_message(part, *_outcome(judged, index))
            row = cast("Row", rows[index])
            # The user's function may change its row, but a batch is immutable.
            row = dict(row) if part.shipped else copy.deepcopy(row)
            if str(row.get("answer")) != answers[index]:
                row["answer"] = copy.copy(answers[index])
            value, error = await boundary(part.function, cast("str", prompts[index]), str(completions[index]), row)
            return self._with_message(part, value, error)

        size = len(self._parts)
        scored = await gathered(one, len(batch) * size, self._concurrency)
        values = np.array([value for value, _ in scored], np.float64).reshape(len(batch), size)
        texts = [[text for _, text in scored[at : at + size] if text] for at in range(0, len(scored), size)]
        nobody = cast("list[bool]", np.isnan(values).all(axis=1).tolist())
        errors = ["; ".join(own) or (_NOBODY if alone else None) for own, alone in zip(texts, nobody, strict=True)]
        if any(errors) and "loss_mask" in batch:
            batch = await batch.load("loss_mask")
        rewards = np.nan_to_num(values) @ np.array([part.weight for part in self._parts])
        failed = np.array([text is not None for _, text in scored], np.bool_).reshape(values.shape)
        rewards[(failed & np.isnan(values)).any(axis=1)] = np.nan
        if self._on_error == "mask":
            values[failed] = np.nan
        names = [part.name for part in self._parts if part.name]
        return with_rewards(batch, rewards, errors, self._on_error).assign(
            **{f"reward_{name}": values[:, at].astype(np.float32) for at, name in enumerate(names)},
            **(judged.columns() if judged else {}),
        )

    def _with_message(self, part: _Part, value: float, error: BaseException | None) -> tuple[float, str | None]:
        """Return a value, and its error as text with the name of its function."""
        text = self._errors.describe(error) if error else None
        return value, f"{part.name}: {text}" if text and part.name else text


def _outcome(judged: Judged | None, row: int) -> tuple[float, BaseException | None]:
    """Return a row's verdict, or NaN and why there is none."""
    score = judged.scores[row] if judged else math.nan
    return (math.nan, score) if isinstance(score, Exception) else (score, None)


class Loaded(Sandboxes):
    """The reward functions of a role, in their process."""

    def __init__(self, functions: Sequence[str | Callable[..., object]], sandbox: str) -> None:
        """Load them. Raises ConfigError as `load_function` and `check_sandbox`."""
        super().__init__(sandbox)
        self._functions: Sequence[Callable[..., object]] = [load_function(function) for function in functions]
        takes = any(map(takes_sandbox, self._functions))
        check_sandbox("reward.sandbox", sandbox if takes else "", self._functions)

    def prepare(self, at: int, number: int) -> object:
        """Start the sandbox of a call, if its function takes one."""
        return self.start(number) if takes_sandbox(self._functions[at]) else None

    def judge(self, at: int, prompt: str, completion: str, row: Row, number: int | None = None) -> object:
        """Return what a function returns. `number`: of the sandbox, if there is one."""
        function = self._functions[at]
        given = {} if number is None or not takes_sandbox(function) else {"sandbox": self.of(number)}
        return function(prompt, completion, row, **given)


def placed(
    functions: Sequence[str | Callable[..., object]], seconds: float | None, sandbox: str = ""
) -> list[RewardFunction]:
    """Return the functions, with those that run in their own process. All raise TimeoutError after `seconds`.

    Shipped functions that call no other library run here, as do all in virtual time, and a user's that cannot be
    pickled.
    """
    own = [function for function in functions if has_processes() and _is_sent(function, seconds)]
    code = UserCode(partial(Loaded, own, sandbox), seconds, _LIMIT) if own else None

    def one(function: str | Callable[..., object]) -> RewardFunction:
        if code is not None and function in own:
            called = partial(_in_sandbox, code) if sandbox else partial(code.call, "judge", check=finite)
            return partial(called, own.index(function))
        here = load_function(function)
        if takes_sandbox(here):
            here = partial(_in_sandbox, CodeHere(partial(Loaded, [function], sandbox)), 0)
        return here if seconds is None else _in_time(here, seconds)

    return [one(function) for function in functions]


async def _in_sandbox(code: UserCode | CodeHere, at: int, prompt: str, completion: str, row: Row) -> float:
    """Judge a row by a function that may take a sandbox."""
    number = next(_numbers)
    try:
        await started(code.call("prepare", at, number, check=nothing), _LIMIT)
        return await code.call("judge", at, prompt, completion, row, number, check=finite)
    finally:
        await code.call("stop", number, check=nothing)


_numbers: Final = count()


def nothing(value: object) -> None:
    """Whatever is returned."""


def _in_time(function: RewardFunction, seconds: float) -> RewardFunction:
    """Wrap a function of this process so that what it awaits ends after `seconds`."""

    async def limited(prompt: str, completion: str, row: Row) -> object:
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                return await awaited(function(prompt, completion, row))
        except TimeoutError as error:
            if limit.expired():
                raise TimeoutError(f"{_LIMIT} = {seconds:g}") from error
            raise

    return cast("RewardFunction", limited)


def _is_sent(function: str | Callable[..., object], seconds: float | None) -> bool:
    """True if a function runs in another process. ConfigError for a plain one that can be neither sent nor ended."""
    if isinstance(function, str) or named(function) in PURE:
        return named(function) not in PURE
    load_function(function)  # what is wrong with it is told here
    try:
        pickled(function)
    except Exception as error:
        if seconds is not None and not is_async(function):
            raise ConfigError(
                f"reward.row_timeout cannot end {named(function)}, which cannot be pickled for a process of its own: "
                f"{described(error)}. Put what it refers to into a file, or leave row_timeout out"
            ) from error
        log.warning(
            f"reward function {named(function)} runs in this process, where it holds up other work while it computes, "
            f"and signals and the time limits of libraries may not work: it cannot be pickled: {described(error)}"
        )
        return False
    return True


async def awaited(value: object) -> object:
    """Return a value, or what it gives when it is awaited."""
    return await value if inspect.isawaitable(value) else value


async def boundary(
    function: RewardFunction, prompt: str, completion: str, row: Row
) -> tuple[float, BaseException | None]:
    """Return the reward, or 0.0 and the function's exception, or the error of an invalid result.

    The reward is NaN if the function does not judge the row, if it discards it, and after a fault of the machine.
    """
    try:
        return finite(await tried_again(lambda: awaited(function(prompt, completion, row)))), None
    except NotJudged:
        return math.nan, None
    except RAISED as error:  # a user's function may raise anything, which is recorded
        unless_cancelled(error)
        return math.nan if is_unknown(error) else 0.0, error


def try_reward(
    function: str | Callable[..., object],
    prompt: str,
    completions: Sequence[str],
    row: Row,
    seconds: float,
    sandbox: str = "",
) -> list[tuple[float, BaseException | None]]:
    """Return the results of `boundary` for the completions. Empty if they take longer than `seconds`."""
    (reward,), results = placed([function], seconds, sandbox), list[tuple[float, BaseException | None]]()

    async def judge() -> None:
        for completion in completions:
            results.append(await boundary(reward, prompt, completion, copy.deepcopy(row)))

    thread = threading.Thread(target=lambda: asyncio.run(judge()), name="meshrl-reward", daemon=True)
    thread.start()
    thread.join(seconds)
    return results if len(results) == len(completions) else []


async def gathered(one: Callable[[int], Awaitable[T]], count: int, concurrency: int) -> list[T]:
    """Return the results of `one` for 0 to count - 1, in order, with at most `concurrency` calls at once."""
    turns = asyncio.Semaphore(concurrency)

    async def in_turn(index: int) -> T:
        async with turns:
            return await one(index)

    return await asyncio.gather(*map(in_turn, range(count)))


PURE: Final = frozenset({"exact_match", "numeric_answer", "reasoning_format", "code_tests"})
"""Shipped functions that call no other library."""
_NEEDS: Final = {
    "lm_eval": ("lm_eval", "evals"),
    "reasoning_gym": ("reasoning_gym", "tasks"),
    "math_answer": ("math_verify", "maths"),
}
"""The library that a shipped function calls, and the extra that installs it."""
_SHIPPED: dict[str, RewardFunction] = {
    "exact_match": exact_match,
    "reasoning_gym": reasoning_gym,
    "math_answer": math_answer,
    "numeric_answer": numeric_answer,
    "reasoning_format": reasoning_format,
    "code_tests": code_tests,
    harness.NAME: harness.scorer(""),
}


def is_own(function: str | Callable[..., object]) -> bool:
    """True if a reward function is the user's, not a shipped one."""
    return _shipped_name(function) not in _SHIPPED and function not in _SHIPPED.values()


def _shipped_name(function: str | Callable[..., object]) -> str | Callable[..., object]:
    """Return a name without the measure of `lm_eval:MEASURE`."""
    own, colon, _ = function.partition(":") if isinstance(function, str) else ("", "", "")
    return own if colon and own == harness.NAME else function


def load_function(function: str | Callable[..., object]) -> RewardFunction:
    """Return the function that `RewardConfig.function` names or is. ConfigError if there is none."""
    name = named(function)
    if not isinstance(function, str):
        _check_parameters(name, function)
        return cast("RewardFunction", function)
    if "<" in name.rpartition(":")[2]:
        raise ConfigError(
            f"reward function {name!r} existed only in the memory of its program, like lambdas and inner functions: "
            "put it into a file, and name it as file.py:name"
        )
    short = name.rpartition(":")[2]
    if name.startswith("meshrl.") and short in _SHIPPED:  # so a run is recorded that was given the function itself
        name = short
    if (shipped := str(_shipped_name(name))) in _SHIPPED:
        library, extra = _NEEDS.get(shipped, ("", ""))
        if library and importlib.util.find_spec(library) is None:
            raise ConfigError(f"reward function {name!r} needs {library}: pip install 'meshrl[{extra}]'")
        return _SHIPPED[name] if name in _SHIPPED else harness.scorer(name)
    own = load_name("reward function", name, _SHIPPED, inspect.isfunction)
    if not callable(own):
        raise ConfigError(f"reward function {name!r}: is {own!r}, not a function")
    _check_parameters(name, own)
    return cast("RewardFunction", own)


def _check_parameters(name: str, function: Callable[..., object]) -> None:
    try:
        signature = signature_of(function)
        if "completions" in signature.parameters:
            raise ConfigError(
                f"reward function {name!r} takes {signature}, as TRL's do: give meshrl.from_trl(function); in a file, "
                "write NAME = meshrl.from_trl(function) below it, and name that"
            )
        check_awaits(f"reward function {name!r}", function)
        signature.bind("", "", {}, **({"sandbox": None} if takes_sandbox(function) else {}))
    except TypeError as error:
        raise ConfigError(
            f"reward function {name!r} takes {signature_of(function)}: {error}; "
            "it is called as function(prompt, completion, row)"
        ) from error
    except ValueError:
        return  # a builtin without a signature


_Rewards: TypeAlias = Sequence[float | None]
TrlReward: TypeAlias = Callable[..., _Rewards | Awaitable[_Rewards]]
"""`reward(prompts, completions, **columns) -> list[float | None]`, async or not."""


def from_trl(function: TrlReward, *, chat: bool = False) -> RewardFunction:
    """Convert a TRL reward function into one for meshrl. It is called with one row at a time.

    Its columns are those of the row, and `answer`. With `chat`, and for a prompt of messages, prompts and completions
    are lists of messages. A reward of None or NaN, which means "does not apply" in TRL, is left out of the sum of
    `functions`. If there is no other, the reward of the row is unknown.
    """
    takes = signature_of(function).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in takes.values())

    async def reward(prompt: Prompt, completion: str, row: Row) -> float:
        is_chat = chat or not isinstance(prompt, str)
        turns = [{"role": "user", "content": prompt}] if chat and isinstance(prompt, str) else prompt
        replies = [{"role": "assistant", "content": completion}] if is_chat else completion
        texts = {"prompts": turns, "completions": replies}
        columns = {**row, **texts}
        values = function(**{name: [value] for name, value in columns.items() if takes_all or name in takes})
        if inspect.isawaitable(values):
            values = await values
        (value,) = values
        given = cast("object", value)
        if given is None or (isinstance(given, SupportsFloat) and math.isnan(given)):
            raise NotJudged
        return cast("float", given)

    for own in ("__module__", "__name__", "__qualname__"):
        setattr(reward, own, getattr(function, own, getattr(reward, own)))
    return reward
