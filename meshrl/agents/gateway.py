"""The gateway: an OpenAI-compatible server in front of a sampler, which records what each session samples.

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
import secrets
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Self, TypeAlias, cast

import uvicorn
from pydantic import Field
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from meshrl.agents.answers import MODEL, Choice, Completion, ResponseObject, error_response, json_response
from meshrl.agents.batcher import Answer, RequestBatcher
from meshrl.agents.chat import Chat, Message, message_of
from meshrl.agents.conversation import Conversation, Prompt
from meshrl.agents.requests import ChatRequest, CompletionRequest, ResponsesRequest, decoded
from meshrl.config import Config
from meshrl.data import Batch
from meshrl.errors import ConfigError, DataError, MeshrlError, described
from meshrl.roles import Sampler, Sampling
from meshrl.user_code import unless_cancelled

_LEFT: Final = 499
"""Status of an answer whose client has disconnected."""
_Body: TypeAlias = ChatRequest | CompletionRequest | ResponsesRequest


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
    """The base URL, ending with /v1."""
    sampling: Sampling
    conversation: Conversation = field(repr=False)
    failure: Exception | None = None
    """What the sampler raised, which is not the program's fault. Reset to None by the next answer."""
    draws: dict["asyncio.Future[list[Answer]]", Prompt] = field(default_factory=dict, repr=False)
    """The answers that its requests wait for, each with its prompt."""
    _calls: "itertools.count[int]" = field(default_factory=itertools.count, repr=False)

    def new_call(self) -> str:
        """A new id for a tool call."""
        return f"call_{next(self._calls)}"


class Gateway:
    """The server and its sessions."""

    def __init__(self, sampler: Sampler, chat: Chat, config: GatewayConfig | None = None) -> None:
        self.config: GatewayConfig = config or GatewayConfig()
        self._chat = chat
        self._batcher = RequestBatcher(sampler)
        self._sessions: dict[str, Session] = {}
        self._in_flight = 0
        self._base = "http://meshrl"
        self.is_serving: bool = False
        """True while it listens, so that other processes can reach it."""
        self.app: ASGIApp = _app(self)

    def open(self, sampling: Sampling) -> Session:
        """Open a session.

        `sampling` says how answers are drawn. A request may set `n`, lower `max_tokens` and add to `stop`.
        """
        name = secrets.token_hex(8)
        url, token = f"{self._base}/s/{name}/v1", secrets.token_urlsafe(24)
        session = Session(name, token, url, sampling, Conversation(self._chat))
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
        family, host = (socket.AF_INET6, f"[{config.host}]") if ":" in config.host else (socket.AF_INET, config.host)
        try:
            listening = socket.create_server((config.host, config.port), family=family, backlog=2048)
        except OSError as error:
            raise ConfigError(f"{config.host}, port {config.port}: {error.strerror}: take another port") from error
        self._base = f"http://{host}:{listening.getsockname()[1]}"
        server = _Server(
            uvicorn.Config(
                self.app,
                http=_protocol(config.timeout),
                log_level="error",
                lifespan="off",
                limit_concurrency=config.connections,
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

    @contextmanager
    def one_more(self) -> Generator[bool]:
        """Count a request during the block. Yields False if there is no room for it."""
        self._in_flight += 1
        try:
            yield self._in_flight <= self.config.requests
        finally:
            self._in_flight -= 1

    def session_of(self, request: Request) -> Session | None:
        """The session whose token the request has. None without one."""
        session = self._sessions.get(str(request.path_params.get("session")))
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        right = hmac.compare_digest(token.strip().encode(), (session.token if session else "").encode())
        return session if session and right and kind.lower() == "bearer" else None

    async def chat(self, session: Session, request: Request) -> Response:
        """`/v1/chat/completions`."""
        return await self._converse(session, request, decoded(await self._body(request), ChatRequest))

    async def respond(self, session: Session, request: Request) -> Response:
        """`/v1/responses`."""
        return await self._converse(session, request, decoded(await self._body(request), ResponsesRequest))

    async def complete(self, session: Session, request: Request) -> Response:
        """`/v1/completions`."""
        asked = decoded(await self._body(request), CompletionRequest)
        prompt = session.conversation.ask_text(asked.read())
        return await self._answered(session, request, asked, prompt, lambda text: text)

    async def models(self, session: Session, request: Request) -> Response:
        """`/v1/models`."""
        one = {"id": MODEL, "object": "model", "created": 0, "owned_by": "meshrl"}
        return json_response(200, {"object": "list", "data": [one]})

    async def _body(self, request: Request) -> bytes:
        most, body = self.config.body_mib << 20, bytearray()
        async with asyncio.timeout(self.config.timeout):
            async for piece in request.stream():
                body += piece
                if len(body) > most:
                    raise _Refused(413, f"the body has more than {self.config.body_mib} MiB (body_mib)")
        return bytes(body)

    async def _converse(self, session: Session, request: Request, asked: ChatRequest | ResponsesRequest) -> Response:
        messages, tools = asked.read()
        prompt = session.conversation.ask(messages, tools)
        return await self._answered(
            session, request, asked, prompt, lambda text: message_of(text, tools, session.new_call)
        )

    async def _answered(
        self,
        session: Session,
        request: Request,
        asked: _Body,
        prompt: Prompt,
        read: Callable[[str], Message | str],
    ) -> Response:
        """Draw answers, record them and send them, unless the client has gone. `read`: makes what it gets of a text."""
        answers = await self._drawn(session, request, asked, prompt)
        choices = [Choice(read(answer.text), answer) for answer in answers]
        if session.id not in self._sessions or await request.is_disconnected():
            return Response(status_code=_LEFT)
        for choice in choices:
            session.conversation.answer(prompt, choice.answer.drawn, choice.said)
        name, size, seconds = f"{session.id}-{len(session.conversation)}", len(prompt.tokens), self.config.timeout
        if isinstance(asked, ResponsesRequest):
            response = ResponseObject(name, choices[0], size)
            return response.stream(seconds) if asked.stream else response.whole()
        logprobs = self._chat if asked.wants_logprobs else None
        completion = Completion(isinstance(asked, ChatRequest), name, choices, size, logprobs)
        return completion.stream(asked.wants_usage, seconds) if asked.stream else completion.whole()

    async def _drawn(self, session: Session, request: Request, asked: _Body, prompt: Prompt) -> list[Answer]:
        """Draw the requested number of answers. Raises ClientDisconnect if the client has gone."""
        size, longest = len(prompt.tokens), self._chat.max_tokens
        if not 0 < size < longest:
            raise _no_room(
                f"the prompt has {size} tokens and the model takes 1 to {longest - 1}, and writes one at least"
            )
        draw = partial(self._batcher.draw, prompt.tokens, session.sampling, asked.limit, asked.stops)
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
        self.response: Final = error_response(status, message, code)


def _no_room(message: str) -> _Refused:
    return _Refused(400, message, "context_length_exceeded")


class _SamplerFailed(MeshrlError):
    """The sampler failed. Its exception is the cause."""


class _Server(uvicorn.Server):
    """A server that leaves signals to the script."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Capture no signals."""
        yield


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


def _endpoint(
    gateway: Gateway, call: Callable[[Session, Request], Awaitable[Response]]
) -> Callable[[Request], Awaitable[Response]]:
    """Answer a request of an open session by a call. What it raises becomes an error response."""

    async def endpoint(request: Request) -> Response:
        session = gateway.session_of(request)
        if session is None:
            return error_response(401, "no open session of this URL has this key: use the url and the token of one")
        try:
            return await call(session, request)
        except ClientDisconnect:
            return Response(status_code=_LEFT)
        except TimeoutError:
            return error_response(408, "the body did not come in time (timeout)")
        except _Refused as error:
            return error.response
        except (DataError, _SamplerFailed) as error:
            return error_response(400 if isinstance(error, DataError) else 500, str(error))

    return endpoint


def _app(gateway: Gateway) -> ASGIApp:
    """The application: its routes, and the limit of concurrent requests."""

    async def unknown(request: Request, _: Exception) -> Response:
        return error_response(
            404,
            f"{request.method} {request.url.path} is not served: POST /s/ID/v1/chat/completions, /s/ID/v1/responses "
            "and /s/ID/v1/completions, and GET /s/ID/v1/models are",
        )

    routes = [
        Route("/s/{session}/v1/chat/completions", _endpoint(gateway, gateway.chat), methods=["POST"]),
        Route("/s/{session}/v1/responses", _endpoint(gateway, gateway.respond), methods=["POST"]),
        Route("/s/{session}/v1/completions", _endpoint(gateway, gateway.complete), methods=["POST"]),
        Route("/s/{session}/v1/models", _endpoint(gateway, gateway.models), methods=["GET"]),
    ]
    served = Starlette(routes=routes, exception_handlers={404: unknown, 405: unknown})

    async def bounded(scope: Scope, receive: Receive, send: Send) -> None:
        with gateway.one_more() as has_room:
            most = gateway.config.requests
            full = error_response(429, f"{most} requests are in flight, which is the most: try again (requests)")
            await (served if has_room else full)(scope, receive, send)

    return bounded
