"""The server of the live page on 127.0.0.1, which sends updates to browsers by server-sent events."""

import asyncio
import hmac
import secrets
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final, Self, TypeAlias, cast, get_args

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from meshrl import log
from meshrl.errors import ConfigError
from meshrl.observe.live import Live
from meshrl.observe.page import SCRIPTS, STYLES, joined
from meshrl.observe.patches import SAME, difference
from meshrl.observe.signals import Command, ask

HOST: Final = "127.0.0.1"
PORT: Final = 6007
LOOKS: Final = 0.1
"""Shortest time between two looks at the run's files, in seconds, while the page is open."""
_IDLE: Final = 3
"""The pause after a look is this many times as long as the look."""
_BROWSERS: Final = 32
"""Browsers at most."""
_BEHIND: Final = 16
"""A browser with this many unsent patches gets the whole content instead."""
_ALIVE: Final = 15.0
"""Seconds between two messages that keep the connection alive."""
_BODY: Final = 256
"""Bytes of a command at most."""
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

_Shown: TypeAlias = dict[str, object]
"""Content of the page."""


class Watcher:
    """Serves the page of one run, whose folder need not exist yet."""

    def __init__(self, folder: Path, *, control: bool = False) -> None:
        """`control`: clients with the token may pause, checkpoint and stop the run."""
        self.token: str | None = secrets.token_urlsafe(24) if control else None
        """Token that commands need. None if commands are refused."""
        self.app: ASGIApp = _guarded(self, _app(self))
        """The ASGI application."""
        self.port: int = 0
        """The port, while `serving`."""
        self._live = Live(folder)
        self._shown: _Shown = {}
        """The content that browsers have."""
        self._browsers: set[_Browser] = set()
        self._following: asyncio.Task[None] | None = None
        """The only task that reads files, while there is a browser. So every browser sees every change."""

    @property
    def address(self) -> str:
        """URL of the page. It has the token if commands are accepted, after a #, so that browsers do not send it."""
        return f"http://{HOST}:{self.port}/{f'#{self.token}' if self.token else ''}"

    @asynccontextmanager
    async def serving(self, port: int | None = None) -> AsyncGenerator[Self]:
        """Listen during the block on this port, 0 for any. By default on PORT, or on any port if that is taken.

        Raises ConfigError if the requested port is taken.
        """
        listening = _listening(port)
        self.port = listening.getsockname()[1]
        config = uvicorn.Config(
            self.app, log_level="error", lifespan="off", timeout_graceful_shutdown=1, ws="none", server_header=False
        )
        server = _Server(config)
        task = asyncio.create_task(server.serve([listening]))
        try:
            yield self
        finally:
            for browser in self._browsers:
                browser.leave()
            server.should_exit = True
            await task
            listening.close()

    async def events(self) -> AsyncGenerator[bytes]:
        """Yield the messages for one browser as server-sent events: the whole content, then patches."""
        browser = _Browser()
        self._browsers.add(browser)
        if self._following is None or self._following.done():
            self._following = asyncio.create_task(self._follow())
        elif self._shown:
            browser.send(b"")
        try:
            async for patches in browser.messages():
                # Nothing else runs between taking the patches and this line, so none is missed or sent twice.
                yield _event("whole", self._shown) if patches is None else patches
        finally:
            self._browsers.discard(browser)

    @property
    def is_full(self) -> bool:
        """True if the limit of browsers is reached."""
        return len(self._browsers) >= _BROWSERS

    def ask(self, command: Command) -> None:
        """Send a request to the run. Raises ConfigError if no run is active."""
        if not self._live.is_under_way():
            raise ConfigError(f"no run is active in {self._live.folder}: it has ended, was killed, or did not start")
        ask(self._live.folder, command)

    async def _follow(self) -> None:
        """Send changes while there are browsers. A failed look is reported, and the next one follows."""
        loop, failed = asyncio.get_running_loop(), False
        while self._browsers:
            began, message = loop.time(), b""
            try:
                look = asyncio.to_thread(_look, self._live, self._shown, anyway=failed or not self._shown)
                self._shown, message = await look
                failed = False
            except Exception as error:  # noqa: BLE001 -- the page must show any failure
                if not failed:
                    self._shown, message = _failed(self._live.folder, self._shown, error)
                failed = True
            for browser in self._browsers:
                browser.send(message)
            await asyncio.sleep(max(LOOKS, _IDLE * (loop.time() - began)))


def _look(live: Live, before: _Shown, *, anyway: bool) -> tuple[_Shown, bytes]:
    """Read all new content. Returns the page's content, and the message with the changes, empty without any."""
    changed, more = live.look()
    while more:
        _, more = live.look()
    return _changed(before, live.content()) if changed or anyway else (before, b"")


def _failed(folder: Path, before: _Shown, error: Exception) -> tuple[_Shown, bytes]:
    """The previous page with a note about the failure."""
    told = f"the files in {folder} cannot be shown: {type(error).__name__}: {error}"
    log.warning(f"{told}; looking again")
    before = before or Live(folder).content()
    notes = cast("list[str]", before["notes"])
    return _changed(before, {**before, "notes": [*notes, f"The page stands still, as {told}"]})


def _changed(before: _Shown, after: _Shown) -> tuple[_Shown, bytes]:
    patch = difference(before, after)
    return after, b"" if patch is SAME else _event("patch", patch)


class _Browser:
    """A connected browser and its unsent messages, at first the whole content."""

    def __init__(self) -> None:
        self._patches: list[bytes] = []
        self._is_lost, self._is_gone = True, False
        self._woken = asyncio.Event()

    def send(self, patch: bytes) -> None:
        """Queue a patch, unless it is empty. Beyond the limit, the whole content replaces all patches."""
        if len(self._patches) == _BEHIND:
            self._patches, self._is_lost = [], True
        if patch and not self._is_lost:
            self._patches.append(patch)
        if self._patches or self._is_lost:
            self._woken.set()

    def leave(self) -> None:
        """End the messages."""
        self._is_gone = True
        self._woken.set()

    async def messages(self) -> AsyncIterator[bytes | None]:
        """Yield patches as they come, or None if the whole content must be sent."""
        while True:
            try:
                async with asyncio.timeout(_ALIVE):
                    await self._woken.wait()
            except TimeoutError:
                yield b": it lives\n\n"
                continue
            if self._is_gone:
                return
            self._woken.clear()
            patches, lost = b"".join(self._patches), self._is_lost
            self._patches, self._is_lost = [], False
            yield None if lost else patches


class _Server(uvicorn.Server):
    """A server that leaves signals to the command."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Capture no signals."""
        yield


def _event(name: str, data: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(data))


def _listening(port: int | None) -> socket.socket:
    try:
        return socket.create_server((HOST, PORT if port is None else port), backlog=64)
    except OSError as error:
        if port is None:
            return socket.create_server((HOST, 0), backlog=64)
        raise ConfigError(f"port {port} of {HOST}: {error.strerror}: choose another one with --port") from error


def _app(watcher: Watcher) -> Starlette:
    """The application with its routes."""
    own = Path(__file__).parent
    files = {
        "/": ("text/html", (own / "live.html").read_text("utf-8")),
        "/style.css": ("text/css", joined(STYLES) + (own / "live.css").read_text("utf-8")),
        "/script.js": ("text/javascript", joined(SCRIPTS) + (own / "live.js").read_text("utf-8")),
    }

    async def file(request: Request) -> Response:
        kind, text = files[request.url.path]
        return Response(text, media_type=kind)

    async def events(request: Request) -> Response:
        if refused := _not_followed(watcher, request):
            return refused
        return StreamingResponse(watcher.events(), media_type="text/event-stream")

    async def control(request: Request) -> Response:
        if refused := _refused(watcher, request):
            return refused
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > _BODY:
                return PlainTextResponse(f"a command has at most {_BODY} bytes\n", 413)
        if (command := body.decode("utf-8", "replace")) not in get_args(Command):
            return PlainTextResponse(f"no command: write one of {', '.join(get_args(Command))}\n", 400)
        try:
            watcher.ask(cast("Command", command))
        except (ConfigError, OSError) as error:
            return PlainTextResponse(f"{error}\n", 409)
        return PlainTextResponse("asked: it is done before the next step\n")

    return Starlette(
        routes=[
            *(Route(path, file) for path in files),
            Route("/events", events),
            Route("/control", control, methods=["POST"]),
        ]
    )


def _not_followed(watcher: Watcher, request: Request) -> Response | None:
    """A refusal to follow the run. None if the request is accepted."""
    if request.headers.get("sec-fetch-site") in {"cross-site", "same-site"}:  # cannot read it, but would take a place
        return PlainTextResponse("only the page of this server may follow the run\n", 403)
    if watcher.is_full:
        return PlainTextResponse(f"{_BROWSERS} pages look at this run: close one\n", 503)
    return None


def _refused(watcher: Watcher, request: Request) -> Response | None:
    """A refusal of a command. None if it is accepted."""
    if watcher.token is None:
        return PlainTextResponse("this page is read-only: start `meshrl watch` with --control\n", 403)
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    right = hmac.compare_digest(token.strip().encode(), watcher.token.encode())
    if kind.lower() != "bearer" or not right:
        return PlainTextResponse("a command needs the token that `meshrl watch --control` printed\n", 401)
    return None


def _guarded(watcher: Watcher, app: ASGIApp) -> ASGIApp:
    """Accept only requests that name this server. A page of another site whose name resolves here does not."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if hosts not in ([f"{name}:{watcher.port}".encode()] for name in (HOST, "localhost")):
            await PlainTextResponse("this server answers to its own address alone\n", 421)(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        await app(scope, receive, with_headers)

    return guarded
