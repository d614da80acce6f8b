"""The forms of an answer that a request may ask for: a JSON schema, an expression, choices, or a call of a tool."""

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from meshrl.agents.chat import CallForm, Tool
from meshrl.data import Branch
from meshrl.errors import DataError


class Structured(msgspec.Struct):
    """The form of an answer in vLLM's field `structured_outputs`."""

    json: dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] = ()


def structured_form(given: Structured | None, form: Branch | None) -> Branch | None:
    """The form that this field gives, or else `form`. Raises DataError unless it gives one."""
    if given is None:
        return form
    if [given.json is not None, given.regex is not None, bool(given.choice)].count(True) != 1 or form:
        raise DataError("structured_outputs: give one of json, regex and choice, and no response_format")
    return Branch(given.json, given.regex, given.choice)


def call_forms(tools: Sequence[Tool], called: Sequence[str], calls: CallForm) -> list[Branch]:
    """The calls of tools as the model writes them: of those in `called`, or of all if that is empty."""
    functions: list[Any] = [tool.get("function") for tool in tools]
    return [
        _call(each, calls)
        for each in functions
        if isinstance(each, dict) and (not called or each.get("name") in called)
    ]


def _call(function: dict[str, Any], calls: CallForm) -> Branch:
    """A call of a tool, as the model writes it. Its schema stays whole, because it may refer to its own parts."""
    parameters = function.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise DataError(f"tools: `parameters` of {function.get('name')!r} is no object: give a JSON schema of one")
    head = f'{calls.begin}{{"name": {json.dumps(function.get("name"))}, "{calls.key}": '
    return Branch({"type": "object", **parameters}, begin=head, end=f"}}{calls.end}")


def schema_form(schema: object, where: str) -> Branch:
    """The form of an answer with a JSON schema. Raises DataError if there is none."""
    if not isinstance(schema, dict | bool):
        raise DataError(f"{where}: it has no JSON schema, and needs one")
    return Branch(schema)


def format_form(kind: object, schema: object, where: str) -> Branch | None:
    """The form of an answer in OpenAI's formats, None for text. Raises DataError for others."""
    if kind == "json_schema":
        return schema_form(schema, where)
    if kind in (None, "text", "json_object"):
        return Branch({"type": "object"}) if kind == "json_object" else None
    raise DataError(f"{where}: {kind!r} is no format: take text, json_object or json_schema")


def names_called(tools: Sequence[Tool], choice: object) -> Sequence[str]:
    """Return the tools that a call may name: all for "required", or the given one. Raises DataError for none."""
    functions: list[Any] = [tool.get("function") for tool in tools]
    names = [str(each.get("name")) for each in functions if isinstance(each, dict)]
    if choice in (None, "auto", "none"):
        return ()
    if choice != "required":
        function: Any = choice.get("function", choice) if isinstance(choice, dict) else None
        wanted = str(function.get("name") if isinstance(function, dict) else choice)
        if wanted not in names:
            raise DataError(f"tool_choice: {wanted!r} is none of the tools {', '.join(names) or '(there are none)'}")
        return [wanted]
    if not names:
        raise DataError("tool_choice: a call is required, and there are no tools")
    return names
