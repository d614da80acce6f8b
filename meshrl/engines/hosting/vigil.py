"""Detect hosts that are gone: connect to a port of the host while a call waits for an answer from it."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Final, Protocol
from weakref import WeakKeyDictionary, WeakSet

from meshrl.engines.hosting.channel import Reply
from meshrl.engines.hosting.messages import Door
from meshrl.events import clock

KNOCKS: Final = 10
"""How often a host is asked within its patience."""


class Watched(Protocol):
    """What is on a host."""

    def lose(self, reason: str) -> None:
        """The host is given up: whoever waits for this is told so, and nothing that comes from it later counts."""
        ...


class Vigil:
    """Over one host, on the loop that runs where it is made.

    A knock is a new connection to a port where the host's own kernel answers: it neither waits for a process that
    computes, nor inherits the long pauses of a connection that was cut. A host is given up when nothing has come of any
    knock for its `patience`. Time in which this process itself did not run is no silence of the host's.
    """

    def __init__(self, door: Door, knock: Callable[[Door], Awaitable[bool]]) -> None:
        """`knock`: whether the host has answered."""
        self._door = door
        self._knock = knock
        self._waiting: set[Reply] = set()
        self._there: WeakSet[Watched] = WeakSet()
        self._watching: asyncio.Task[None] | None = None
        self._heard = False

    def attend(self, reply: Reply, there: Watched) -> None:
        """Watch until the reply is here; `there`: what it is awaited from."""
        if reply.is_here:
            return
        self._there.add(there)
        self._waiting.add(reply)
        reply.tell(partial(self._answered, reply))
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())

    def _answered(self, reply: Reply) -> None:
        self._waiting.discard(reply)
        self._heard = True

    async def _watch(self) -> None:
        knocks: set[asyncio.Task[None]] = set()
        pause, silent, last = self._door.patience / KNOCKS, 0.0, clock()
        try:
            while self._waiting and silent < self._door.patience:
                await asyncio.sleep(pause)
                now = clock()
                silent, last = 0.0 if self._heard else silent + min(now - last, 2 * pause), now
                self._heard = False
                knocks.add(knock := asyncio.create_task(self._ask()))
                knock.add_done_callback(knocks.discard)
        finally:
            self._watching = None
            for knock in knocks:
                knock.cancel()
        if self._waiting:
            self._give_up()

    async def _ask(self) -> None:
        if await self._knock(self._door):
            self._heard = True

    def _give_up(self) -> None:
        reason = silence(self._door)
        there, self._there = list(self._there), WeakSet()
        for each in there:
            each.lose(reason)


def silence(door: Door) -> str:
    """Why a host was given up."""
    return (
        f"nothing was heard of its host ({door.ip}) for {door.patience:g} s, which is run.patience: the host or its "
        "network is down"
    )


async def knocked(door: Door) -> bool:
    """Whether the host takes a connection. A process that computes may hear of it late, its kernel does not."""
    with socket.socket(socket.AF_INET6 if ":" in door.ip else socket.AF_INET) as knock:
        knock.setblocking(False)
        with suppress(OSError):  # TimeoutError is one
            async with asyncio.timeout(door.patience):
                await asyncio.get_running_loop().sock_connect(knock, (door.ip, door.port))
        try:
            knock.getpeername()
        except OSError:
            return False
        return True


_vigils: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Door, Vigil]] = WeakKeyDictionary()


def vigil(door: Door) -> Vigil:
    """The one over this host, on the loop that runs now."""
    kept = _vigils.setdefault(asyncio.get_running_loop(), {})
    return kept.setdefault(door, Vigil(door, knocked))
