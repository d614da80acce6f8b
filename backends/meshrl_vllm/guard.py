"""Protects a server's endpoints for new weights from its users, by a key."""

import secrets
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Final, TypeAlias, cast

HEADER: Final = "x-meshrl-key"
"""The request header with the key."""
OPEN: Final = ("/health", "/ping", "/version", "/metrics", "/load", "/tokenize", "/detokenize")
"""Open endpoints, besides `/v1/`."""

Message: TypeAlias = MutableMapping[str, object]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Message, Receive, Send], Awaitable[None]]

keys: Final[list[str]] = []
"""The key of this process, which `launch` reads from its standard input. Empty: nobody has a key."""


class Guard:
    """ASGI middleware: refuses requests without the key, except to open endpoints."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401."""
        path = str(scope.get("path"))
        if scope["type"] not in {"http", "websocket"} or path.startswith("/v1/") or path in OPEN or _has_key(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error": "this takes the key of the server"}'})


def _has_key(scope: Message) -> bool:
    headers = cast("Iterable[tuple[bytes, bytes]]", scope["headers"])
    given = [value for name, value in headers if name == HEADER.encode()]
    return any(secrets.compare_digest(value, key.encode()) for value in given for key in keys)
