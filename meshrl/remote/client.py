"""Requests to a server, again and again until they are answered."""

import asyncio
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from http import HTTPStatus
from threading import Thread
from typing import Final, TypeVar

import msgspec

from meshrl import log
from meshrl.errors import ConfigError, DataError, ModelError
from meshrl.remote.messages import MSGPACK, Made

T = TypeVar("T")

_JSON: Final = "application/json"
_SOON: Final = 0.1
_LATE: Final = 5.0
"""Seconds between two attempts at first, and at most."""
_SECONDS: Final = 120.0
"""Seconds without a byte after which an attempt is given up."""
_FEW: Final = 10.0
"""The same for what need not succeed."""


class RequestExpired(DataError):
    """The server has the request or its result no more."""


class Client:
    """The HTTP of one server. A request comes again after a lost connection: the server knows it by its number."""

    def __init__(self, url: str, key: str, patience: float, seconds: float = _SECONDS) -> None:
        """`patience`: seconds without an answer after which a request fails. `seconds`: those of one attempt."""
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{url!r} is not the address of a server: write it as http://HOST:PORT")
        self.url: Final = url.rstrip("/")
        self._key, self._patience, self._seconds = key, patience, seconds

    def once(self) -> "Client":
        """Return a client of the same server that makes one short attempt, for what need not succeed."""
        return Client(self.url, self._key, 0.0, _FEW)

    async def json(self, path: str, body: Mapping[str, object] | None = None) -> dict[str, object]:
        """Send JSON, or without a body a GET request, and return the JSON of the answer. Errors as in `ask`."""
        raw = None if body is None else msgspec.json.encode(body)
        answer, _ = await self.ask(f"/api/v1/{path}", raw, _JSON)
        return msgspec.json.decode(answer, type=dict[str, object]) if answer else {}

    async def result(self, path: str, body: bytes, kind: str = MSGPACK) -> Made:
        """Send a request that has a number or a name, and return its result. Errors as in `ask`."""
        return await self.result_of(await self.submit(path, body, kind))

    async def submit(self, path: str, body: bytes, kind: str = MSGPACK) -> str:
        """Send a request that has a number or a name, and return the name of its result. Errors as in `ask`."""
        begun, _ = await self.ask(f"/api/v1/{path}", body, kind)
        return str(msgspec.json.decode(begun, type=dict[str, object])["request_id"])

    async def result_of(self, name: str) -> Made:
        """Return the result of a request taken under this name. Errors: see `ask`, and RequestExpired if it is lost."""
        while True:
            wanted = msgspec.json.encode({"request_id": name})
            answer, kind = await self.ask("/api/v1/retrieve_future", wanted, _JSON)
            if kind == MSGPACK:
                return msgspec.msgpack.decode(answer, type=Made)
            answered = msgspec.json.decode(answer, type=dict[str, object])
            if "error" in answered:
                raise _error(self.url, str(answered["error"]), str(answered.get("category")))
            if answered.get("type") != "try_again":
                return Made(path=str(answered.get("path", "")))

    async def ask(
        self, path: str, body: bytes | None, kind: str = _JSON, method: str | None = None
    ) -> tuple[bytes, str]:
        """Return the body and the content type of an answer. `method`: by default POST with a body, and else GET.

        DataError if the server refuses the request, and ModelError if it fails, or does not answer for long.
        """
        since, wait, why = time.monotonic(), _SOON, ""
        while True:
            status, answer, sent_as = await _in_thread(partial(self._attempt, path, body, kind, method))
            if status == HTTPStatus.OK or (status == HTTPStatus.REQUEST_TIMEOUT and b'"try_again"' in answer):
                return answer, sent_as
            text = _text(answer)
            if status and status not in (408, 429, 500, 502, 503, 504):
                raise (
                    RequestExpired(f"{self.url}: {text}")
                    if status == HTTPStatus.GONE
                    else _error(self.url, text, "user")
                )
            if not why:
                log.warning(f"{self.url} does not answer, and is asked again", error=text, status=status)
            why = text
            if time.monotonic() - since > self._patience:
                raise ModelError(f"{self.url} has not answered for {self._patience:g} s: {why}. Start the server again")
            await asyncio.sleep(wait)
            wait = min(2 * wait, _LATE)

    def _attempt(self, path: str, body: bytes | None, kind: str, method: str | None) -> tuple[int, bytes, str]:
        """Return status, body and content type of one attempt. Status 0 if there was no whole answer."""
        url = path if path.startswith("http") else f"{self.url}{path}"
        headers = {"X-API-Key": self._key, "Content-Type": kind}
        request = urllib.request.Request(url, body, headers, method=method)  # noqa: S310
        try:
            try:
                with urllib.request.urlopen(request, timeout=self._seconds) as answer:  # noqa: S310 -- checked above
                    return HTTPStatus.OK, answer.read(), str(answer.headers.get_content_type())
            except urllib.error.HTTPError as error:
                with error:
                    return error.code, error.read(), _JSON
        except (OSError, http.client.HTTPException) as error:  # the second if the connection is lost within an answer
            return 0, f"{type(error).__name__}: {error}".encode(), _JSON


async def _in_thread(work: Callable[[], T]) -> T:
    """Call this in a separate thread. No call waits for others' long polls, and the end of the process for none."""
    made: Future[T] = Future()

    def call() -> None:
        if not made.set_running_or_notify_cancel():
            return
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 -- raised where this is awaited
            made.set_exception(error)
        else:
            made.set_result(result)

    Thread(target=call, daemon=True).start()
    return await asyncio.wrap_future(made)


def _text(answer: bytes) -> str:
    try:
        return str(json.loads(answer)["error"])
    except (ValueError, KeyError, TypeError):
        return answer.decode(errors="replace")[:300]


def _error(url: str, text: str, category: str) -> Exception:
    return DataError(f"{url}: {text}") if category == "user" else ModelError(f"{url} has failed: {text}")
