"""The gateway: a server in front of a sampler, which records what each session samples.

It speaks OpenAI's protocol and Anthropic's.

    async with Gateway(sampler, chat).serving() as gateway:
        session = gateway.open(sampling)
        ...                          # a program talks to session.url, with session.token as its key
        rows = gateway.close(session)

Each session has a base URL and a bearer token. `gateway.app` is the ASGI application, which tests call without a
server.
"""

import asyncio
import hmac
import itertools
import math
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Final, Self, cast

import msgspec
import numpy as np
import uvicorn
from pydantic import Field
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from meshrl.agents import messages, protocol
from meshrl.agents.batcher import Answer, RequestBatcher
from meshrl.agents.chat import Chat, SeeingChat, check_constraint, check_images
from meshrl.agents.conversation import Conversation, Prompt
from meshrl.agents.meaning import thought_end
from meshrl.config import Config
from meshrl.data import Batch, Constraint
from meshrl.errors import DataError, MeshrlError, ModelError, described
from meshrl.http_server import HttpServer, listen
from meshrl.roles import Sampler, Sampling
from meshrl.user_code import unless_cancelled

_LEFT: Final = 499
"""Status of an answer whose client has disconnected."""
_TAIL: Final = 16
"""Tokens of a prompt among which the tag of an open thought is looked for."""
_KINDS: Final[Mapping[str, type[protocol.ModelRequest]]] = {
    "chat/completions": protocol.ChatRequest,
    "responses": protocol.ResponsesRequest,
    "completions": protocol.CompletionRequest,
    "messages": messages.MessagesRequest,
    "messages/count_tokens": messages.CountRequest,
}
"""The kind of request that each path takes."""


class Feedback(msgspec.Struct, frozen=True, omit_defaults=True):
    """What somebody thinks of an answer, perhaps long after it."""

    id: str
    """The id of an answer, as its client got it, or of a recorded row."""
    reward: Annotated[float, msgspec.Meta(ge=-1e30, le=1e30)] | None = None
    label: bool | None = None


_MODELS: Final[protocol.Json] = {
    "object": "list",
    "data": [
        {
            "id": protocol.MODEL,
            "object": "model",
            "type": "model",
            "display_name": protocol.MODEL,
            "created": 0,
            "created_at": "1970-01-01T00:00:00Z",
            "owned_by": "meshrl",
        }
    ],
    "has_more": False,
    "first_id": protocol.MODEL,
    "last_id": protocol.MODEL,
}
"""The list of models, as clients of both protocols read it."""


class GatewayConfig(Config):
    """Address and limits of the gateway."""

    host: str = "127.0.0.1"
    """Address to listen on. If agents run on other machines, an address that they reach."""
    port: int = Field(default=0, ge=0, lt=2**16)
    """Port to listen on. 0 chooses a free one."""
    body_mib: int = Field(default=16, gt=0)
    """Size of a request's body at most, in MiB."""
    requests: int = Field(default=1024, gt=0)
    """Requests in flight at most. Further ones get status 429, after which clients retry."""
    connections: int = Field(default=4096, gt=0)
    """Connections at most. Further ones get status 503."""
    timeout: float = Field(default=60.0, gt=0)
    """Time limit in seconds for a client to begin a request, to send a body, and to read each piece of a stream."""


@dataclass(eq=False)
class Session:
    """The requests of one program."""

    id: str
    token: str = field(repr=False)
    """The bearer token of its requests."""
    url: str
    """The base URL of OpenAI's clients, ending with /v1."""
    sampling: Sampling
    conversation: Conversation = field(repr=False)
    failure: Exception | None = None
    """What the sampler raised, which is not the program's fault. Reset to None by the next answer."""
    askers: list[str] = field(default_factory=list[str], repr=False)
    """Who asked for each answer: the request's header X-Session-ID, or ""."""
    feedback: Callable[[Feedback], None] | None = field(default=None, repr=False)
    """Keeps feedback on its answers. None if nobody does."""
    draws: dict["asyncio.Future[list[Answer]]", Prompt] = field(default_factory=dict, repr=False)
    """The answers that its requests wait for, each with its prompt."""
    _calls: "itertools.count[int]" = field(default_factory=itertools.count, repr=False)

    @property
    def root(self) -> str:
        """The base URL of Anthropic's clients: `url` without /v1."""
        return self.url.removesuffix("/v1")

    def new_call(self) -> str:
        """A new id for a tool call."""
        number = np.base_repr(next(self._calls), 36)
        return f"call{number:0>5}"  # nine letters and digits, as templates of Mistral require


class Gateway:
    """The server and its sessions."""

    def __init__(self, sampler: Sampler, chat: Chat, config: GatewayConfig | None = None) -> None:
        self.config: GatewayConfig = config or GatewayConfig()
        self._chat = chat
        self._batcher = RequestBatcher(sampler)
        self._sessions: dict[str, Session] = {}
        self._changes = itertools.count(1)
        self._in_flight = 0
        self._base = "http://meshrl.invalid"  # a host that nobody has
        self.is_serving: bool = False
        """True while it listens, so that other processes can reach it."""
        paths = {**_KINDS, "models": None}
        self._served = Starlette(
            routes=[
                Route(f"/s/{{session}}/v1/{path}", self._endpoint(kind), methods=["POST" if kind else "GET"])
                for path, kind in paths.items()
            ]
            + [Route("/s/{session}/v1/feedback", self._feedback, methods=["POST"])],
            exception_handlers={404: _unknown, 405: _unknown},
        )

        async def app(scope: Scope, receive: Receive, send: Send) -> None:  # servers take a method for ASGI 2
            await self._bounded(scope, receive, send)

        self.app: ASGIApp = app

    async def _bounded(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it if there is no room."""
        self._in_flight += 1
        try:
            most = self.config.requests
            full = f"{most} requests are in flight, which is the most: try again (requests)"
            answer = self._served if self._in_flight <= most else _failed(scope["path"], 429, full)
            await answer(scope, receive, send)
        finally:
            self._in_flight -= 1

    def open(self, sampling: Sampling) -> Session:
        """Open a session.

        `sampling` says how answers are drawn. A request may set `n`, lower `max_tokens` and add to `stop`.
        """
        name = secrets.token_hex(8)
        url, token = f"{self._base}/s/{name}/v1", secrets.token_urlsafe(24)
        session = Session(name, token, url, sampling, Conversation(self._chat, self._changes))
        self._sessions[name] = session
        return session

    def close(self, session: Session) -> Batch:
        """Close the session and return its rows, as `Conversation.rows` does.

        Answers in progress are given up, and later requests are refused.
        """
        self._sessions.pop(session.id, None)
        for draws in session.draws:
            draws.cancel()
        return session.conversation.rows()

    def pause(self) -> None:
        """Start no answers, and do not continue any that the sampler stops, until `resume`. Requests wait."""
        self._batcher.pause()

    def resume(self) -> None:
        """Draw the waiting requests."""
        self._batcher.resume()

    async def aclose(self) -> None:
        """Cancel what is being drawn, and draw nothing more."""
        await self._batcher.close()

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[Self]:
        """Listen on the configured address during the block, once. A session's `url` contains the port.

        Raises ConfigError if the address is not available.
        """
        config, inside = self.config, self._base
        listening, host = listen(config.host, config.port), f"[{config.host}]" if ":" in config.host else config.host
        self._base = f"http://{host}:{listening.getsockname()[1]}"
        server = HttpServer(
            uvicorn.Config(
                self.app,
                http=_protocol(config.timeout),
                log_level="error",
                lifespan="off",
                limit_concurrency=config.connections,
                timeout_keep_alive=math.ceil(config.timeout),
                timeout_graceful_shutdown=1,
                ws="none",
            )
        )
        serving = asyncio.create_task(server.serve([listening]))
        self.is_serving = True
        try:
            yield self
        finally:
            self.is_serving, server.should_exit, self._base = False, True, inside
            await self.aclose()
            await serving
            listening.close()

    def _endpoint(self, kind: type[protocol.ModelRequest] | None) -> Callable[[Request], Awaitable[Response]]:
        """Answer requests of this kind in an open session. Without a kind, list the models. Errors become responses."""

        async def endpoint(request: Request) -> Response:
            async def answer(session: Session) -> Response:
                if kind is None:
                    return protocol.json_response(200, _MODELS)
                return await self._answered(session, request, protocol.decoded(await self._body(request), kind))

            return await self._in_session(request, answer)

        return endpoint

    async def _feedback(self, request: Request) -> Response:
        """Keep what somebody thinks of an answer."""

        async def answer(session: Session) -> Response:
            if session.feedback is None:
                raise _Refused(404, "nobody keeps feedback here: `meshrl record` does")
            feedback = protocol.decoded(await self._body(request), Feedback)
            if feedback.reward is None and feedback.label is None:
                raise DataError("feedback has a reward, a label, or both, and this has none")
            try:
                session.feedback(feedback)
            except OSError as error:
                raise _Refused(507, f"it cannot be kept: {described(error)}") from error
            return protocol.json_response(200, {"id": feedback.id})

        return await self._in_session(request, answer)

    async def _in_session(self, request: Request, answer: Callable[[Session], Awaitable[Response]]) -> Response:
        """Return the answer to a request of an open session, or why there is none."""
        failed = partial(_failed, request.url.path)
        session = self._session_of(request)
        if session is None:
            return failed(401, "no open session of this URL has this key: use the url and the token of one")
        try:
            return await answer(session)
        except ClientDisconnect:
            return Response(status_code=_LEFT)
        except TimeoutError:
            return failed(408, "the body did not come in time (timeout)")
        except _Refused as error:
            return failed(error.status, str(error), error.code)
        except (DataError, ModelError, _SamplerFailed) as error:
            return failed(400 if isinstance(error, DataError) else 500, str(error))

    def _session_of(self, request: Request) -> Session | None:
        session = self._sessions.get(str(request.path_params.get("session")))
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        key = token if kind.lower() == "bearer" else request.headers.get("x-api-key", "")
        right = hmac.compare_digest(key.strip().encode(), (session.token if session else "").encode())
        return session if session and right else None

    async def _body(self, request: Request) -> bytes:
        most, body = self.config.body_mib << 20, bytearray()
        async with asyncio.timeout(self.config.timeout):
            async for piece in request.stream():
                body += piece
                if len(body) > most:
                    raise _Refused(413, f"the body has more than {self.config.body_mib} MiB (body_mib)")
        return bytes(body)

    async def _answered(self, session: Session, request: Request, body: protocol.ModelRequest) -> Response:
        """Draw answers, record them and send them, unless the client has gone."""
        asked, conversation = body.read(), session.conversation
        held: Sequence[object] = ()
        if asked.images:
            check_images(self._chat)
            if isinstance(self._chat, SeeingChat):
                held = await asyncio.to_thread(self._chat.see, asked.images)
        if isinstance(asked.prompt, str):
            prompt = conversation.ask_text(asked.prompt)
        else:
            prompt = conversation.ask(asked.prompt, asked.tools, asked.images, is_trial=body.is_counted)
        del held  # the prompt has the texts of its images
        if body.is_counted:
            counted = body.reply(asked, "", (), len(prompt.tokens), self._chat)
            return protocol.json_response(200, counted.whole())
        constraint = asked.constraint(self._chat, thought_end(self._chat.decode(prompt.tokens[-_TAIL:].tolist())))
        if constraint is not None:
            check_constraint(self._chat, constraint)
        answers = await self._drawn(session, request, asked, prompt, constraint)
        choices = list[protocol.Choice]()
        for each in answers:
            is_whole = each.drawn.tokens[-1] in self._chat.ends
            choices.append(protocol.Choice(asked.said(each.text, session.new_call, is_whole=is_whole), each.drawn))
        if session.id not in self._sessions or await request.is_disconnected():
            return Response(status_code=_LEFT)
        for choice in choices:
            conversation.answer(prompt, choice.drawn, choice.said)
            session.askers.append(request.headers.get("x-session-id", ""))
        last, first = len(conversation), len(conversation) - len(choices) + 1
        name = f"{session.id}-{last}" if first == last else f"{session.id}-{first}-{last}"  # of no answer alone
        reply = body.reply(asked, name, choices, len(prompt.tokens), self._chat)
        if body.stream:
            return protocol.EventStream(reply.events(), self.config.timeout)
        return protocol.json_response(200, reply.whole())

    async def _drawn(
        self, session: Session, request: Request, asked: protocol.Asked, prompt: Prompt, constraint: Constraint | None
    ) -> list[Answer]:
        """Draw the requested number of answers. Raises ClientDisconnect if the client has gone."""
        size, longest = len(prompt.tokens), self._chat.max_tokens
        if 0 < size - len(prompt.added) <= self._chat.native_tokens:  # later turns keep the positions of the first
            longest = min(longest, self._chat.native_tokens)
        if not 0 < size < longest:
            raise _no_room(
                f"the prompt has {size} tokens and the model takes 1 to {longest - 1}, and writes one at least"
            )
        text = prompt.asked if isinstance(prompt.asked, str) else ""
        held, images = constraint.text if constraint else None, session.conversation.images_of(prompt)
        draw = partial(
            self._batcher.draw,
            prompt.tokens,
            text,
            session.sampling,
            asked.limit,
            asked.stops,
            constraint=held,
            images=images,
        )
        draws = asyncio.gather(*(draw() for _ in range(asked.count)))
        left = asyncio.create_task(_left(request))
        left.add_done_callback(lambda _: draws.cancel())
        session.draws[draws] = prompt
        try:
            answers = await draws
        except (Exception, asyncio.CancelledError) as error:
            unless_cancelled(error)
            if left.done() or session.id not in self._sessions:
                raise ClientDisconnect from error
            failed = _SamplerFailed(f"the sampler failed: {described(error)}")
            session.failure = error if isinstance(error, Exception) else failed
            raise failed from error
        finally:
            del session.draws[draws]
            left.cancel()
        session.failure = None
        if not all(len(answer.drawn.tokens) for answer in answers):
            raise _no_room(f"the prompt has {size} tokens, and the model has no room for another")
        return answers


async def _left(request: Request) -> None:
    """Wait until the client disconnects. Its request has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _Refused(Exception):
    """A request that cannot be answered."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status: Final = status
        self.code: Final = code


def _no_room(message: str) -> _Refused:
    return _Refused(400, message, "context_length_exceeded")


class _SamplerFailed(MeshrlError):
    """The sampler failed. Its exception is the cause."""


def _protocol(seconds: float) -> type[H11Protocol]:
    """HTTP/1.1 that closes a connection on which no first or further request begins within `seconds`."""

    class Protocol(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._limit = self.loop.call_later(seconds, self._leave, None)

        def connection_lost(self, exc: Exception | None) -> None:
            self._limit.cancel()
            super().connection_lost(exc)

        def on_response_complete(self) -> None:
            ended = self.cycle  # the next request may have come with it
            self._limit.cancel()
            self._limit = self.loop.call_later(seconds, self._leave, ended)
            super().on_response_complete()

        def _leave(self, ended: object) -> None:
            if cast("object", self.cycle) is ended:  # there is none before the first request
                self.transport.close()

    return Protocol


async def _unknown(request: Request, _: Exception) -> Response:
    served = ", ".join(f"/s/ID/v1/{path}" for path in _KINDS)
    told = f"{request.method} {request.url.path} is not served: POST {served}, and GET /s/ID/v1/models are"
    return _failed(request.url.path, 404, told)


def _failed(path: str, status: int, message: str, code: str | None = None) -> Response:
    """An error response in the form of the path's protocol."""
    form = messages.error_response if "/v1/messages" in path else protocol.error_response
    return form(status, message, code)
