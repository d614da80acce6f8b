"""Watch running calls: which ranks have not answered for long, and where they are."""

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Iterator, Sequence
from typing import Final, TypeVar

from meshrl.errors import CallTimeout
from meshrl.mesh.engine import Member

R = TypeVar("R")

_SHOWN: Final = 3
_open: set["Waiting"] = set()
_longest: dict[str, float] = {}
"""Seconds that a call of an endpoint has taken so far, at most."""


class Waiting:
    """A call that is waited for, or a stream's next value."""

    def __init__(self, where: str, members: Sequence[Member]) -> None:
        """`where`: the actor and the endpoint; `members`: the ranks that were asked."""
        self.where = where
        self._members = members
        self._ended: set[int] = set()
        self.since: float = 0.0
        self._told = 0.0

    async def until(self, answer: Awaitable[R], timeout: float | None) -> R:  # noqa: ASYNC109 -- a role has it
        """What is awaited; `CallTimeout` where it takes longer than `timeout` seconds."""
        self.since, self._told = time.monotonic(), 0.0
        _open.add(self)
        limit = asyncio.timeout(timeout)
        try:
            async with limit:
                return await answer
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise CallTimeout(
                f"{self.where} has not answered within timeout = {timeout:g} s: {self.ranks} may still be running. "
                "Find out what that process does, or raise the role's timeout if this is normal"
            ) from error
        finally:
            _open.discard(self)
            _longest[self.where] = max(_longest.get(self.where, 0.0), time.monotonic() - self.since)

    def answered(self, number: int) -> None:
        """One of the ranks has ended; from any thread."""
        self._ended.add(number)

    @property
    def ranks(self) -> str:
        """The ranks that have not answered, and their processes."""
        left = [member for number, member in enumerate(self._members) if number not in self._ended]
        shown = ", ".join(f"rank {member.rank.index} ({member.place})" for member in left[:_SHOWN])
        return shown + (f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else "")

    def slow(self, after: float) -> str | None:
        """What there is to say of a call that takes long: after so many seconds, and each time it has doubled."""
        seconds = time.monotonic() - self.since
        if seconds < max(after, 2 * self._told, 2 * _longest.get(self.where, 0.0)):
            return None
        self._told = seconds
        return f"{self.where} on {self.ranks} has been running for {seconds:.0f} s"


def slow_calls(after: float) -> Iterator[str]:
    """A sentence for each call of this process that has been waited for so many seconds, twice as many, and so on.

    An endpoint that has taken long before is told of when it takes twice as long.
    """
    for waiting in list(_open):
        if told := waiting.slow(after):
            yield told


def running_calls() -> list[tuple[str, str, float]]:
    """The calls of this process that are waited for: actor and endpoint, the ranks that have not answered, seconds."""
    now = time.monotonic()
    return [(waiting.where, waiting.ranks, now - waiting.since) for waiting in list(_open)]


def own_place() -> str:
    """This process, as messages name it."""
    return f"process {os.getpid()} on {socket.gethostname()}"
