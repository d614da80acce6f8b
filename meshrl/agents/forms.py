"""The forms of an answer that a request may ask for: a JSON schema, an expression, choices, or a call of a tool."""

import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from meshrl.agents.chat import Tool
from meshrl.agents.formats import CallForm, is_text
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


def call_forms(
    tools: Sequence[Tool], called: Sequence[str], calls: CallForm, count: int, *, after_thought: bool
) -> list[Branch]:
    """The calls of tools as the model writes them: of those in `called`, or of all if that is empty.

    `count`: the calls before. `after_thought`: True if a thought is open. Raises DataError for a tool whose call cannot
    be held to its schema.
    """
    functions: list[Any] = [tool.get("function") for tool in tools]
    return [
        _call(each, calls, count, after_thought=after_thought)
        for each in functions
        if isinstance(each, dict) and (not called or each.get("name") in called)
    ]


def _call(function: dict[str, Any], calls: CallForm, count: int, *, after_thought: bool) -> Branch:
    """A call of a tool, as the model writes it. Its schema stays whole, because it may refer to its own parts."""
    name, parameters = function.get("name"), function.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise DataError(f"tools: `parameters` of {name!r} is no object: give a JSON schema of one")
    if fault := next(_faults(parameters), None):
        raise DataError(f"tools: the parameters of {name!r} are no JSON schema: {fault}")
    try:
        form = calls.named(str(name), count, tuple(parameters.get("properties") or ()))
    except ValueError as error:
        raise DataError(f"tools: {error}: take names of letters, digits, - and _") from error
    begin = form.begin.lstrip() if after_thought else form.begin
    if not form.opens:
        return Branch({"type": "object", **parameters}, begin=begin, end=form.end)
    return Branch(parts=_tagged(str(name), parameters, form), begin=begin, end=form.end)


def _faults(schema: dict[str, Any]) -> Iterator[str]:
    """What is wrong with the fields of a schema that the forms read."""
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(required, list | None) or any(not isinstance(each, str) for each in required or ()):
        yield "`required` is no list of names"
    if not isinstance(properties, dict | None):
        yield "`properties` is no object"
        return
    for key, each in (properties or {}).items():
        if not isinstance(each, dict | bool):
            yield f"`properties` has no schema for {key!r}"
        for inner in [each, *_some(each)] if isinstance(each, dict) else ():
            if isinstance(inner, dict) and not isinstance(inner.get("enum"), list | None):
                yield f"`enum` of {key!r} is no list"


def _some(schema: dict[str, Any]) -> list[Any]:
    """The schemas of `anyOf`."""
    many = schema.get("anyOf")
    return many if isinstance(many, list) else []


_JOINED: Final = {"$ref", "$dynamicRef", "allOf", "oneOf", "not", "if", "then", "else"}
_OF_TEXTS: Final = _JOINED | {"pattern", "minLength", "maxLength", "format", "contentEncoding", "contentMediaType"}
"""What a schema may say of a text and a form without quotes cannot hold."""
_OF_ALL: Final = _JOINED | {
    "anyOf",
    "enum",
    "const",
    "patternProperties",
    "propertyNames",
    "minProperties",
    "maxProperties",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
}
"""What a schema may say of all parameters together."""


def _tagged(name: str, parameters: dict[str, Any], form: CallForm) -> tuple[Branch, ...]:
    """The parameters of a call one by one, each between tags."""
    own: dict[str, Any] = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
    given, required = parameters.get("properties") or {}, parameters.get("required") or []
    more = {*parameters} & _OF_ALL
    if more or not {*required} <= {*given} or parameters.get("type", "object") not in ("object", ["object"]):
        raise DataError(
            f"tools: the model writes the parameters of {name!r} one by one between tags, such as {form.opens!r}. No "
            f"call can be held to its schema's {', '.join(sorted(more)) or 'required parameters'}: give it properties "
            "alone"
        )
    return tuple(
        _parameter(
            schema,
            own,
            Branch(begin=f"{form.opens}{key}{form.middle}", end=form.closes, is_optional=key not in required),
            form,
            f"the parameter {key!r} of {name!r}",
        )
        for key, schema in given.items()
    )


def _parameter(schema: Any, own: dict[str, Any], part: Branch, form: CallForm, where: str) -> Branch:
    """A parameter between tags, a text without quotes where its schema says so."""
    if not is_text(schema):
        whole = {**schema, **own} if isinstance(schema, dict) else schema
        return replace(part, schema=whole)
    choices, many = list[str](), _some(schema)
    outer = {*schema} & (_OF_TEXTS | {"enum", "const"}) if many else set[str]()
    for each in many or [schema]:
        kinds = each.get("type", "")
        only = [each["const"]] if "const" in each else each.get("enum", [None] if kinds == "null" else None)
        if more := ({*each} & _OF_TEXTS) | outer:
            raise DataError(
                f"tools: the model writes {where} without quotes, as a text that cannot be held to "
                f"{', '.join(sorted(more))}: leave that out"
            )
        if only is None:
            closing = {"</think>", *re.findall("</[^<>]+>", form.closes + form.end)}
            return replace(part, without="|".join(map(re.escape, sorted(closing))))
        choices += [value for value in only if isinstance(value, str)]
        choices += ["null"] if None in only and "null" in kinds else []
    if not choices:
        raise DataError(f"tools: {where} is a text, and its `enum` or `const` has none: give it texts, or another type")
    return replace(part, choices=tuple(choices))


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
