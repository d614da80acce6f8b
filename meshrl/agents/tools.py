"""Episodes without a program: the model calls tools of MCP servers, and this loop runs them for it.

Each episode has its own connections, and its own processes of servers that are commands. The model reads of a call that
fails, since it may have asked for the wrong thing. A server that cannot be reached discards the episode.
"""

import json
import shlex
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final, TypeAlias, cast

from meshrl.errors import ConfigError, Discard, causes_of, described

KIND: Final = "mcp"
"""What the name of a server begins with."""
_CLOSED: Final = -32000
"""The code of the error that the package mcp raises for a connection that has ended."""
Solve: TypeAlias = Callable[[object, Mapping[str, object]], Awaitable[object]]


def check_servers(servers: Sequence[str]) -> None:
    """Raise ConfigError if a server's name has no URL and no program that is here, or the package mcp is missing."""
    for server in servers:
        kind, _, place = server.partition(":")
        if kind != KIND or not place.strip():
            raise ConfigError(
                f'agent.tools: {server!r} is no server: write "mcp:http://host/mcp", or "mcp:program argument"'
            )
        if not _is_url(place) and shutil.which(shlex.split(place)[0]) is None:
            raise ConfigError(
                f"agent.tools: there is no program {shlex.split(place)[0]!r} here: install it, or give its path"
            )
    if find_spec("mcp") is None:
        raise ConfigError("agent.tools needs the package mcp: pip install 'meshrl[mcp]'")


def player(servers: Sequence[str], turns: int, seconds: float, most: int) -> Solve:
    """Return a function that plays an episode with a client and a row, and returns the model's last text.

    The text is None if the model called a tool in its last turn. `turns`: answers of the model at most. `seconds`: the
    time limit of a call. `most`: characters of its result that the model gets.
    """

    async def converse(client: object, row: Mapping[str, object]) -> object:
        own: Any = client
        async with AsyncExitStack() as stack:
            tools = [await _connected(stack, server) for server in servers]
            owners = _owners(tools)
            offered = [shown for _, each in tools for shown in each]
            messages = _begin(row)
            for _ in range(turns):
                told = await own.chat.completions.create(model="policy", messages=messages, tools=offered)
                said = told.choices[0].message
                messages.append(said)
                if not said.tool_calls:
                    return said.content
                for call in said.tool_calls:
                    result = await _called(owners, call.function.name, call.function.arguments, seconds)
                    cut = result if len(result) <= most else f"{result[:most]}\n[{len(result) - most} characters more]"
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": cut})
        return None

    async def solve(client: object, row: Mapping[str, object]) -> object:
        try:
            return await converse(client, row)
        except ExceptionGroup as group:  # of the tasks of a connection, which end with what is raised next to them
            raise next((each for each in causes_of(group) if isinstance(each, Discard)), group) from None

    return solve


def _begin(row: Mapping[str, object]) -> list[object]:
    prompt = row.get("prompt")
    messages = cast("list[object]", prompt) if isinstance(prompt, list) else [{"role": "user", "content": str(prompt)}]
    return list(messages)


def _is_url(place: str) -> bool:
    return place.startswith(("http://", "https://"))


async def _connected(stack: AsyncExitStack, server: str) -> tuple[Any, Sequence[Mapping[str, Any]]]:
    """Connect to a server for as long as the stack lasts. Returns its client, and its tools as requests have them."""
    mcp, place = import_module("mcp"), server.partition(":")[2]
    if not _is_url(place):
        command, *arguments = shlex.split(place)
        place = mcp.StdioServerParameters(command=command, args=arguments)
    try:
        client = await stack.enter_async_context(mcp.Client(place))
        tools, cursor = list[Any](), None
        while True:
            page = await client.list_tools(cursor=cursor)
            tools += page.tools
            cursor = page.next_cursor
            if not cursor:
                break
    except Exception as error:
        raise Discard(f"the tools of {server} cannot be had: {described(_first(error))}") from error
    functions = [
        {"name": each.name, "description": each.description or "", "parameters": each.input_schema} for each in tools
    ]
    return client, [{"type": "function", "function": function} for function in functions]


def _first(error: BaseException) -> BaseException:
    """The exception of a group that came first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _owners(tools: Sequence[tuple[Any, Sequence[Mapping[str, Any]]]]) -> Mapping[str, Any]:
    """The client of each tool by name. ConfigError if two servers have a tool of one name."""
    owners = dict[str, Any]()
    for client, offered in tools:
        for each in offered:
            name = each["function"]["name"]
            if name in owners:
                raise ConfigError(f"agent.tools: two servers have a tool {name!r}: leave one of them out")
            owners[name] = client
    return owners


async def _called(owners: Mapping[str, Any], name: str, arguments: str, seconds: float) -> str:
    """Call a tool, and return its result or what was wrong as the model gets it. Discard if the server is gone."""
    if name not in owners:
        return f"Error: there is no tool {name!r}; there are {', '.join(owners)}"
    try:
        given = json.loads(arguments or "{}")
    except ValueError as error:
        return f"Error: the arguments are not JSON: {error}"
    if not isinstance(given, dict):
        return "Error: the arguments are not an object"
    failed: type[Exception] = import_module("mcp").MCPError
    try:
        result = await owners[name].call_tool(name, given, read_timeout_seconds=seconds)
    except failed as error:
        if getattr(error, "code", None) == _CLOSED:
            raise Discard(f"the server of the tool {name!r} is gone: {described(error)}") from error
        return f"Error: {error}"
    except Exception as error:
        raise Discard(f"the server of the tool {name!r} is gone: {described(_first(error))}") from error
    texts = [part.text if part.type == "text" else f"[a part of type {part.type}]" for part in result.content]
    return "\n".join(texts)
