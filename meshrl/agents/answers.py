"""Answers to clients of OpenAI's protocol: whole or streamed, and errors."""

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from meshrl.agents.batcher import Answer
from meshrl.agents.chat import Chat, Message

MODEL: Final = "policy"
"""The model's name."""
_TYPES: Final[Mapping[int, str]] = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_Json: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Choice:
    """One answer to a request."""

    said: Message | str
    answer: Answer

    @property
    def reason(self) -> str:
        """The finish reason."""
        if self.answer.drawn.truncated:
            return "length"
        return "tool_calls" if isinstance(self.said, Message) and self.said.tool_calls else "stop"


@dataclass(frozen=True)
class Completion:
    """The answer to `/v1/chat/completions` or `/v1/completions`."""

    is_chat: bool
    id: str
    choices: Sequence[Choice]
    prompt_tokens: int
    logprobs: Chat | None = None
    """Decodes the tokens whose log-probs are returned."""

    def whole(self) -> Response:
        """The answer in one piece."""
        choices = [
            self._choice(index, choice, {"message" if self.is_chat else "text": _content(choice.said)})
            for index, choice in enumerate(self.choices)
        ]
        head = self._head("chat.completion" if self.is_chat else "text_completion")
        return json_response(200, {**head, "choices": choices, "usage": self._usage()})

    def stream(self, usage: bool, seconds: float) -> Response:
        """The answer as events. A client that reads nothing for `seconds` is disconnected."""
        head = self._head("chat.completion.chunk" if self.is_chat else "text_completion")
        head |= {"usage": None} if usage else {}
        pieces = [
            {**head, "choices": [piece]}
            for index, choice in enumerate(self.choices)
            for piece in self._pieces(index, choice)
        ]
        if usage:
            pieces.append({**head, "choices": [], "usage": self._usage()})
        return _Events([*map(msgspec.json.encode, pieces), b"[DONE]"], seconds)

    def _head(self, kind: str) -> _Json:
        return {"id": self.id, "object": kind, "created": 0, "model": MODEL}

    def _usage(self) -> _Json:
        drawn = sum(len(choice.answer.drawn.tokens) for choice in self.choices)
        total = self.prompt_tokens + drawn
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": drawn, "total_tokens": total}

    def _choice(self, index: int, choice: Choice, content: _Json, ends: bool = True) -> _Json:
        return {
            "index": index,
            **content,
            "logprobs": self._logprobs(choice, self.logprobs) if ends and self.logprobs else None,
            "finish_reason": choice.reason if ends else None,
        }

    def _logprobs(self, choice: Choice, chat: Chat) -> _Json:
        drawn = choice.answer.drawn
        tokens, logprobs = [chat.decode([token]) for token in drawn.tokens.tolist()], drawn.logprobs.tolist()
        if not self.is_chat:
            return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": None}
        content = [
            {"token": token, "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token, logprob in zip(tokens, logprobs, strict=True)
        ]
        return {"content": content}

    def _pieces(self, index: int, choice: Choice) -> Iterator[_Json]:
        content = _content(choice.said)
        if isinstance(content, str):
            yield self._choice(index, choice, {"text": content})
            return
        calls = content.pop("tool_calls", [])
        yield self._choice(index, choice, {"delta": content}, ends=False)
        if calls:
            numbered = [{"index": number, **call} for number, call in enumerate(calls)]
            yield self._choice(index, choice, {"delta": {"tool_calls": numbered}}, ends=False)
        yield self._choice(index, choice, {"delta": {}})


def _content(said: Message | str) -> Any:
    if isinstance(said, str):
        return said
    message: _Json = {"role": said.role, "content": said.content or (None if said.tool_calls else "")}
    if said.tool_calls:
        message["tool_calls"] = msgspec.to_builtins(said.tool_calls)
    return message


@dataclass(frozen=True)
class ResponseObject:
    """The answer to `/v1/responses`."""

    id: str
    choice: Choice
    prompt_tokens: int

    def whole(self) -> Response:
        """The answer in one piece."""
        return json_response(200, self._ended())

    def stream(self, seconds: float) -> Response:
        """The answer as events. A client that reads nothing for `seconds` is disconnected."""
        numbered = ({**event, "sequence_number": number} for number, event in enumerate(self._events()))
        return _Events(map(msgspec.json.encode, numbered), seconds)

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
        items: list[_Json] = [message] if text or not calls else []
        for call in calls:
            head: _Json = {"type": "function_call", "id": f"fc_{self.id}_{call.id}", "call_id": call.id}
            items.append({**head, "name": call.function.name, "arguments": call.function.arguments})
        return [{**item, "status": "completed"} for item in items]

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


class _Events(Response):
    """Server-sent events. A client that reads nothing for the time limit is disconnected."""

    media_type = "text/event-stream"

    def __init__(self, events: Iterable[bytes], seconds: float) -> None:
        super().__init__(None, headers={"cache-control": "no-store"})
        del self.headers["content-length"]
        self._events = events
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events. Each waits until the client has read the previous ones."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for event in self._events:
            body = b"data: " + event + b"\n\n"
            async with asyncio.timeout(self._seconds):
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def json_response(status: int, body: _Json, headers: Mapping[str, str] | None = None) -> Response:
    """A response with a JSON body."""
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def error_response(status: int, message: str, code: str | None = None) -> Response:
    """An error response in OpenAI's form."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    text = message.encode(errors="backslashreplace").decode()
    error = {"message": text, "type": kind, "param": None, "code": code}
    return json_response(status, {"error": error}, {"retry-after": "1"} if status == 429 else None)
