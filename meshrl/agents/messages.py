"""Anthropic's protocol, `/v1/messages`: another form of the same conversation.

A user's message with results of tools and a text is several messages of a chat template: one per result, and one of the
text. An assistant's message is one, with its thoughts before the text that follows them, as they were drawn.
`temperature`, `top_p`, `top_k` and `thinking` are not read: the run says how to sample, and the template how to think.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import groupby
from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias

import msgspec
from starlette.responses import Response

from meshrl.agents.chat import Function, Message, Tool, ToolCall
from meshrl.agents.forms import names_called, schema_form
from meshrl.agents.meaning import pieces_of
from meshrl.agents.protocol import (
    MODEL,
    Asked,
    Choice,
    Count,
    Json,
    ModelRequest,
    Reply,
    by_name,
    elsewhere,
    failed_response,
    offered,
    tagged_thought,
)
from meshrl.data import mark_of, name_of, unmarked
from meshrl.errors import DataError
from meshrl.tasks import decoded_url

_TYPES: Final[Mapping[int, str]] = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
_SIGNATURE: Final = "meshrl"
"""The signature of thoughts. Clients send a thought back with it, and some drop thoughts without one."""


class MessagesReply(Reply):
    """The answer to `/v1/messages`."""

    def whole(self) -> Json:
        """The answer in one piece."""
        (choice,) = self.choices
        return {**self._head(), "content": _blocks(choice), **self._end(choice), "usage": self._counts(choice)}

    def events(self) -> Iterator[Json | bytes]:
        """The answer in pieces."""
        (choice,) = self.choices
        yield {"type": "message_start", "message": {**self._head(), "usage": self._counts(None)}}
        for index, block in enumerate(_blocks(choice)):
            yield {"type": "content_block_start", "index": index, "content_block": {**block, **_emptied(block)}}
            for delta in _deltas(block):
                yield {"type": "content_block_delta", "index": index, "delta": delta}
            yield {"type": "content_block_stop", "index": index}
        yield {"type": "message_delta", "delta": self._end(choice), "usage": self._counts(choice)}
        yield {"type": "message_stop"}

    def _head(self) -> Json:
        empty: Json = {"content": [], "stop_reason": None, "stop_sequence": None}
        return {"id": f"msg_{self.id}", "type": "message", "role": "assistant", "model": MODEL, **empty}

    def _counts(self, choice: Choice | None) -> Json:
        drawn = len(choice.drawn.tokens) if choice else 0
        cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
        return {"input_tokens": self.prompt_tokens, "output_tokens": drawn, **cached}

    def _end(self, choice: Choice) -> Json:
        """Why the answer ended."""
        stop = self._stop_of(choice)
        reason = {"length": "max_tokens", "tool_calls": "tool_use"}.get(choice.reason, "end_turn")
        is_stopped = reason == "end_turn" and stop is not None
        return {
            "stop_reason": "stop_sequence" if is_stopped else reason,
            "stop_sequence": stop if is_stopped else None,
        }

    def _stop_of(self, choice: Choice) -> str | None:
        """The text of the request at which the answer ended. None if something else ended it."""
        if choice.drawn.truncated or choice.drawn.tokens[-1] in self.chat.ends:
            return None
        text = self.chat.decode(choice.drawn.tokens.tolist())
        ends = {text.find(stop) + len(stop): stop for stop in self.asked.stops if stop in text}
        return ends[min(ends)] if ends else None


class CountReply(Reply):
    """The answer to `/v1/messages/count_tokens`."""

    def whole(self) -> Json:
        """The answer in one piece."""
        return {"input_tokens": self.prompt_tokens}

    def events(self) -> Iterator[Json | bytes]:
        """The answer in pieces: it has one."""
        yield self.whole()


def _blocks(choice: Choice) -> list[Json]:
    """The content of an answer: its thoughts and texts, then its calls."""
    said = choice.said if isinstance(choice.said, Message) else Message("assistant", choice.said)
    pieces, blocks = pieces_of(said.content), list[Json]()
    for piece, is_thought in pieces:
        text = piece.strip() if len(pieces) > 1 else piece
        if is_thought:
            blocks.append({"type": "thinking", "thinking": text, "signature": _SIGNATURE})
        elif text.strip():
            blocks.append({"type": "text", "text": text})
    for call in said.tool_calls:
        arguments = msgspec.Raw(call.function.arguments.encode())
        blocks.append({"type": "tool_use", "id": call.id, "name": call.function.name, "input": arguments})
    return blocks


def _emptied(block: Json) -> Json:
    """The fields of a block that its deltas fill."""
    empty: dict[str, Json] = {"thinking": {"thinking": "", "signature": ""}, "text": {"text": ""}}
    return empty.get(block["type"], {"input": {}})


def _deltas(block: Json) -> Iterator[Json]:
    if block["type"] == "thinking":
        yield {"type": "thinking_delta", "thinking": block["thinking"]}
        yield {"type": "signature_delta", "signature": block["signature"]}
    elif block["type"] == "text":
        yield {"type": "text_delta", "text": block["text"]}
    else:
        yield {"type": "input_json_delta", "partial_json": bytes(block["input"]).decode()}


def error_response(status: int, message: str, code: str | None = None) -> Response:
    """An error response in Anthropic's form."""
    if code == "context_length_exceeded":  # agents know it by these words
        message = f"prompt is too long: {message}"
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return failed_response(status, {"type": "error", "error": {"type": kind, "message": message}})


class _Block(msgspec.Struct, dict=True):
    """A part of a message."""

    type: str
    text: str = ""
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: msgspec.Raw = msgspec.Raw(b"{}")
    tool_use_id: str = ""
    content: "_Content" = ""
    source: Json | None = None

    def called(self) -> ToolCall:
        return ToolCall(id=self.id, function=Function(self.name, bytes(self.input).decode()))

    @cached_property
    def file(self) -> bytes:
        """The file of an image. Raises DataError unless it is in the request."""
        source = self.source or {}
        if source.get("type") != "base64":
            raise elsewhere(source.get("url"), 'with a source of type "base64"')
        return decoded_url(f"data:;base64,{source.get('data')}", "an image of a message")


_Content: TypeAlias = str | list[_Block]


def _text_of(content: _Content, where: str) -> str:
    """The texts of a content, a paragraph each. Raises DataError for other parts."""
    if isinstance(content, str):
        return content
    for block in content:
        if block.type != "text":
            raise DataError(f"{where} has a part of type {block.type!r}, and only text is read")
    return "\n\n".join(block.text for block in content)


def _heard_text(content: _Content, where: str) -> str:
    """The texts of a content, a paragraph each, with what stands for its images. Raises DataError for other parts."""
    if isinstance(content, str):
        return unmarked(content)
    return "".join(
        "".join(mark_of(name_of(block.file)) for block in run) if is_image else unmarked(_text_of([*run], where))
        for is_image, run in groupby(content, _is_image)
    )


def _is_image(block: _Block) -> bool:
    return block.type == "image"


def _files_in(content: _Content) -> Iterator[bytes]:
    """Yield the files of the images in a content, and in the results of tools in it."""
    for block in content if isinstance(content, list) else ():
        if _is_image(block):
            yield block.file
        yield from _files_in(block.content)


class _Message(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: _Content

    def read(self) -> Iterator[Message]:
        """The messages that a template reads for this one."""
        if isinstance(self.content, str):
            yield Message(self.role, self.content if self.role == "assistant" else unmarked(self.content))
        elif self.role == "assistant":
            yield _said(self.content)
        else:
            yield from _heard(self.role, self.content)


def _said(blocks: Iterable[_Block]) -> Message:
    """An answer of the model."""
    text, calls = "", list[ToolCall]()
    for block in blocks:
        if block.type == "thinking":
            text += tagged_thought(block.thinking)
        elif block.type == "tool_use":
            calls.append(block.called())
        else:
            text += _text_of([block], "an assistant's message")
    return Message("assistant", text, tool_calls=tuple(calls))


def _heard(role: str, blocks: Sequence[_Block]) -> Iterator[Message]:
    """The results of tools, each a message, and the texts between them."""
    texts = list[_Block]()
    for block in blocks:
        if block.type == "tool_result":
            if texts:
                yield Message(role, _heard_text(texts, f"a {role}'s message"))
            texts = []
            text = _heard_text(block.content, "a tool's result")
            yield Message("tool", text, tool_call_id=block.tool_use_id)
        else:
            texts.append(block)
    if texts or not blocks:
        yield Message(role, _heard_text(texts, f"a {role}'s message"))


class _Tool(msgspec.Struct):
    name: str
    input_schema: Json | None = None
    description: str | None = None
    type: str | None = None

    def read(self) -> Tool:
        """Return the tool as chat templates read it. Raises DataError for a tool that has only a name."""
        if self.type not in (None, "custom") or self.input_schema is None:
            raise DataError(
                f"tools: {self.name!r} of type {self.type!r} is not served: give tools with an input_schema, which the "
                "program runs"
            )
        described = {"description": self.description} if self.description is not None else {}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": self.input_schema}}


class _Choice(msgspec.Struct):
    type: Literal["auto", "none", "any", "tool"]
    name: str = ""


class _Output(msgspec.Struct):
    format: Json | None = None


class CountRequest(ModelRequest, kw_only=True):
    """`/v1/messages/count_tokens`."""

    messages: Annotated[list[_Message], msgspec.Meta(min_length=1)]
    system: _Content = ""
    tools: list[_Tool] | None = None
    tool_choice: _Choice | None = None
    output_config: _Output | None = None
    mcp_servers: list[Any] | None = None
    reply: ClassVar[type[Reply]] = CountReply
    is_counted: ClassVar[bool] = True

    def read(self) -> Asked:
        """Return the request. Raises DataError for unsupported features."""
        if self.mcp_servers:
            raise DataError("mcp_servers: the program runs tools itself: give them as tools")
        if self.messages[-1].role == "assistant":
            raise DataError(
                "messages: the last is the assistant's, and answers are not continued: end with a message of the user"
            )
        given = self.output_config.format if self.output_config else None
        form = schema_form(given.get("schema"), "output_config.format") if given else None
        system = unmarked(_text_of(self.system, "system"))
        messages = [Message("system", system)] if system else []
        messages += [read for message in self.messages for read in message.read()]
        choice = self.tool_choice or _Choice("auto")
        tools = offered([tool.read() for tool in self.tools or ()], choice.type)
        called = names_called(tools, {"any": "required", "tool": {"name": choice.name}}.get(choice.type, choice.type))
        images = by_name(file for message in self.messages for file in _files_in(message.content))
        return Asked(messages, None, tools, form=form, called=called, images=images)


class MessagesRequest(CountRequest, kw_only=True):
    """`/v1/messages`."""

    max_tokens: Count
    stop_sequences: list[str] | None = None
    reply: ClassVar[type[Reply]] = MessagesReply
    is_counted: ClassVar[bool] = False

    def read(self) -> Asked:
        """Return the request. Raises DataError for unsupported features."""
        asked = super().read()
        stops = [text for text in self.stop_sequences or () if text]
        return replace(asked, limit=self.max_tokens, stops=stops)
