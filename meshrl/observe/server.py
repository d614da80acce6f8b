"""The server of the live page on 127.0.0.1, which sends updates to browsers by server-sent events."""

import asyncio
import hmac
import secrets
import socket
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
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
from meshrl.http_server import HttpServer, listen
from meshrl.observe.live import LiveRun
from meshrl.observe.page import SCRIPTS, STYLES, html_page, joined
from meshrl.observe.run_files import Command, ask

_HOST: Final = "127.0.0.1"
_PORT: Final = 6007
_LOOKS: Final = 0.1
"""Shortest time between two looks at the run's files, in seconds, while the page is open."""
_IDLE: Final = 3
"""The pause after a look is this many times as long as the look."""
_BROWSERS: Final = 32
"""Browsers at most."""
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
Patch: TypeAlias = Mapping[str, object] | Sequence[object]
"""The difference of two plain values, which a browser applies (`applied` in live.js).

A patch of a table is a table with the patches of its keys. A patch of a list of tables whose length stays the same is a
table with the patches of its places. All other patches are lists: [value] replaces the value. [drop, keep, more]
removes the first `drop` elements of a list, keeps the `keep` that follow, and adds `more`.
"""
SAME: Final = None
"""No patch: nothing changed."""


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
        self._live = LiveRun(folder)
        self._shown: _Shown = {}
        """The newest content."""
        self._versions: dict[str, int] = {}
        """By key of the content, the version in which its value changed."""
        self._version = 0
        self._patch = b""
        """The message that turns the previous version into this one."""
        self._new_version = asyncio.Event()
        self._browsers = 0
        self._is_closing = False
        self._following: asyncio.Task[None] | None = None
        """The only task that reads files, while there is a browser. So every browser sees every change."""

    @property
    def address(self) -> str:
        """URL of the page. It has the token if commands are accepted, after a #, so that browsers do not send it."""
        return f"http://{_HOST}:{self.port}/{f'#{self.token}' if self.token else ''}"

    @asynccontextmanager
    async def serving(self, port: int | None = None) -> AsyncGenerator[Self]:
        """Listen during the block on this port, 0 for any. By default on 6007, or on any port if that is taken.

        Raises ConfigError if the requested port is taken.
        """
        listening, self._is_closing = _listening(port), False
        self.port = listening.getsockname()[1]
        config = uvicorn.Config(
            self.app, log_level="error", lifespan="off", timeout_graceful_shutdown=1, ws="none", server_header=False
        )
        server = HttpServer(config)
        task = asyncio.create_task(server.serve([listening]))
        try:
            yield self
        finally:
            self._is_closing = True
            self._new_version.set()
            server.should_exit = True
            await task
            listening.close()

    async def events(self) -> AsyncGenerator[bytes]:
        """Yield the messages for one browser as server-sent events: patches. The first has the whole content.

        A slow browser gets the whole values of all keys whose changes it has missed, in one message.
        """
        self._browsers += 1
        if self._following is None or self._following.done():
            self._shown = {}
            self._following = asyncio.create_task(self._follow())
        sent = 0
        try:
            while not self._is_closing:
                # Nothing else runs before the message is made, so no change is missed or sent twice.
                new_version = self._new_version
                missed = [key for key in self._shown if self._versions[key] > sent]
                follows, sent = sent == self._version - 1, self._version
                if missed:
                    yield self._patch if follows else _message({key: [self._shown[key]] for key in missed})
                    continue
                try:
                    async with asyncio.timeout(_ALIVE):
                        await new_version.wait()
                except TimeoutError:
                    yield b": it lives\n\n"
        finally:
            self._browsers -= 1

    @property
    def is_full(self) -> bool:
        """True if the limit of browsers is reached."""
        return self._browsers >= _BROWSERS

    def tokens(self, at: int) -> bytes | None:
        """Read the tokens of a row by its number, as `LiveRun.tokens`."""
        return self._live.tokens(at)

    def ask(self, command: Command) -> None:
        """Send a request to the run. Raises ConfigError if no run is active."""
        if not self._live.is_under_way():
            raise ConfigError(f"no run is active in {self._live.folder}: it has ended, was killed, or did not start")
        ask(self._live.folder, command)

    async def _follow(self) -> None:
        """Send changes while there are browsers. A failed look is reported, and the next one follows."""
        loop, failed = asyncio.get_running_loop(), False
        while self._browsers:
            began, before = loop.time(), self._shown
            try:
                look = asyncio.to_thread(_look, self._live, before, anyway=failed or not before)
                changed, patch = await look
                failed = False
            except Exception as error:  # noqa: BLE001 -- the page must show any failure
                changed, patch = ({}, b"") if failed else _failed(self._live.folder, before, error)
                failed = True
            if changed:
                self._version, self._patch = self._version + 1, patch
                self._shown = {**before, **changed}
                self._versions |= dict.fromkeys(changed, self._version)
                self._new_version.set()
                self._new_version = asyncio.Event()
            await asyncio.sleep(max(_LOOKS, _IDLE * (loop.time() - began)))


def _look(live: LiveRun, before: _Shown, *, anyway: bool) -> tuple[_Shown, bytes]:
    """Read all new content. Returns the keys of the page's content that changed with their values, and the patch."""
    changed, more = live.look()
    while more:
        _, more = live.look()
    return _changes(before, live.content()) if changed or anyway else ({}, b"")


def _changes(before: _Shown, after: _Shown) -> tuple[_Shown, bytes]:
    patches = {key: difference(before[key], value) if key in before else [value] for key, value in after.items()}
    patches = {key: patch for key, patch in patches.items() if patch is not SAME}
    return {key: after[key] for key in patches}, _message(patches)


def difference(old: object, new: object) -> Patch | None:
    """Return the patch that turns `old` into `new`. SAME if they are equal."""
    return _difference(old, new, 0)[0]


def _difference(old: object, new: object, shifted: int) -> tuple[Patch | None, int]:
    """Return the patch, and the shift of a list in elements. `shifted`: that of the previous list, tried first."""
    if isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
        return _of_tables(cast("_Shown", old), cast("_Shown", new)), shifted
    if isinstance(old, list) and isinstance(new, list):
        return _of_lists(cast("list[object]", old), cast("list[object]", new), shifted)
    return (SAME if old == new else [new]), shifted


def _of_tables(old: _Shown, new: _Shown) -> Patch | None:
    patches: dict[str, object] = {}
    shifted = 0
    for key, value in new.items():
        patch, shifted = _difference(old[key], value, shifted)
        if patch is not SAME:
            patches[key] = patch
    return patches or SAME


def _of_lists(old: list[object], new: list[object], shifted: int) -> tuple[Patch | None, int]:
    if old == new:
        return SAME, 0
    if not old or not new:
        return [new], 0
    drop, keep = _best_overlap(old, new, shifted)
    if not drop and len(old) == len(new) and all(isinstance(each, dict) for each in (*old, *new)):
        places = {str(at): _difference(*pair, 0)[0] for at, pair in enumerate(zip(old, new, strict=True))}
        return {at: patch for at, patch in places.items() if patch is not SAME}, 0
    return ([drop, keep, new[keep:]] if keep else [new]), drop


def _best_overlap(old: list[object], new: list[object], shifted: int) -> tuple[int, int]:
    """Return how many elements to drop and how many to keep, such that most are kept."""
    drops = {0, min(shifted, len(old)), old.index(new[0]) if new[0] in old else 0}
    return max(((drop, _equal_elements(old, new, drop)) for drop in drops), key=lambda pair: pair[1])


def _equal_elements(old: list[object], new: list[object], drop: int) -> int:
    """Count the equal elements from there on."""
    most = min(len(old) - drop, len(new))
    if old[drop : drop + most] == new[:most]:
        return most
    return next(at for at in range(most) if old[drop + at] != new[at])


def _message(patches: Mapping[str, object]) -> bytes:
    return b"data: %b\n\n" % msgspec.json.encode(patches)


def _failed(folder: Path, before: _Shown, error: Exception) -> tuple[_Shown, bytes]:
    """A note about the failure. The other content stays."""
    message = f"the files in {folder} cannot be shown: {type(error).__name__}: {error}"
    log.warning(f"{message}; looking again")
    first = {} if before else LiveRun(folder).content()
    notes = cast("list[str]", (before or first)["notes"])
    return _changes(before, {**first, "notes": [*notes, f"The page stands still, as {message}"]})


def _listening(port: int | None) -> socket.socket:
    try:
        return listen(_HOST, _PORT if port is None else port, "choose another one with --port")
    except ConfigError:
        if port is None:
            return listen(_HOST, 0)
        raise


def _app(watcher: Watcher) -> Starlette:
    style = '<link rel="icon" href="data:,">\n<link rel="stylesheet" href="/style.css">'
    files = {
        "/": ("text/html", html_page("meshrl watch", style, "{}", '<script src="/script.js"></script>')),
        "/style.css": ("text/css", joined((*STYLES, "live.css"))),
        "/script.js": ("text/javascript", joined((*SCRIPTS, "live.js"))),
    }

    async def file(request: Request) -> Response:
        kind, text = files[request.url.path]
        return Response(text, media_type=kind)

    async def tokens(request: Request) -> Response:
        found = await asyncio.to_thread(watcher.tokens, request.path_params["at"])
        return (
            PlainTextResponse("no such row\n", 404) if found is None else Response(found, media_type="application/json")
        )

    async def events(request: Request) -> Response:
        if request.headers.get("sec-fetch-site") in {"cross-site", "same-site"}:  # it would only take a place
            return PlainTextResponse("only the page of this server may follow the run\n", 403)
        if watcher.is_full:
            return PlainTextResponse(f"{_BROWSERS} pages look at this run: close one\n", 503)
        return StreamingResponse(watcher.events(), media_type="text/event-stream")

    return Starlette(
        routes=[
            *(Route(path, file) for path in files),
            Route("/events", events),
            Route("/tokens/{at:int}", tokens),
            Route("/control", partial(_control, watcher), methods=["POST"]),
        ]
    )


async def _control(watcher: Watcher, request: Request) -> Response:
    if watcher.token is None:
        return PlainTextResponse("this page is read-only: start `meshrl watch` with --control\n", 403)
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    right = hmac.compare_digest(token.strip().encode(), watcher.token.encode())
    if kind.lower() != "bearer" or not right:
        return PlainTextResponse("a command needs the token that `meshrl watch --control` printed\n", 401)
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


def _guarded(watcher: Watcher, app: ASGIApp) -> ASGIApp:
    """Accept only requests that name this server. A page of another site whose name resolves here does not."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if hosts not in ([f"{name}:{watcher.port}".encode()] for name in (_HOST, "localhost")):
            await PlainTextResponse("this server answers to its own address alone\n", 421)(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        await app(scope, receive, with_headers)

    return guarded
