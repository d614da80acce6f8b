"""What keeps those who reach a server from its endpoints for new weights: they ask for a key."""

import secrets
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Final, TypeAlias, cast

HEADER: Final = "x-meshrl-key"
"""The header of a request that has the key."""
OPEN: Final = ("/health", "/ping", "/version", "/metrics", "/load", "/tokenize", "/detokenize")
"""What anybody may ask for besides `/v1/`."""

Message: TypeAlias = MutableMapping[str, object]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Message, Receive, Send], Awaitable[None]]

keys: Final[list[str]] = []
"""That of this process, which `launch` reads from its standard input; without one nobody has it."""


class Guard:
    """ASGI middleware: what is not open is refused to a request without the key."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Hand the request on, or answer 401."""
        if scope["type"] not in {"http", "websocket"} or _is_open(str(scope["path"])) or _has_key(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error": "this takes the key of the server"}'})


def _is_open(path: str) -> bool:
    return path.startswith("/v1/") or path in OPEN


def _has_key(scope: Message) -> bool:
    headers = cast("Iterable[tuple[bytes, bytes]]", scope["headers"])
    given = [value for name, value in headers if name == HEADER.encode()]
    return any(secrets.compare_digest(value, key.encode()) for value in given for key in keys)
