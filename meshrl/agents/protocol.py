"""OpenAI's protocol: requests of three kinds, read into one form, and the answers to them, whole or streamed.

Unknown fields are not read. `temperature`, `top_p` and `seed` are not read either: the run sets them, because the
policy learns from its log-probs. `/v1/responses` is another form of the same conversation: thoughts, an assistant's
message and the tool calls that follow it form one message, as they were drawn. Thoughts in separate fields are put
before the text of their message.
"""

import asyncio
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias, TypeVar, cast

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from meshrl.agents.chat import Chat, Function, Message, Tool, ToolCall, message_of
from meshrl.agents.conversation import Drawn
from meshrl.agents.forms import Structured, call_forms, format_form, names_called, structured_form
from meshrl.agents.meaning import split_thoughts
from meshrl.data import Branch, Constraint, mark_of, name_of, unmarked
from meshrl.errors import DataError, shortened
from meshrl.tasks import decoded_url

MODEL: Final = "policy"
"""The model's name."""
_TEXTS: Final = ("text", "input_text", "output_text", "refusal")
_IMAGES: Final = ("image_url", "input_image")
_MOST_IMAGES: Final = 64
"""Most different images of a request."""
_THOUGHTS: Final = ("thinking", "reasoning", "text", "content", "summary")
"""Fields in which clients put the text of a thought."""
_THOUGHT: Final = re.compile("(</?think>)")
"""Tags that are separate pieces of a stream. Clients such as pydantic-ai see a thought by these."""
_TYPES: Final[Mapping[int, str]] = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}

T = TypeVar("T")
Json: TypeAlias = dict[str, Any]
"""An object of JSON."""
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
"""A number of tokens."""
_Choices: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=128)]


@dataclass(frozen=True)
class Asked:
    """A request of any kind."""

    prompt: str | Sequence[Message]
    """A text to continue, or the messages."""
    limit: int | None
    """Limit of an answer, in tokens."""
    tools: Sequence[Tool] = ()
    count: int = 1
    """Number of answers."""
    stops: Sequence[str] = ()
    """Texts that end an answer."""
    usage: bool = False
    """True if a stream ends with the usage."""
    logprobs: bool = False
    """True if the answer has the log-prob of each token."""
    form: Branch | None = None
    """The form of an answer without a call. None if it is free."""
    called: Sequence[str] = ()
    """The model must call one of these tools. Empty if it need not call any."""
    images: Mapping[str, bytes] = field(default_factory=dict[str, bytes], repr=False)
    """The files of the images that messages name."""

    def constraint(self, chat: Chat, thought: str) -> Constraint | None:
        """Return what the answer may be, None if anything. `thought`: the tag that ends an open thought, or ""."""
        forms = [self.form] if self.form and not self.called else []
        if self.tools and (self.called or forms):
            count = sum(len(message.tool_calls) for message in self.prompt if isinstance(message, Message))
            forms += call_forms(self.tools, self.called, chat.calls, count, after_thought=bool(thought))
        return Constraint(tuple(forms), thought) if forms else None

    def said(self, text: str, new_id: Callable[[], str], *, is_whole: bool) -> Message | str:
        """Return what the client gets of the model's text, and ids for its calls. `is_whole`: False if it was cut."""
        return text if isinstance(self.prompt, str) else message_of(text, self.tools, new_id, is_whole=is_whole)


@dataclass(frozen=True)
class Choice:
    """One answer to a request."""

    said: Message | str
    """What the client gets: a message, or the completion of a text."""
    drawn: Drawn

    @property
    def reason(self) -> str:
        """The finish reason."""
        if self.drawn.truncated:
            return "length"
        return "tool_calls" if isinstance(self.said, Message) and self.said.tool_calls else "stop"


@dataclass(frozen=True)
class Reply(ABC):
    """The answer to a request."""

    asked: Asked
    id: str
    choices: Sequence[Choice]
    prompt_tokens: int
    chat: Chat
    """Decodes the tokens whose log-probs are returned."""

    @abstractmethod
    def whole(self) -> Json:
        """The answer in one piece."""

    @abstractmethod
    def events(self) -> Iterator[Json | bytes]:
        """The answer in pieces, each a value or its JSON."""

    def _usage(self, prompt: str, drawn: str) -> Json:
        """The numbers of tokens, under these names and `total_tokens`."""
        count = sum(len(choice.drawn.tokens) for choice in self.choices)
        return {prompt: self.prompt_tokens, drawn: count, "total_tokens": self.prompt_tokens + count}


class CompletionReply(Reply):
    """The answer to `/v1/chat/completions` or `/v1/completions`."""

    def whole(self) -> Json:
        """The answer in one piece."""
        name = "text" if self._is_text else "message"
        choices = [
            self._choice(index, choice, {name: _content(choice.said)}) for index, choice in enumerate(self.choices)
        ]
        return {**self._head("chat.completion"), "choices": choices, **self._counts}

    def events(self) -> Iterator[Json | bytes]:
        """The answer in pieces."""
        head = self._head("chat.completion.chunk") | ({"usage": None} if self.asked.usage else {})
        for index, choice in enumerate(self.choices):
            for piece in self._pieces(index, choice):
                yield {**head, "choices": [piece]}
        if self.asked.usage:
            yield {**head, "choices": [], **self._counts}
        yield b"[DONE]"

    @property
    def _is_text(self) -> bool:
        return isinstance(self.asked.prompt, str)

    @property
    def _counts(self) -> Json:
        return {"usage": self._usage("prompt_tokens", "completion_tokens")}

    def _head(self, kind: str) -> Json:
        return {"id": self.id, "object": "text_completion" if self._is_text else kind, "created": 0, "model": MODEL}

    def _choice(self, index: int, choice: Choice, content: Json, ends: bool = True) -> Json:
        return {
            "index": index,
            **content,
            "logprobs": self._logprobs(choice.drawn) if ends and self.asked.logprobs else None,
            "finish_reason": choice.reason if ends else None,
        }

    def _logprobs(self, drawn: Drawn) -> Json:
        tokens, logprobs = [self.chat.decode([token]) for token in drawn.tokens.tolist()], drawn.logprobs.tolist()
        if self._is_text:
            return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": None}
        content = [
            {"token": token, "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token, logprob in zip(tokens, logprobs, strict=True)
        ]
        return {"content": content}

    def _pieces(self, index: int, choice: Choice) -> Iterator[Json]:
        content = _content(choice.said)
        if isinstance(content, str):
            yield self._choice(index, choice, {"text": content})
            return
        calls, text = content.pop("tool_calls", []), content.pop("content")
        pieces = list(filter(None, _THOUGHT.split(text or ""))) or [text]
        deltas: list[Json] = [{"content": piece} for piece in pieces]
        deltas[0] |= content
        if calls:
            deltas.append({"tool_calls": [{"index": number, **call} for number, call in enumerate(calls)]})
        yield from (self._choice(index, choice, {"delta": delta}, ends=False) for delta in deltas)
        yield self._choice(index, choice, {"delta": {}})


def _content(said: Message | str) -> Any:
    if isinstance(said, str):
        return said
    message: Json = {"role": said.role, "content": said.content or (None if said.tool_calls else "")}
    if said.tool_calls:
        message["tool_calls"] = msgspec.to_builtins(said.tool_calls)
    return message


class ResponsesReply(Reply):
    """The answer to `/v1/responses`."""

    def whole(self) -> Json:
        """The answer in one piece."""
        usage = self._usage("input_tokens", "output_tokens")
        details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
        status = "incomplete" if self.choices[0].drawn.truncated else "completed"
        return {**self._head(status, self._output()), "usage": dict(sorted((usage | details).items()))}

    def events(self) -> Iterator[Json | bytes]:
        """The answer in pieces."""
        return ({**event, "sequence_number": number} for number, event in enumerate(self._events()))

    def _head(self, status: str, output: Sequence[Json]) -> Json:
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

    def _output(self) -> list[Json]:
        said = self.choices[0].said
        text, calls = (said, ()) if isinstance(said, str) else (said.content, said.tool_calls)
        part: Json = {"type": "output_text", "text": text, "annotations": []}
        message: Json = {"type": "message", "id": f"msg_{self.id}", "role": "assistant", "content": [part]}
        items: list[Json] = [message] if text or not calls else []
        for call in calls:
            head: Json = {"type": "function_call", "id": f"fc_{self.id}_{call.id}", "call_id": call.id}
            items.append({**head, "name": call.function.name, "arguments": call.function.arguments})
        return [{**item, "status": "completed"} for item in items]

    def _events(self) -> Iterator[Json]:
        yield {"type": "response.created", "response": self._head("in_progress", [])}
        for index, item in enumerate(self._output()):
            place: Json = {"output_index": index, "item_id": item["id"]}
            emptied: Json = {"content": []} if item["type"] == "message" else {"arguments": ""}
            begun = {**item, **emptied, "status": "in_progress"}
            yield {"type": "response.output_item.added", "output_index": index, "item": begun}
            for kind, fields in _grown(item):
                yield {"type": f"response.{kind}", **place, **fields}
            yield {"type": "response.output_item.done", "output_index": index, "item": item}
        ended = self.whole()
        yield {"type": f"response.{ended['status']}", "response": ended}


def _grown(item: Json) -> Iterator[tuple[str, Json]]:
    """The events between an item's beginning and its end."""
    if item["type"] == "function_call":
        arguments = item["arguments"]
        yield "function_call_arguments.delta", {"delta": arguments}
        yield "function_call_arguments.done", {"name": item["name"], "arguments": arguments}
        return
    (part,), place = item["content"], {"content_index": 0}
    yield "content_part.added", {**place, "part": {**part, "text": ""}}
    yield "output_text.delta", {**place, "delta": part["text"], "logprobs": []}
    yield "output_text.done", {**place, "text": part["text"], "logprobs": []}
    yield "content_part.done", {**place, "part": part}


class EventStream(Response):
    """Server-sent events. A client that reads nothing for the time limit is disconnected."""

    media_type = "text/event-stream"

    def __init__(self, events: Iterable[Json | bytes], seconds: float) -> None:
        super().__init__(None, headers={"cache-control": "no-store"})
        del self.headers["content-length"]
        self._events = [b"data: " + event if isinstance(event, bytes) else _event(event) for event in events]
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events. Each waits until the client has read the previous ones."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for event in self._events:
            async with asyncio.timeout(self._seconds):
                await send({"type": "http.response.body", "body": event + b"\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def _event(event: Json) -> bytes:
    """The lines of an event. It has the name of its type, if it has one."""
    kind = event.get("type")
    return (f"event: {kind}\n".encode() if kind else b"") + b"data: " + msgspec.json.encode(event)


def json_response(status: int, body: Json, headers: Mapping[str, str] | None = None) -> Response:
    """A response with a JSON body."""
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def error_response(status: int, message: str, code: str | None = None) -> Response:
    """An error response in OpenAI's form."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    error = {"message": message, "type": kind, "param": None, "code": code}
    return failed_response(status, {"error": error})


def failed_response(status: int, body: Json) -> Response:
    """A response with an error, in a protocol's form. Its `error` has a `message`, of any text."""
    body["error"]["message"] = body["error"]["message"].encode(errors="backslashreplace").decode()
    return json_response(status, body, {"retry-after": "1"} if status == 429 else None)


_Content: TypeAlias = str | list[Json] | None


def _text_of(content: _Content, *, is_said: bool = False) -> str:
    """Return the text, with thoughts in tags; what the model said, as it is. Raises DataError for other content."""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    return "".join(_part_of(part, is_said) for part in parts)


def _part_of(part: Json, is_said: bool) -> str:
    kind = str(part.get("type"))
    if kind in _IMAGES and is_said:
        raise DataError("an assistant's message has an image, and models write none: move it to a user's")
    if kind in _IMAGES:
        return mark_of(name_of(_file_of(part)))
    if "thinking" in kind or "reasoning" in kind:
        text = tagged_thought(part)
    elif kind in _TEXTS:
        text = str(part.get("text") or part.get("refusal") or "")
    else:
        raise DataError(f"a message has a part of type {kind!r}, and only texts and images are read")
    return text if is_said else unmarked(text)


def _file_of(part: Json) -> bytes:
    """Return the file of a part that is an image. Raises DataError unless it is in the request."""
    value: object = part.get("image_url")
    url = cast("Json", value).get("url") if isinstance(value, dict) else value
    if not isinstance(url, str) or not url.startswith("data:"):
        raise elsewhere(url, "as a data URL, data:image/png;base64,...")
    return decoded_url(url, "an image of a message")


def elsewhere(url: object, form: str) -> DataError:
    """The error of an image that is not in the request. `form`: how to send it."""
    what = f"a message has the image {shortened(url)}: images are not fetched from other hosts"
    return DataError(f"{what}: send it in the request {form}")


def _images_of(contents: Iterable[_Content]) -> Mapping[str, bytes]:
    """Return the files of all images in contents, by name. Raises DataError if one is not in the request."""
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return by_name(_file_of(part) for part in parts if part.get("type") in _IMAGES)


def by_name(files: Iterable[bytes]) -> Mapping[str, bytes]:
    """Return the files of a request's images by name. Raises DataError if they are too many."""
    found = {name_of(file): file for file in files}
    if len(found) > _MOST_IMAGES:
        raise DataError(f"the messages have {len(found)} different images, and at most {_MOST_IMAGES} are read")
    return found


def tagged_thought(value: object) -> str:
    """The text of a thought as most models write it before the text. "" if there is none."""
    thought = _thought_in(value)
    return f"<think>\n{thought}\n</think>\n\n" if thought else ""


def _thought_in(value: Any, depth: int = 4) -> str:
    """The text of a thought, in whatever form a client has put it."""
    if isinstance(value, dict) and depth:
        return next(filter(None, (_thought_in(value.get(name), depth - 1) for name in _THOUGHTS)), "")
    if isinstance(value, list) and depth:
        return "\n\n".join(filter(None, (_thought_in(each, depth - 1) for each in value)))
    return value.strip() if isinstance(value, str) else ""


class _Function(msgspec.Struct):
    name: str
    arguments: str | Json | None = None

    def called(self, name: str | None) -> ToolCall:
        given = self.arguments
        text = msgspec.json.encode(given).decode() if isinstance(given, dict) else given or "{}"
        return ToolCall(id=name or "", function=Function(self.name, text))


class _Call(msgspec.Struct):
    function: _Function
    id: str | None = None


class _Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: _Content = None
    name: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    reasoning_content: Any = None
    reasoning: Any = None
    thinking: Any = None
    thinking_blocks: Any = None
    reasoning_details: Any = None

    def read(self) -> Message:
        text = _text_of(self.content, is_said=self.role == "assistant")
        if self.role == "assistant" and not split_thoughts(text)[1]:
            fields = self.reasoning_content, self.reasoning, self.thinking, self.thinking_blocks, self.reasoning_details
            text = next(filter(None, map(tagged_thought, fields)), "") + text
        calls = tuple(call.function.called(call.id) for call in self.tool_calls or ())
        return Message(self.role, text, self.name, calls, self.tool_call_id)


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class ModelRequest(msgspec.Struct, kw_only=True):
    """The fields of every kind of request."""

    model: str
    """Ignored: the policy always answers."""
    stream: bool | None = None
    reply: ClassVar[type[Reply]] = CompletionReply
    is_counted: ClassVar[bool] = False
    """True if the answer is the prompt's number of tokens."""

    def read(self) -> Asked:
        """Return the request. Raises DataError for unsupported features."""
        raise NotImplementedError


class _CompletionFields(ModelRequest, kw_only=True):
    structured_outputs: Structured | None = None
    n: _Choices | None = None
    stop: str | list[str] | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: Count | None = None

    def _asked(
        self,
        prompt: str | Sequence[Message],
        limit: int | None,
        tools: Sequence[Tool],
        *,
        logprobs: bool,
        form: Branch | None = None,
        called: Sequence[str] = (),
    ) -> Asked:
        form = structured_form(self.structured_outputs, form)
        texts = [self.stop] if isinstance(self.stop, str) else self.stop or ()
        usage = self.stream_options is not None and self.stream_options.include_usage
        return Asked(prompt, limit, tools, self.n or 1, [text for text in texts if text], usage, logprobs, form, called)


class ChatRequest(_CompletionFields, kw_only=True):
    """`/v1/chat/completions`."""

    messages: Annotated[list[_Message], msgspec.Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    response_format: Json | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def read(self) -> Asked:
        """Return the request. Raises DataError for unsupported features."""
        if self.top_logprobs:
            raise DataError("top_logprobs: only the sampled token's log-prob is available: set this to 0")
        given = self.response_format or {}
        schema = given.get("json_schema")
        schema = schema.get("schema") if isinstance(schema, dict) else None
        form = format_form(given.get("type"), schema, "response_format")
        images = _images_of(each.content for each in self.messages)
        messages, tools = [each.read() for each in self.messages], offered(self.tools, self.tool_choice)
        called, limit = names_called(tools, self.tool_choice), self.max_completion_tokens or self.max_tokens
        asked = self._asked(messages, limit, tools, logprobs=bool(self.logprobs), form=form, called=called)
        return replace(asked, images=images)


class CompletionRequest(_CompletionFields, kw_only=True):
    """`/v1/completions`."""

    prompt: str | list[str]
    echo: bool | None = None
    logprobs: int | None = None

    def read(self) -> Asked:
        """Return the request. Raises DataError for unsupported features."""
        if self.echo:
            raise DataError("echo: an answer does not repeat the prompt: leave it out")
        if self.logprobs:
            raise DataError("logprobs: only the sampled token's log-prob is available: set this to 0")
        texts = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        if len(texts) != 1:
            raise DataError(f"prompt: there are {len(texts)}: give one text, and send one request per prompt")
        return self._asked(texts[0], self.max_tokens, (), logprobs=self.logprobs is not None)


class _Item(msgspec.Struct):
    type: str = "message"
    role: str | None = None
    content: _Content = ""
    call_id: str = ""
    name: str = ""
    arguments: str | Json | None = None
    output: _Content = ""
    summary: Any = None

    def read(self) -> Message:
        if self.type == "function_call":
            return Message("assistant", tool_calls=(_Function(self.name, self.arguments).called(self.call_id),))
        if self.type == "reasoning":
            return Message("assistant", _text_of(self.content, is_said=True) or tagged_thought(self.summary))
        if self.type == "function_call_output":
            return Message("tool", _text_of(self.output), tool_call_id=self.call_id)
        if self.type != "message" or self.role not in ("system", "developer", "user", "assistant"):
            raise DataError(
                f"the input has an item of type {self.type!r} and role {self.role!r}: messages of system, developer, "
                "user and assistant are read, reasoning, function_call and function_call_output"
            )
        return Message(self.role, _text_of(self.content, is_said=self.role == "assistant"))


class _Tool(msgspec.Struct, omit_defaults=True):
    type: str
    name: str = ""
    description: str | None = None
    parameters: Json | None = None

    def read(self) -> Tool:
        """Return the tool as chat templates read it. Raises DataError for tools that OpenAI hosts."""
        if self.type != "function":
            raise DataError(f"tools: {self.type!r} is not served: give tools of type function, which the program runs")
        function = {name: value for name, value in msgspec.to_builtins(self).items() if name != "type"}
        return {"type": "function", "function": function}


class _Format(msgspec.Struct):
    type: str = "text"
    schema: Json | bool | None = None


class _Text(msgspec.Struct):
    format: _Format | None = None


class ResponsesRequest(ModelRequest, kw_only=True):
    """`/v1/responses`."""

    input: str | list[_Item]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    tools: list[_Tool] | None = None
    tool_choice: str | Json | None = None
    text: _Text | None = None
    previous_response_id: str | None = None
    reply: ClassVar[type[Reply]] = ResponsesReply

    def read(self) -> Asked:
        """Return the request. Raises DataError for unsupported features."""
        if self.previous_response_id is not None:
            raise DataError("previous_response_id: answers are not kept: give the whole conversation as input")
        given = self.text.format if self.text else None
        form = format_form(given.type, given.schema, "text.format") if given else None
        items = [_Item(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        images = _images_of(content for item in items for content in (item.content, item.output))
        messages = [] if self.instructions is None else [Message("system", self.instructions)]
        is_thought = False
        for item in items:
            read = item.read()
            if (
                messages
                and read.role == messages[-1].role == "assistant"
                and (is_thought or item.type == "function_call")
            ):
                last = messages.pop()
                read = Message("assistant", last.content + read.content, tool_calls=last.tool_calls + read.tool_calls)
            is_thought = item.type == "reasoning"
            messages.append(read)
        tools = offered([tool.read() for tool in self.tools or ()], self.tool_choice)
        called = names_called(tools, self.tool_choice)
        return Asked(messages, self.max_output_tokens, tools, form=form, called=called, images=images)


def offered(tools: Sequence[Tool] | None, choice: object) -> Sequence[Tool]:
    """The tools that the model may call."""
    return () if choice == "none" else tools or ()


def decoded(body: bytes, kind: type[T]) -> T:
    """Parse a request. Raises DataError that names the invalid field."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"the body is no such request: {error}") from error
