"""One server while a sampler uses it: what runs there, whether it answers, and which weights it has."""

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
"""Seconds between two tries, at first and at last."""


class Running(NamedTuple):
    """A request for a row."""

    row: int
    """The row's number."""
    task: asyncio.Task[None]


class Server:
    """To be used in one event loop."""

    def __init__(self, client: Client, slots: int) -> None:
        self.client: Final = client
        self.url: Final = client.url
        self._slots = slots
        self._known: Found | None = None
        self.running: Final[dict[str, Running]] = {}
        """Requests for rows, by their names."""
        self.sure = False
        """Whether it is known to have the weights that it was given: not after it did not answer, or for a while."""
        self.gifts = 0
        """Which of the weights that servers were given it has, as they are counted there; 0 where it has none."""
        self.making_sure: asyncio.Task[None] | None = None
        self.silent_since: float | None = None
        """When it answered no more, by the clock of `time.monotonic`; None where it answers."""
        self.next_try = 0.0
        self._wait = _SOON
        self._why = ""

    @property
    def found(self) -> Found:
        """What it is."""
        assert self._known is not None, "the server was asked what it is before anything else"  # noqa: S101
        return self._known

    @found.setter
    def found(self, found: Found) -> None:
        self._known = found

    @property
    def dialect(self) -> Dialect:
        """How it is asked."""
        return self.found.dialect

    @property
    def has_room(self) -> bool:
        """Whether a row may be sent there."""
        return len(self.running) < self._slots and time.monotonic() >= self.next_try

    @property
    def silence(self) -> float:
        """Seconds without an answer, since the first that did not come."""
        return 0.0 if self.silent_since is None else time.monotonic() - self.silent_since

    def answered(self) -> None:
        """It did."""
        if self.silent_since is not None:
            log.info(f"{self.url} answers again", seconds=f"{self.silence:.1f}")
        self.silent_since, self.next_try, self._wait = None, 0.0, _SOON

    def missed(self, error: NoAnswerError) -> None:
        """It did not: ask later."""
        now = time.monotonic()
        self.sure = False
        if self.silent_since is None:
            self.silent_since, self._why = now, str(error)
            log.warning(f"{self.url} does not answer, and is asked again: {error}")
        if now >= self.next_try:  # not once more for each row that was there
            self.next_try = now + max(self._wait, error.after)
            self._wait = min(2 * self._wait, _LATE)

    def told(self) -> str:
        """Since when it does not answer, and why."""
        return f"{self.url} for {self.silence:.0f} s: {self._why}"

    async def insist(self, ask: Callable[[], Awaitable[T]], patience: float) -> T:
        """Ask until there is an answer. NoAnswerError where none came in so many seconds."""
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
