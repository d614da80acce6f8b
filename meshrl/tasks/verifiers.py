"""Environments of the library `verifiers`, run by the library's own rollout.

The library provides stop conditions, tools, state and rubric. It talks to the gateway through its own client.
"""

import signal
from collections.abc import Awaitable, Callable, Iterator, Mapping
from importlib import import_module
from types import SimpleNamespace
from typing import Any, Final, cast

from meshrl.errors import ConfigError, DataError, described

NAME: Final = "verifiers"
_KNOWN: Final = "0.3"
_INSTALL: Final = "pip install 'meshrl[verifiers]'"
_Options = Mapping[str, object]


def rows(env_id: str, options: _Options, count: int | None) -> Iterator[dict[str, object]]:
    """Yield the environment's training rows: texts `question` and `system`, `answer`, and `verifiers`, its row.

    ConfigError if the library or the environment is missing. DataError if a row is not text.
    """
    environment = _load(env_id, options)
    for number, given in enumerate(environment.get_dataset(n=count or -1)):
        try:
            messages = _conversation(given["prompt"])
        except (TypeError, KeyError) as error:
            raise DataError(f"{NAME}:{env_id}, row {number}: {described(error)}") from error
        yield {
            "question": "\n\n".join(text for role, text in messages if role != "system"),
            "system": "\n\n".join(text for role, text in messages if role == "system"),
            "answer": given.get("answer", ""),
            NAME: dict(given),
        }


def load_agent(env_id: str, options: _Options) -> "Callable[[object, Mapping[str, object]], Awaitable[float]]":
    """Return a function that plays the environment with an OpenAI client, and returns the rubric's reward of a row.

    ConfigError if the library or the environment is missing, or if its rubric judges groups.
    """
    environment, source = _load(env_id, options), f"{NAME}:{env_id}"
    if environment.requires_group_rollouts:
        raise ConfigError(
            f"{source}: its rubric judges the rollouts of a prompt together, but meshrl judges each episode alone: "
            "use its reward functions for single rollouts"
        )
    adapt = import_module(f"{NAME}.clients").OpenAIChatCompletionsClient

    async def solve(client: object, row: Mapping[str, object]) -> float:
        given = row.get(NAME)
        if not isinstance(given, dict):
            raise DataError(f'the row has no {NAME!r}: set task.source = "{source}", as of the environment')
        state = await environment.rollout(given, adapt(client), "policy", {})
        try:
            error = state.get("error")
            if isinstance(error, Exception):
                raise error
            if not environment.score_rollouts:
                return 0.0
            await environment.rubric.score_rollout(state)
            return cast("float", state["reward"])
        finally:
            await environment.rubric.cleanup(state)

    return solve


def _load(env_id: str, options: _Options) -> Any:
    source = f"{NAME}:{env_id}"
    try:
        library = import_module(NAME)
    except ImportError as error:
        raise ConfigError(f"{source}: needs verifiers: {_INSTALL}") from error
    version = str(getattr(library, "__version__", "of no number"))
    if not version.startswith(f"{_KNOWN}."):
        raise ConfigError(
            f"{source}: verifiers is {version} here, and meshrl plays environments of {_KNOWN}: {_INSTALL}"
        )
    # It would handle SIGINT and SIGTERM, which belong to the script. A rank that is a thread may not set handlers.
    vars(import_module(f"{NAME}.envs.environment"))["signal"] = SimpleNamespace(
        **{**vars(signal), "signal": lambda *_: None}
    )
    try:
        return library.load_environment(env_id, **options)
    except Exception as error:
        raise ConfigError(f"{source}: cannot be loaded with options {dict(options)}: {described(error)}") from error


def _conversation(messages: Any) -> list[tuple[str, str]]:
    """Return the role and the text of each message."""
    if isinstance(messages, str):
        return [("text", messages)]
    return [_role_and_text(_fields(each)) for each in messages]


def _fields(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else vars(value)


def _role_and_text(message: Mapping[str, Any]) -> tuple[str, str]:
    role, content = str(message["role"]), message.get("content")
    if isinstance(content, str):
        return role, content
    return role, "".join(map(_part, content)) if isinstance(content, list) else ""


def _part(part: object) -> str:
    fields = _fields(part)
    if fields.get("type") != "text":
        raise TypeError(f"a message has a part of type {fields.get('type')!r}, and only text is read")
    return str(fields["text"])
