"""Requests of OpenAI's protocol, read and checked. Unknown fields are ignored.

`temperature`, `top_p` and `seed` are ignored too: the run sets them, because the policy learns from its log-probs.
`/v1/responses` is another form of the same conversation: an assistant's message and the tool calls that follow it form
one message, as they were drawn.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar

import msgspec

from meshrl.agents.chat import Function, Message, Tool, ToolCall
from meshrl.errors import DataError

R = TypeVar("R", bound=msgspec.Struct)
_Json: TypeAlias = dict[str, Any]
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
_Choices: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=128)]
_TEXTS: Final = ("text", "input_text", "output_text", "refusal")


class Part(msgspec.Struct):
    """A part of a message: a text, or content that the samplers cannot read."""

    type: str
    text: str = ""
    refusal: str = ""
    """The text of a refusal by another model."""


_Content: TypeAlias = str | list[Part] | None


def _text_of(content: _Content) -> str:
    """Return the text. Raises DataError for other content."""
    if content is None or isinstance(content, str):
        return content or ""
    other = next((part.type for part in content if part.type not in _TEXTS), None)
    if other is not None:
        raise DataError(f"a message has a part of type {other!r}, and only text is read")
    return "".join(part.text or part.refusal for part in content)


class _Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: _Content = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    def read(self) -> Message:
        calls = tuple(self.tool_calls or ())
        return Message(self.role, _text_of(self.content), self.name, calls, self.tool_call_id)


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class Request(msgspec.Struct, kw_only=True):
    """The fields of every kind of request."""

    model: str
    """Ignored: the policy always answers."""
    stream: bool | None = None

    @property
    def limit(self) -> int | None:
        """Limit of an answer, in tokens."""
        return None

    @property
    def count(self) -> int:
        """Number of answers."""
        return 1

    @property
    def stops(self) -> Sequence[str]:
        """Texts that end an answer."""
        return ()


class _Completed(Request, kw_only=True):
    n: _Choices | None = None
    stop: str | list[str] | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: _Count | None = None

    @property
    def limit(self) -> int | None:
        """Limit of an answer, in tokens."""
        return self.max_tokens

    @property
    def count(self) -> int:
        """Number of answers."""
        return self.n or 1

    @property
    def stops(self) -> Sequence[str]:
        """Texts that end an answer."""
        texts = [self.stop] if isinstance(self.stop, str) else self.stop or ()
        return [text for text in texts if text]

    @property
    def wants_usage(self) -> bool:
        """True if a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class ChatRequest(_Completed, kw_only=True):
    """`/v1/chat/completions`."""

    messages: Annotated[list[_Message], msgspec.Meta(min_length=1)]
    max_completion_tokens: _Count | None = None
    tools: list[_Json] | None = None
    tool_choice: str | _Json | None = None
    response_format: _Json | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @property
    def limit(self) -> int | None:
        """Limit of an answer, in tokens."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def wants_logprobs(self) -> bool:
        """True if the answer has the log-prob of each token."""
        return bool(self.logprobs)

    def read(self) -> tuple[Sequence[Message], Sequence[Tool]]:
        """Return the messages and the available tools. Raises DataError for unsupported features."""
        if self.top_logprobs:
            raise DataError("top_logprobs: only the sampled token's log-prob is available: set this to 0")
        if self.response_format and self.response_format.get("type", "text") != "text":
            raise DataError("response_format: what the model writes is not constrained: take text")
        return [message.read() for message in self.messages], _offered(self.tools, self.tool_choice)


class CompletionRequest(_Completed, kw_only=True):
    """`/v1/completions`."""

    prompt: str | list[str]
    echo: bool | None = None
    logprobs: int | None = None

    @property
    def wants_logprobs(self) -> bool:
        """True if the answer has the log-prob of each token. 0 asks for that of the sampled token alone."""
        return self.logprobs is not None

    def read(self) -> str:
        """Return the prompt. Raises DataError for unsupported features."""
        if self.echo:
            raise DataError("echo: an answer does not repeat the prompt: leave it out")
        if self.logprobs:
            raise DataError("logprobs: only the sampled token's log-prob is available: set this to 0")
        texts = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        if len(texts) != 1:
            raise DataError(f"prompt: there are {len(texts)}: give one text, and send one request per prompt")
        return texts[0]


class _Item(msgspec.Struct):
    type: str = "message"
    role: str | None = None
    content: _Content = ""
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: _Content = ""

    def read(self) -> Message:
        if self.type == "function_call":
            call = ToolCall(id=self.call_id, function=Function(self.name, self.arguments))
            return Message("assistant", tool_calls=(call,))
        if self.type == "function_call_output":
            return Message("tool", _text_of(self.output), tool_call_id=self.call_id)
        if self.type != "message" or self.role not in ("system", "developer", "user", "assistant"):
            raise DataError(
                f"the input has an item of type {self.type!r} and role {self.role!r}: messages of system, developer, "
                "user and assistant are read, function_call and function_call_output"
            )
        return Message(self.role, _text_of(self.content))


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
    """`/v1/responses`."""

    input: str | list[_Item]
    instructions: str | None = None
    max_output_tokens: _Count | None = None
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
        messages = [] if self.instructions is None else [Message("system", self.instructions)]
        for item in items:
            if messages and item.tool_calls and messages[-1].role == "assistant":
                calls = (*messages[-1].tool_calls, *item.tool_calls)
                messages[-1] = msgspec.structs.replace(messages[-1], tool_calls=calls)
            else:
                messages.append(item)
        return messages, _offered([tool.read() for tool in self.tools or ()], self.tool_choice)


def _offered(tools: Sequence[Tool] | None, choice: object) -> Sequence[Tool]:
    """The tools that the model may call. Raises DataError if the request forces a call."""
    if choice not in (None, "auto", "none"):
        raise DataError('tool_choice: what the model writes is not constrained: take "auto" or "none"')
    return () if choice == "none" else tools or ()


def decoded(body: bytes, kind: type[R]) -> R:
    """Parse a request. Raises DataError that names the invalid field."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"the body is no such request: {error}") from error
