"""How families of models write calls of tools and thoughts: each form of a call is found in the text that was drawn.

The forms have distinct marks, so a text needs no name of its family. What is learnt are the drawn tokens. The forms say
only what a client reads.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias, cast

import msgspec

from meshrl.tags import without_special

Written: TypeAlias = tuple[str, str, str]
"""A call as it was written: the name of its function, its arguments in JSON, and its id, "" without one."""
Types: TypeAlias = Mapping[str, Mapping[str, object]]
"""The schemas of parameters by function and name, for forms that write texts without quotes."""


class Format(NamedTuple):
    """A form of calls."""

    families: str
    """Models that write it, for people."""
    mark: str
    """A text that every call has, so one that is left over could not be read."""
    call: re.Pattern[str]
    """Matches a call, or several in a list."""
    read: Callable[[re.Match[str], Types], Iterable[Written]]
    """Reads what was matched. Raises ValueError if it is no call."""
    around: re.Pattern[str] = re.compile(r"(?!)")
    """Matches marks around the calls, which no client sees."""


def _found(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.DOTALL)


class _Call(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"")
    parameters: msgspec.Raw = msgspec.Raw(b"")
    id: str = ""


def _json(match: re.Match[str], types: Types) -> Iterable[Written]:  # noqa: ARG001 -- it has quotes
    """A JSON object with name and arguments, or a list of them."""
    told = msgspec.json.decode(match["json"], type=list[_Call] | _Call)
    for each in told if isinstance(told, list) else [told]:
        yield each.name, _object(bytes(each.arguments or each.parameters).decode() or "{}"), each.id


def _named(match: re.Match[str], types: Types) -> Iterable[Written]:  # noqa: ARG001 -- as above
    """A name, and arguments in JSON."""
    yield match["name"].strip(), _object(match["json"].strip() or "{}"), match.groupdict().get("id") or ""


def _object(text: str) -> str:
    msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    return text


def _tagged(parameter: str) -> Callable[[re.Match[str], Types], Iterable[Written]]:
    """A name, and each parameter between tags. Texts have no quotes there."""
    pattern = _found(parameter)

    def read(match: re.Match[str], types: Types) -> Iterable[Written]:
        name, known = match["name"].strip(), types.get(match["name"].strip(), {})
        given = {each["key"]: _typed(each["value"], known.get(each["key"])) for each in pattern.finditer(match["body"])}
        if pattern.sub("", match["body"]).strip():
            raise ValueError(f"there is more than parameters in {match['body']!r}")
        yield name, json.dumps(given, ensure_ascii=False), ""

    return read


def _typed(text: str, schema: object) -> object:
    """The value of a parameter: a text if the tool says so, or if it is not JSON."""
    if isinstance(schema, Mapping) and cast("Mapping[str, object]", schema).get("type") == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _bars(name: str) -> str:
    """A special token of DeepSeek's, between bars of full width."""
    return f"<\uff5ctool▁{name}\uff5c>"


FORMATS: Final[Sequence[Format]] = (
    Format("Hermes, Qwen2.5, Qwen3", "</tool_call>", _found(r"<tool_call>\s*(?P<json>\{.*?\})\s*</tool_call>"), _json),
    Format(
        "Qwen3-Coder, Qwen3.5, Nemotron 3",
        "</tool_call>",
        _found(r"<tool_call>\s*<function=(?P<name>[^>\n]+)>(?P<body>.*?)</function>\s*</tool_call>"),
        _tagged(r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"),
    ),
    Format(
        "GLM-4.5 and later",
        "</tool_call>",
        _found(r"<tool_call>(?P<name>[^<\n]+)(?P<body>(?:\s*<arg_key>.*?</arg_value>)*)\s*</tool_call>"),
        _tagged(r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"),
    ),
    Format(
        "MiniMax-M2",
        "</invoke>",
        _found(r'<invoke name="(?P<name>[^"\n]+)">(?P<body>.*?)</invoke>'),
        _tagged(r'<parameter name="(?P<key>[^"\n]+)">(?P<value>.*?)</parameter>'),
        _found(r"</?minimax:tool_call>"),
    ),
    Format(
        "DeepSeek-V3, R1",
        _bars("call▁end"),
        _found(
            f"{_bars('call▁begin')}function{_bars('sep')}(?P<name>[^\n]+)\n```json\n(?P<json>.*?)\n```{_bars('call▁end')}"
        ),
        _named,
        _found(_bars("calls▁(?:begin|end)")),
    ),
    Format(
        "DeepSeek-V3.1",
        _bars("call▁end"),
        _found(f"{_bars('call▁begin')}(?P<name>[^<\n]+){_bars('sep')}(?P<json>.*?){_bars('call▁end')}"),
        _named,
        _found(_bars("calls▁(?:begin|end)")),
    ),
    Format(
        "Kimi-K2",
        "<|tool_call_end|>",
        _found(
            r"<\|tool_call_begin\|>\s*(?P<id>functions\.(?P<name>[^:\s]+):\d+)\s*"
            r"<\|tool_call_argument_begin\|>(?P<json>.*?)<\|tool_call_end\|>"
        ),
        _named,
        _found(r"<\|tool_calls_section_(?:begin|end)\|>"),
    ),
    Format(
        "Mistral, Tekken 11 and later",
        "[TOOL_CALLS]",
        _found(r"\[TOOL_CALLS\](?P<name>\w[\w.-]*)\[ARGS\](?P<json>\{.*?\})(?=\[TOOL_CALLS\]|\s*\Z)"),
        _named,
    ),
    Format("Mistral", "[TOOL_CALLS]", _found(r"\[TOOL_CALLS\]\s*(?P<json>\[.*\])"), _json),
    Format(
        "gpt-oss",
        " to=functions.",
        _found(
            r"(?:<\|start\|>assistant)?(?:<\|channel\|>(?:commentary|analysis))? ?to=functions\.(?P<name>[\w.-]+)"
            r"(?:<\|channel\|>(?:commentary|analysis))?(?: ?(?:<\|constrain\|>)?json)?<\|message\|>(?P<json>.*?)"
            r"(?:<\|call\|>|\Z)"
        ),
        _named,
    ),
)
"""The forms, in the order in which they are tried."""
_BARE: Final = Format("Llama 3", "{", _found(r"\A\s*(?P<json>\{.*\})\s*\Z"), _json)
"""Nothing but a call, of a tool that there is."""
_CHANNEL: Final = _found(
    r"(?:<\|start\|>assistant)?<\|channel\|>(?P<name>\w+)<\|message\|>(?P<text>.*?)(?:<\|end\|>|\Z)"
)
"""A message of gpt-oss's channels."""


def calls_in(text: str, tools: Sequence[Mapping[str, object]]) -> tuple[str, Sequence[Written]]:
    """Return a text without its calls, and the calls. All stays text if one cannot be read."""
    functions: list[Any] = [tool.get("function") for tool in tools]
    known = {str(each.get("name")): each for each in functions if isinstance(each, dict)}
    types = {name: _properties(each) for name, each in known.items()}
    for form in FORMATS:
        rest = form.call.sub("", text) if form.mark in text else text
        if form.mark in text and form.mark not in rest and (calls := _read(form, text, types)):
            return form.around.sub("", rest).strip(), calls
    calls = _read(_BARE, without_special(text), types)
    return ("", calls) if calls and calls[0][0] in known else (text, ())


def _properties(function: Mapping[str, Any]) -> Mapping[str, object]:
    parameters = function.get("parameters")
    properties: object = parameters.get("properties") if isinstance(parameters, dict) else None
    return properties if isinstance(properties, dict) else {}


def _read(form: Format, text: str, types: Types) -> Sequence[Written]:
    try:
        return [call for match in form.call.finditer(text) for call in form.read(match, types)]
    except (ValueError, RecursionError):  # of msgspec and json too
        return ()


def without_channels(text: str) -> str:
    """Return a text of gpt-oss's channels with its thoughts between tags, as other models write them."""
    if "<|channel|>" not in text or "<|message|>" not in text:
        return text
    return _CHANNEL.sub(
        lambda match: f"<think>{match['text']}</think>" if match["name"] == "analysis" else match["text"], text
    )
