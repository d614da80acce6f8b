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
"""Number of connection attempts within a host's patience."""


class Watched(Protocol):
    """Something on a host."""

    def lose(self, reason: str) -> None:
        """Give the host up. Waiting tasks get the reason, and anything that arrives later is ignored."""
        ...


class Vigil:
    """Watches one host, on the loop that runs where it is made.

    A knock is a new connection to a port, which the host's kernel answers. It does not wait for a process that
    computes, and it avoids the long pauses of a connection that was cut. A host is given up if no knock succeeded
    within its `patience`. Time in which this process did not run does not count.
    """

    def __init__(self, door: Door, knock: Callable[[Door], Awaitable[bool]]) -> None:
        """`knock`: returns True if the host has answered."""
        self._door = door
        self._knock = knock
        self._waiting: set[Reply] = set()
        self._there: WeakSet[Watched] = WeakSet()
        self._watching: asyncio.Task[None] | None = None
        self._heard = False

    def attend(self, reply: Reply, there: Watched) -> None:
        """Watch until the reply is here. `there`: where it comes from."""
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
    """Say why a host was given up."""
    return (
        f"nothing was heard of its host ({door.ip}) for {door.patience:g} s, which is run.patience: the host or its "
        "network is down"
    )


async def knocked(door: Door) -> bool:
    """Return True if the host accepts a connection. Its kernel does so even while its process computes."""
    with socket.socket(socket.AF_INET6 if ":" in door.ip else socket.AF_INET) as knock:
        knock.setblocking(False)
        with suppress(OSError):  # including TimeoutError
            async with asyncio.timeout(door.patience):
                await asyncio.get_running_loop().sock_connect(knock, (door.ip, door.port))
        try:
            knock.getpeername()
        except OSError:
            return False
        return True


_vigils: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Door, Vigil]] = WeakKeyDictionary()


def vigil(door: Door) -> Vigil:
    """Return the vigil over this host, on the loop that runs now."""
    kept = _vigils.setdefault(asyncio.get_running_loop(), {})
    return kept.setdefault(door, Vigil(door, knocked))
