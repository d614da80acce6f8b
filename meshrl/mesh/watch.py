"""Watch running calls: which ranks have not answered for long, and where they are."""

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeVar

from meshrl.errors import CallTimeout
from meshrl.mesh.engine import Member

R = TypeVar("R")

_SHOWN: Final = 3
_open: set["Waiting"] = set()
_longest: dict[str, float] = {}
"""Longest time in seconds that a call of each endpoint has taken so far."""


class Waiting:
    """A running call, a stream's next value, or work of this process itself, which has no members."""

    def __init__(self, where: str, members: Sequence[Member]) -> None:
        """`where`: the actor and the endpoint. `members`: the ranks that were called."""
        self.where = where
        self._members = members
        self._ended: set[int] = set()
        self.since: float = 0.0
        self._told = 0.0

    async def until(self, answer: Awaitable[R], timeout: float | None) -> R:  # noqa: ASYNC109 -- a role has it
        """Await an answer. Raises `CallTimeout` after `timeout` seconds."""
        limit = asyncio.timeout(timeout)
        try:
            with self.running():
                async with limit:
                    return await answer
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise CallTimeout(
                f"{self.where} has not answered within timeout = {timeout:g} s: {self.ranks} may still be running. "
                "Find out what that process does, or raise the role's timeout if this is normal"
            ) from error

    @contextmanager
    def running(self) -> Generator[None]:
        """Count it as running inside the block."""
        self.since, self._told = time.monotonic(), 0.0
        _open.add(self)
        try:
            yield
        finally:
            _open.discard(self)
            _longest[self.where] = max(_longest.get(self.where, 0.0), time.monotonic() - self.since)

    def answered(self, number: int) -> None:
        """Note that one of the ranks has ended. Any thread may call it."""
        self._ended.add(number)

    @property
    def ranks(self) -> str:
        """Name the ranks that have not answered, and their processes."""
        left = [member for number, member in enumerate(self._members) if number not in self._ended]
        shown = ", ".join(f"rank {member.rank.index} ({member.place})" for member in left[:_SHOWN])
        return shown + (f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else "")

    def slow(self, after: float) -> str | None:
        """Describe a call that has run for `after` seconds, and again each time that has doubled. Otherwise None."""
        seconds = time.monotonic() - self.since
        if seconds < max(after, 2 * self._told, 2 * _longest.get(self.where, 0.0)):
            return None
        self._told = seconds
        on = f" on {self.ranks}" if self._members else ""
        return f"{self.where}{on} has been running for {seconds:.0f} s"


def slow_calls(after: float) -> Iterator[str]:
    """Yield a sentence for each call of this process that has run for `after` seconds, twice as long, and so on.

    An endpoint that was slow before is reported once it takes twice as long.
    """
    for waiting in list(_open):
        if told := waiting.slow(after):
            yield told


def running_calls() -> list[tuple[str, str, float]]:
    """List this process's running calls: actor and endpoint, the ranks that have not answered, and seconds."""
    now = time.monotonic()
    return [(waiting.where, waiting.ranks, now - waiting.since) for waiting in list(_open)]


def own_place() -> str:
    """Name this process, for messages."""
    return f"process {os.getpid()} on {socket.gethostname()}"
