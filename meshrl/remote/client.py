"""Requests to a server, again and again until they are answered."""

import asyncio
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from http import HTTPStatus
from typing import Final

import msgspec

from meshrl import log
from meshrl.errors import ConfigError, DataError, ModelError
from meshrl.remote.messages import MSGPACK, Made

_JSON: Final = "application/json"
_SOON: Final = 0.1
_LATE: Final = 5.0
"""Seconds between two attempts at first, and at most."""
_SECONDS: Final = 120.0
"""Seconds without a byte after which an attempt is given up."""


class Client:
    """The HTTP of one server. A request comes again after a lost connection: the server knows it by its number."""

    def __init__(self, url: str, key: str, patience: float) -> None:
        """`patience`: seconds without an answer after which a request fails."""
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{url!r} is not the address of a server: write it as http://HOST:PORT")
        self.url: Final = url.rstrip("/")
        self._key, self._patience = key, patience

    async def json(self, path: str, body: Mapping[str, object] | None = None) -> dict[str, object]:
        """Send JSON, or without a body a GET request, and return the JSON of the answer. Errors as in `ask`."""
        raw = None if body is None else msgspec.json.encode(body)
        answer, _ = await self.ask(f"/api/v1/{path}", raw, _JSON)
        return msgspec.json.decode(answer, type=dict[str, object]) if answer else {}

    async def result(self, path: str, body: bytes, kind: str = MSGPACK) -> Made:
        """Send a request that has a number or a name, and return its result. Errors as in `ask`."""
        begun, _ = await self.ask(f"/api/v1/{path}", body, kind)
        return await self.result_of(str(msgspec.json.decode(begun, type=dict[str, object])["request_id"]))

    async def result_of(self, name: str) -> Made:
        """Return the result of a request that was taken under this name. Errors as in `ask`."""
        while True:
            wanted = msgspec.json.encode({"request_id": name})
            answer, kind = await self.ask("/api/v1/retrieve_future", wanted, _JSON)
            if kind == MSGPACK:
                return msgspec.msgpack.decode(answer, type=Made)
            told = msgspec.json.decode(answer, type=dict[str, object])
            if "error" in told:
                raise _error(self.url, str(told["error"]), str(told.get("category")))
            if told.get("type") != "try_again":
                return Made(path=str(told.get("path", "")))

    async def ask(self, path: str, body: bytes | None, kind: str = _JSON) -> tuple[bytes, str]:
        """Return the body and the content type of an answer.

        DataError if the server refuses the request, and ModelError if it fails, or does not answer for long.
        """
        since, wait, why = time.monotonic(), _SOON, ""
        while True:
            status, answer, told = await asyncio.to_thread(self._once, path, body, kind)
            if status == HTTPStatus.OK or (status == HTTPStatus.REQUEST_TIMEOUT and b'"try_again"' in answer):
                return answer, told
            text = _text(answer)
            if status and status not in (408, 429, 500, 502, 503, 504):
                raise _error(self.url, text, "user")
            if not why:
                log.warning(f"{self.url} does not answer, and is asked again", error=text, status=status)
            why = text
            if time.monotonic() - since > self._patience:
                raise ModelError(f"{self.url} has not answered for {self._patience:g} s: {why}. Start the server again")
            await asyncio.sleep(wait)
            wait = min(2 * wait, _LATE)

    def _once(self, path: str, body: bytes | None, kind: str) -> tuple[int, bytes, str]:
        """Return status, body and content type of one attempt. Status 0 if there was no answer."""
        url = path if path.startswith("http") else f"{self.url}{path}"
        asked = urllib.request.Request(url, body, {"X-API-Key": self._key, "Content-Type": kind})  # noqa: S310
        try:
            with urllib.request.urlopen(asked, timeout=_SECONDS) as answer:  # noqa: S310 -- checked above
                return HTTPStatus.OK, answer.read(), str(answer.headers.get_content_type())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read(), _JSON
        except OSError as error:
            return 0, str(error).encode(), _JSON


def _text(answer: bytes) -> str:
    try:
        return str(json.loads(answer)["error"])
    except (ValueError, KeyError, TypeError):
        return answer.decode(errors="replace")[:300]


def _error(url: str, text: str, category: str) -> Exception:
    return DataError(f"{url}: {text}") if category == "user" else ModelError(f"{url} has failed: {text}")
