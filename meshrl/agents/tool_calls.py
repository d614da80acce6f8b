"""Tool calls in a model's text, in the formats of Hermes and Qwen, and of Llama."""

import re
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from meshrl.agents.chat import Function, Message, Tool, ToolCall

_TAGGED: Final = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


class _Written(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"")
    parameters: msgspec.Raw = msgspec.Raw(b"")

    def call(self, name: str) -> ToolCall | None:
        text = bytes(self.arguments or self.parameters).decode() or "{}"
        return ToolCall(id=name, function=Function(self.name, text)) if text.startswith("{") else None


def message_of(text: str, tools: Sequence[Tool], new_id: Callable[[], str]) -> Message:
    """The model's text as a client's message, with calls separated. If a call cannot be read, all stays text."""
    if not tools:
        return Message("assistant", text)
    tagged = _TAGGED.findall(text)
    calls = [_read(each, new_id) for each in tagged or [text]]
    found = tuple(call for call in calls if call is not None)
    if len(found) < len(calls) or not (tagged or found[0].function.name in _names(tools)):
        return Message("assistant", text)
    return Message("assistant", _TAGGED.sub("", text).strip() if tagged else "", tool_calls=found)


def _read(text: str, new_id: Callable[[], str]) -> ToolCall | None:
    try:
        written = msgspec.json.decode(text.strip(), type=_Written)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return None
    return written.call(new_id())


def _names(tools: Sequence[Tool]) -> set[Any]:
    functions = [tool.get("function") for tool in tools]
    return {each.get("name") for each in functions if isinstance(each, dict)}
