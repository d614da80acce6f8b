"""`/v1/responses`: another form of the same conversation, translated to messages and back.

An assistant's message and the tool calls that follow it form one message, as they were drawn.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
from starlette.responses import Response

from meshrl.agents.answers import MODEL, Choice, Events, told
from meshrl.agents.chat import Function, Message, Tool, ToolCall
from meshrl.agents.requests import Content, Count, Request, offered, text_of
from meshrl.errors import DataError

_Json: TypeAlias = dict[str, Any]


class _Item(msgspec.Struct):
    type: str = "message"
    role: str | None = None
    content: Content = ""
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: Content = ""

    def read(self) -> Message:
        """Return the message. Raises DataError for items that chat templates do not support."""
        if self.type == "function_call":
            call = ToolCall(id=self.call_id, function=Function(self.name, self.arguments))
            return Message("assistant", tool_calls=(call,))
        if self.type == "function_call_output":
            return Message("tool", text_of(self.output), tool_call_id=self.call_id)
        if self.type != "message" or self.role not in ("system", "developer", "user", "assistant"):
            raise DataError(
                f"the input has an item of type {self.type!r} and role {self.role!r}: messages of system, developer, "
                "user and assistant are read, function_call and function_call_output"
            )
        return Message(self.role, text_of(self.content))


class _Tool(msgspec.Struct, omit_defaults=True):
    type: str
    name: str = ""
    description: str | None = None
    parameters: _Json | None = None

    def read(self) -> Tool:
        """Return the tool as chat templates read it. Raises DataError for tools that OpenAI hosts."""
        if self.type != "function":
            raise DataError(f"tools: {self.type!r} is not served: give tools of type function, which the program runs")
        function = {name: value for name, value in msgspec.to_builtins(self).items() if name != "type"}
        return {"type": "function", "function": function}


class _Format(msgspec.Struct):
    type: str = "text"


class _Text(msgspec.Struct):
    format: _Format | None = None


class ResponsesRequest(Request, kw_only=True):
    """A request to `/v1/responses`."""

    input: str | list[_Item]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    tools: list[_Tool] | None = None
    tool_choice: str | _Json | None = None
    text: _Text | None = None
    previous_response_id: str | None = None

    @property
    def limit(self) -> int | None:
        """Limit of the answer, in tokens."""
        return self.max_output_tokens

    def read(self) -> tuple[Sequence[Message], Sequence[Tool]]:
        """Return the messages and the available tools. Raises DataError for unsupported features."""
        if self.previous_response_id is not None:
            raise DataError("previous_response_id: answers are not kept: give the whole conversation as input")
        if self.text and self.text.format and self.text.format.type != "text":
            raise DataError("text.format: what the model writes is not constrained: take text")
        items = [Message("user", self.input)] if isinstance(self.input, str) else [each.read() for each in self.input]
        begins = [] if self.instructions is None else [Message("system", self.instructions)]
        return _joined([*begins, *items]), offered([tool.read() for tool in self.tools or ()], self.tool_choice)


@dataclass(frozen=True)
class ToldResponse:
    """The response to such a request."""

    id: str
    choice: Choice
    prompt_tokens: int

    def whole(self) -> Response:
        """The response in one piece."""
        return told(200, self._ended())

    def stream(self, seconds: float) -> Response:
        """The response as events. A client that reads nothing for `seconds` is disconnected."""
        numbered = ({**event, "sequence_number": number} for number, event in enumerate(self._events()))
        return Events(map(msgspec.json.encode, numbered), seconds)

    def _head(self, status: str, output: Sequence[_Json]) -> _Json:
        return {
            "id": self.id,
            "object": "response",
            "created_at": 0,
            "model": MODEL,
            "status": status,
            "output": output,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
        }

    def _ended(self) -> _Json:
        drawn = self.choice.answer.drawn
        return {
            **self._head("incomplete" if drawn.truncated else "completed", self._output()),
            "usage": {
                "input_tokens": self.prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": len(drawn.tokens),
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": self.prompt_tokens + len(drawn.tokens),
            },
        }

    def _output(self) -> list[_Json]:
        said = self.choice.said
        text, calls = (said, ()) if isinstance(said, str) else (said.content, said.tool_calls)
        part: _Json = {"type": "output_text", "text": text, "annotations": []}
        message: _Json = {"type": "message", "id": f"msg_{self.id}", "role": "assistant", "content": [part]}
        written: list[_Json] = [message] if text or not calls else []
        for call in calls:
            name, arguments = call.function.name, call.function.arguments
            item: _Json = {"type": "function_call", "id": f"fc_{self.id}_{call.id}", "call_id": call.id}
            written.append({**item, "name": name, "arguments": arguments})
        return [{**item, "status": "completed"} for item in written]

    def _events(self) -> Iterator[_Json]:
        yield {"type": "response.created", "response": self._head("in_progress", [])}
        for index, item in enumerate(self._output()):
            place: _Json = {"output_index": index, "item_id": item["id"]}
            emptied: _Json = {"content": []} if item["type"] == "message" else {"arguments": ""}
            begun = {**item, **emptied, "status": "in_progress"}
            yield {"type": "response.output_item.added", "output_index": index, "item": begun}
            yield from self._message(place, item) if item["type"] == "message" else self._call(place, item)
            yield {"type": "response.output_item.done", "output_index": index, "item": item}
        ended = self._ended()
        yield {"type": f"response.{ended['status']}", "response": ended}

    def _message(self, place: _Json, item: _Json) -> Iterator[_Json]:
        (part,), place = item["content"], {**place, "content_index": 0}
        yield {"type": "response.content_part.added", **place, "part": {**part, "text": ""}}
        yield {"type": "response.output_text.delta", **place, "delta": part["text"], "logprobs": []}
        yield {"type": "response.output_text.done", **place, "text": part["text"], "logprobs": []}
        yield {"type": "response.content_part.done", **place, "part": part}

    def _call(self, place: _Json, item: _Json) -> Iterator[_Json]:
        kind, arguments = "response.function_call_arguments", item["arguments"]
        yield {"type": f"{kind}.delta", **place, "delta": arguments}
        yield {"type": f"{kind}.done", **place, "name": item["name"], "arguments": arguments}


def _joined(messages: Sequence[Message]) -> Sequence[Message]:
    """Move tool calls into the assistant's message before them."""
    found: list[Message] = []
    for message in messages:
        if found and message.tool_calls and found[-1].role == "assistant":
            calls = (*found[-1].tool_calls, *message.tool_calls)
            found[-1] = msgspec.structs.replace(found[-1], tool_calls=calls)
        else:
            found.append(message)
    return found
