"""Requests to one server: one attempt of each, and the meaning of its failures."""

import asyncio
import socket
from collections.abc import Coroutine, Mapping
from typing import Any, Final

import httpx
import msgspec

from meshrl.errors import ModelError

_TRANSIENT: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses of a server, or a proxy before it, that may differ at the next attempt."""
_CONNECT: Final = 10.0
"""Most seconds to make a connection."""
SHORT: Final = 60.0
"""Seconds for the answer to a quick request."""
_KEEP_ALIVE: Final = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, int(getattr(socket, name)), value)
        for name, value in {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}.items()
        if hasattr(socket, name)
    ),
]
"""Detects a dead machine. A row may take long, so only the silence of the machine's system is a sign."""
_TOLD: Final = 300
"""Characters of a server's answer in an error."""


class NoAnswerError(Exception):
    """A server gave no answer, or an answer that may differ next time."""

    def __init__(self, why: str, after: float = 0.0, status: int = 0) -> None:
        super().__init__(why)
        self.status = status
        """Status of the answer. 0 if there was none."""
        self.after = after
        """Seconds that the server asks to wait."""


class RefusedError(ModelError):
    """A server has understood and refused the request, and would again."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


class Client:
    """The client of one server, for use in one event loop."""

    def __init__(
        self, url: str, key: str | None, connections: int, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self.url: Final = url
        self._looking: asyncio.Future[Any] | None = None
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(None, connect=_CONNECT),
            transport=transport or httpx.AsyncHTTPTransport(limits=limits, socket_options=_KEEP_ALIVE, trust_env=False),
        )

    async def aclose(self) -> None:
        """Close all connections."""
        if self._looking is not None:
            self._looking.cancel()
        await self._http.aclose()

    async def get(self, path: str) -> Any:
        """Send a GET request."""
        return await self._ask("GET", path, None, SHORT)

    async def post(self, path: str, body: Mapping[str, object], seconds: float | None = None) -> Any:
        """Send a POST request, and return the answer. None if it is empty.

        Without `seconds` there is no time limit, as long as the server answers quick requests in between. NoAnswerError
        if the next attempt may succeed, RefusedError if it will not.
        """
        request = self._ask("POST", path, msgspec.json.encode(body), seconds)
        return await (request if seconds else self._watched(request))

    async def _watched(self, request: Coroutine[Any, Any, Any]) -> Any:
        task = asyncio.ensure_future(request)
        try:
            while not (await asyncio.wait({task}, timeout=SHORT))[0]:
                await self._look()
            return task.result()
        finally:
            task.cancel()

    async def _look(self) -> None:
        """Send a quick request, one for all waiting tasks. NoAnswerError if the server does not answer."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.ensure_future(self.get("/v1/models"))
            self._looking.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._looking)

    async def _ask(self, method: str, path: str, body: bytes | None, seconds: float | None) -> Any:
        headers = {} if body is None else {"Content-Type": "application/json"}
        limit = httpx.Timeout(seconds, connect=_CONNECT)
        try:
            answer = await self._http.request(method, path, content=body, headers=headers, timeout=limit)
        except httpx.HTTPError as error:
            raise NoAnswerError(f"{type(error).__name__}: {error}".removesuffix(": ")) from None
        except httpx.InvalidURL as error:
            raise ModelError(f"{self.url} is not a valid address: {error}") from None
        status, text = answer.status_code, answer.text[:_TOLD].strip()
        if status in _TRANSIENT:
            raise NoAnswerError(f"status {status}: {text}".removesuffix(": "), _seconds(answer), status)
        if not answer.is_success:
            hint = ""
            if status in (401, 403):
                hint = ". Name the variable that has the server's API key: sampler.http.key_env"
            raise RefusedError(f"{self.url} refuses {path} with status {status}: {text}{hint}", status)
        if not answer.content:
            return None
        try:
            return msgspec.json.decode(answer.content)
        except msgspec.DecodeError:  # a proxy's page, or a partial answer
            raise NoAnswerError(f"the answer is not JSON: {text}") from None


def _seconds(answer: httpx.Response) -> float:
    """Return the seconds that a server asks to wait. 0 if it does not say."""
    header = answer.headers.get("Retry-After", "")
    return min(float(header), 30.0) if header.isdigit() else 0.0
