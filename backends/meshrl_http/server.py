"""The state of one server in use: its requests, whether it answers, and its weights."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple, TypeVar

from meshrl import log
from meshrl_http.client import Client, NoAnswerError
from meshrl_http.dialects import Dialect
from meshrl_http.found import Found

T = TypeVar("T")

_SOON: Final = 0.2
_LATE: Final = 10.0
"""Seconds between two attempts at first, and at most."""


class Running(NamedTuple):
    """A request for a row."""

    row: int
    """The row's number."""
    task: asyncio.Task[None]


class Server:
    """The state of a server, for use in one event loop."""

    def __init__(self, client: Client, slots: int) -> None:
        self.client: Final = client
        self.url: Final = client.url
        self._slots = slots
        self._known: Found | None = None
        self.running: Final[dict[str, Running]] = {}
        """Requests for rows, by name."""
        self.sure = False
        """True if it is known to have the given weights. False after missing answers, or an idle time."""
        self.gifts = 0
        """The number of its weights, counting those given to servers. 0 if it has none."""
        self.making_sure: asyncio.Task[None] | None = None
        self.silent_since: float | None = None
        """Time of the first missing answer on the clock `time.monotonic`. None if it answers."""
        self.next_try = 0.0
        self._wait = _SOON
        self._why = ""

    @property
    def found(self) -> Found:
        """Its properties."""
        assert self._known is not None, "the server was asked what it is before anything else"  # noqa: S101
        return self._known

    @found.setter
    def found(self, found: Found) -> None:
        self._known = found

    @property
    def dialect(self) -> Dialect:
        """Its kind of requests."""
        return self.found.dialect

    @property
    def has_room(self) -> bool:
        """True if a row may be sent there."""
        return len(self.running) < self._slots and time.monotonic() >= self.next_try

    @property
    def silence(self) -> float:
        """Seconds without an answer, since the first that was missing."""
        return 0.0 if self.silent_since is None else time.monotonic() - self.silent_since

    def answered(self) -> None:
        """Note an answer."""
        if self.silent_since is not None:
            log.info(f"{self.url} answers again", seconds=f"{self.silence:.1f}")
        self.silent_since, self.next_try, self._wait = None, 0.0, _SOON

    def missed(self, error: NoAnswerError) -> None:
        """Note a missing answer, and try again later."""
        now = time.monotonic()
        self.sure = False
        if self.silent_since is None:
            self.silent_since, self._why = now, str(error)
            log.warning(f"{self.url} does not answer, and is asked again: {error}")
        if now >= self.next_try:  # only once for all rows that were there
            self.next_try = now + max(self._wait, error.after)
            self._wait = min(2 * self._wait, _LATE)

    def told(self) -> str:
        """Describe since when it does not answer, and why."""
        return f"{self.url} for {self.silence:.0f} s: {self._why}"

    async def insist(self, ask: Callable[[], Awaitable[T]], patience: float) -> T:
        """Repeat a request until it is answered. NoAnswerError after `patience` seconds."""
        while True:
            try:
                answer = await ask()
            except NoAnswerError as error:
                self.missed(error)
                if self.silence > patience:
                    raise
                await asyncio.sleep(max(0.0, self.next_try - time.monotonic()))
            else:
                self.answered()
                return answer
