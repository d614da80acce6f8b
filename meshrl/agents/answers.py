"""Answers to clients of OpenAI's protocol: whole or streamed, and errors."""

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from meshrl.agents.chat import Chat, Message
from meshrl.agents.drawing import Answer

MODEL: Final = "policy"
"""The model's name."""
Kind: TypeAlias = Literal["chat.completion", "text_completion"]
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
class Told:
    """All data of a response."""

    kind: Kind
    id: str
    choices: Sequence[Choice]
    prompt_tokens: int
    logprobs: Chat | None = None
    """Decodes the tokens whose log-probs are returned."""

    def whole(self) -> Response:
        """The response in one piece."""
        choices = [
            self._choice(index, choice, {"message" if self._is_chat else "text": _said(choice.said)})
            for index, choice in enumerate(self.choices)
        ]
        return told(200, {**self._head(self.kind), "choices": choices, "usage": self._usage()})

    def stream(self, usage: bool, seconds: float) -> Response:
        """The response as events. A client that reads nothing for `seconds` is disconnected."""
        kind = "chat.completion.chunk" if self._is_chat else self.kind
        head = {**self._head(kind), **({"usage": None} if usage else {})}
        pieces = [
            {**head, "choices": [piece]}
            for index, choice in enumerate(self.choices)
            for piece in self._pieces(index, choice)
        ]
        if usage:
            pieces.append({**head, "choices": [], "usage": self._usage()})
        return Events([*map(msgspec.json.encode, pieces), b"[DONE]"], seconds)

    @property
    def _is_chat(self) -> bool:
        return self.kind == "chat.completion"

    def _head(self, kind: str) -> _Json:
        return {"id": self.id, "object": kind, "created": 0, "model": MODEL}

    def _usage(self) -> _Json:
        drawn = sum(len(choice.answer.drawn.tokens) for choice in self.choices)
        total = self.prompt_tokens + drawn
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": drawn, "total_tokens": total}

    def _choice(self, index: int, choice: Choice, said: _Json, ends: bool = True) -> _Json:
        return {
            "index": index,
            **said,
            "logprobs": self._logprobs(choice, self.logprobs) if ends and self.logprobs else None,
            "finish_reason": choice.reason if ends else None,
        }

    def _logprobs(self, choice: Choice, chat: Chat) -> _Json:
        drawn = choice.answer.drawn
        tokens, logprobs = [chat.decode([token]) for token in drawn.tokens.tolist()], drawn.logprobs.tolist()
        if not self._is_chat:
            return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": None}
        return {
            "content": [
                {"token": token, "logprob": logprob, "bytes": None, "top_logprobs": []}
                for token, logprob in zip(tokens, logprobs, strict=True)
            ]
        }

    def _pieces(self, index: int, choice: Choice) -> Iterator[_Json]:
        said = _said(choice.said)
        if isinstance(said, str):
            yield self._choice(index, choice, {"text": said})
            return
        calls = said.pop("tool_calls", [])
        yield self._choice(index, choice, {"delta": said}, ends=False)
        if calls:
            numbered = [{"index": number, **call} for number, call in enumerate(calls)]
            yield self._choice(index, choice, {"delta": {"tool_calls": numbered}}, ends=False)
        yield self._choice(index, choice, {"delta": {}})


class Events(Response):
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


_TYPES: Final[Mapping[int, str]] = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def told(status: int, body: _Json, headers: Mapping[str, str] | None = None) -> Response:
    """A response with a JSON body."""
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def refused(status: int, message: str, code: str | None = None) -> Response:
    """An error response in OpenAI's form."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    body = {
        "error": {
            "message": message.encode(errors="backslashreplace").decode(),
            "type": kind,
            "param": None,
            "code": code,
        }
    }
    return told(status, body, {"retry-after": "1"} if status == 429 else None)


def _said(said: Message | str) -> Any:
    if isinstance(said, str):
        return said
    whole: _Json = {"role": said.role, "content": said.content or (None if said.tool_calls else "")}
    if said.tool_calls:
        whole["tool_calls"] = msgspec.to_builtins(said.tool_calls)
    return whole
