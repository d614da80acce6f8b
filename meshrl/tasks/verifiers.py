"""Environments of the library `verifiers`, run by the library's own rollout.

    [task]
    source = "verifiers:ENV_ID"
    [agent]
    source = "verifiers:ENV_ID"

So stop conditions, tools, state and rubric are the library's. As an agent it talks to the gateway by the library's own
client. As an `[environment]` its client is here, and its `Messages` are text: tools are called and answer in the marks
that Hermes and Qwen models learn.
"""

import asyncio
import re
import signal
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Final, Protocol, cast

import msgspec

from meshrl.errors import ConfigError, DataError, described

NAME: Final = "verifiers"
_KNOWN: Final = "0.3"
_INSTALL: Final = "pip install 'meshrl[verifiers]'"
_CALL: Final = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_Options = Mapping[str, object]


class _Rubric(Protocol):
    async def score_rollout(self, state: Mapping[str, object]) -> None: ...
    async def cleanup(self, state: Mapping[str, object]) -> None: ...


class _Dumped(Protocol):
    def model_dump(self, *, exclude_none: bool) -> dict[str, object]: ...


class _Environment(Protocol):
    """What is used of `verifiers.Environment`."""

    rubric: _Rubric
    score_rollouts: bool
    requires_group_rollouts: bool
    tool_defs: Sequence[_Dumped] | None

    def get_dataset(self, n: int = -1) -> Iterable[Mapping[str, object]]: ...
    async def rollout(
        self, given: Mapping[str, object], client: object, model: str, sampling_args: _Options, /
    ) -> Mapping[str, object]: ...


class _Library(Protocol):
    def load_environment(self, env_id: str, **env_args: object) -> _Environment: ...


class _Types(Protocol):
    """What is made of `verifiers.types`."""

    Response: Callable[..., object]
    ResponseMessage: Callable[..., object]
    ToolCall: Callable[..., object]


class _Call(msgspec.Struct):
    """What a model writes to call a tool."""

    name: str
    arguments: dict[str, object] = {}


def rows(env_id: str, options: _Options, count: int | None) -> Iterator[dict[str, object]]:
    """The environment's training rows: texts `question`, `system` and `tools`, `answer`, and `verifiers`, its own row.

    ConfigError where the library or the environment is missing; DataError where a row is no text.
    """
    environment = _load(env_id, options)
    tools = "\n".join(map(_tool, environment.tool_defs or ()))
    for number, given in enumerate(environment.get_dataset(n=count or -1)):
        try:
            said = _conversation(given["prompt"])
        except (TypeError, KeyError) as error:
            raise DataError(f"{NAME}:{env_id}, row {number}: {described(error)}") from error
        yield {
            "question": "\n\n".join(text for role, text in said if role != "system"),
            "system": "\n\n".join(text for role, text in said if role == "system"),
            "tools": tools,
            "answer": given.get("answer", ""),
            NAME: dict(given),
        }


def load_episodes(env_id: str, options: _Options, turns: int) -> "Callable[[], Episode]":
    """What makes the instances of an environment, one for each episode.

    ConfigError where the library or the environment is missing, where its rubric judges groups, or where it plays more
    than `turns` turns.
    """
    environment, source = _judged_alone(env_id, options), f"{NAME}:{env_id}"
    most = int(getattr(environment, "max_turns", -1))
    if most > turns:
        raise ConfigError(
            f"environment {source!r}: plays up to {most} turns, and its rubric judges at the end, which "
            f"turns = {turns} cuts off: set turns = {most}, or give the environment fewer"
        )
    types = cast("_Types", import_module(f"{NAME}.types"))
    cast("_Registry", import_module(f"{NAME}.clients").Client).register(_Turns)
    return lambda: Episode(source, environment, _Turns(types))


def load_agent(env_id: str, options: _Options) -> "Callable[[object, Mapping[str, object]], Awaitable[float]]":
    """What plays the environment with an OpenAI client, for a row of its task, and returns the rubric's reward.

    ConfigError where the library or the environment is missing, and where its rubric judges groups.
    """
    environment, source = _judged_alone(env_id, options), f"{NAME}:{env_id}"
    clients = cast("_Clients", import_module(f"{NAME}.clients"))

    async def solve(client: object, row: Mapping[str, object]) -> float:
        return await _reward(environment, _given(row, source), clients.OpenAIChatCompletionsClient(client))

    return solve


def _judged_alone(env_id: str, options: _Options) -> _Environment:
    """The environment; ConfigError where its rubric judges groups."""
    environment = _load(env_id, options)
    if environment.requires_group_rollouts:
        raise ConfigError(
            f"{NAME}:{env_id}: its rubric judges the rollouts of a prompt together, but meshrl judges each episode "
            "alone: use its reward functions for single rollouts"
        )
    return environment


def _given(row: Mapping[str, object], source: str) -> dict[str, object]:
    """The library's own row in a task's."""
    given = row.get(NAME)
    if not isinstance(given, dict):
        raise DataError(f'the row has no {NAME!r}: set task.source = "{source}", as of the environment')
    return cast("dict[str, object]", given)


async def _reward(environment: _Environment, given: dict[str, object], client: object) -> float:
    """What the rubric says of a rollout. What went wrong in it is raised."""
    state = await environment.rollout(given, client, "policy", {})
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


class _Clients(Protocol):
    """What is made of `verifiers.clients`."""

    OpenAIChatCompletionsClient: Callable[[object], object]


class _Registry(Protocol):
    def register(self, subclass: type) -> object: ...


class Episode:
    """One rollout. It asks for the model's words and waits; between two turns it stands still."""

    def __init__(self, source: str, environment: _Environment, turns: "_Turns") -> None:
        self._source, self._environment, self._turns = source, environment, turns
        self._shown: list[tuple[str, str]] = []
        self._played: asyncio.Task[float] | None = None

    async def reset(self, row: Mapping[str, object]) -> str:
        """Begin the rollout; the prompt as the task rendered it."""
        given = _given(row, self._source)
        self._played = asyncio.create_task(_reward(self._environment, given, self._turns))
        shown = _conversation(given["prompt"])
        self._shown = await self._asked(self._played) or []
        if self._shown != shown:
            raise DataError(
                "the environment begins with a prompt that is not its row's, or with none. This is not supported"
            )
        return str(row["prompt"])

    async def step(self, completion: str) -> tuple[str, float, bool]:
        """Go on with what the model wrote; the reward is the rubric's, at the end."""
        played = cast("asyncio.Task[float]", self._played)
        self._turns.say(completion)
        asked = await self._asked(played)
        if asked is None:
            return "", played.result(), True
        before = len(self._shown)
        if asked[:before] != self._shown or len(asked) <= before or asked[before][0] != "assistant":
            raise DataError(
                "the environment rewrote the conversation, which is not supported: it may only append to it"
            )
        self._shown = asked
        return "\n\n".join(text for _, text in asked[before + 1 :]), 0.0, False

    async def close(self) -> None:
        """End the rollout where it is not over; its cleanup runs."""
        if self._played is not None and not self._played.done():
            self._played.cancel()
            await asyncio.wait({self._played})
            if not self._played.cancelled():
                self._played.result()

    async def _asked(self, played: "asyncio.Task[float]") -> list[tuple[str, str]] | None:
        """What the model is to go on from; None at the rollout's end, and what it raised is raised."""
        asked = asyncio.ensure_future(self._turns.asked.get())
        try:
            await asyncio.wait({asked, played}, return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                return _conversation(asked.result())
            played.result()
        finally:
            asked.cancel()
        return None


class _Turns:
    """The library's client: what it would ask a server, the sampler is asked."""

    def __init__(self, types: _Types) -> None:
        self.asked: Final[asyncio.Queue[object]] = asyncio.Queue()
        self._types = types
        self._said: asyncio.Queue[str] = asyncio.Queue()
        self._calls = 0

    def say(self, text: str) -> None:
        """What the model wrote."""
        self._said.put_nowait(text)

    async def get_response(self, prompt: object, model: str, tools: object = None, **_: object) -> object:
        """As `verifiers.Client`: wait for what the model writes to these messages."""
        self.asked.put_nowait(prompt)
        text = await self._said.get()
        text, calls = _called(text) if tools else (text, [])
        made = [
            self._types.ToolCall(
                id=f"call-{self._calls + number}",
                name=call.name,
                arguments=msgspec.json.encode(call.arguments).decode(),
            )
            for number, call in enumerate(calls)
        ]
        self._calls += len(made)
        message = self._types.ResponseMessage(
            content=text,
            tool_calls=made or None,
            finish_reason="tool_calls" if made else "stop",
            is_truncated=False,
        )
        return self._types.Response(id="", created=0, model=model, usage=None, message=message)


def _load(env_id: str, options: _Options) -> _Environment:
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
    # It would take SIGINT and SIGTERM, which are the script's, and which a rank that is a thread may not.
    vars(import_module(f"{NAME}.envs.environment"))["signal"] = SimpleNamespace(
        **{**vars(signal), "signal": lambda *_: None}
    )
    try:
        return cast("_Library", library).load_environment(env_id, **options)
    except Exception as error:
        raise ConfigError(f"{source}: cannot be loaded with options {dict(options)}: {described(error)}") from error


def _tool(tool: _Dumped) -> str:
    """A tool as chat templates show it."""
    return msgspec.json.encode({"type": "function", "function": tool.model_dump(exclude_none=True)}).decode()


def _called(text: str) -> tuple[str, Sequence[_Call]]:
    """The text without the calls of tools in it, and these; where one is none, all is text."""
    try:
        calls = [msgspec.json.decode(each, type=_Call) for each in _CALL.findall(text)]
    except msgspec.DecodeError:
        return text, []
    return (_CALL.sub("", text).strip() if calls else text), calls


def _conversation(messages: object) -> list[tuple[str, str]]:
    """The role and the text of each message."""
    if isinstance(messages, str):
        return [("text", messages)]
    return [_told(each) for each in cast("Iterable[object]", messages)]


def _told(message: object) -> tuple[str, str]:
    fields = cast("Mapping[str, object]", message if isinstance(message, Mapping) else vars(message))
    role, content = str(fields["role"]), fields.get("content")
    parts = cast("Iterable[object]", content) if isinstance(content, list) else ()
    text = content if isinstance(content, str) else "".join(map(_part, parts))
    return role, f"<tool_response>\n{text}\n</tool_response>" if role == "tool" else text


def _part(part: object) -> str:
    fields = cast("Mapping[str, object]", part if isinstance(part, Mapping) else vars(part))
    if fields.get("type") != "text":
        raise TypeError(f"a message has a part of type {fields.get('type')!r}, and only text is read")
    return str(fields["text"])
