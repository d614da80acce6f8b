"""Detect hosts that are gone: connect to a port of the host while a call waits for an answer from it."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Final, Protocol
from weakref import WeakKeyDictionary, WeakSet

from meshrl.engines.remote.messages import HealthPort, Reply
from meshrl.events import clock

PROBES: Final = 10
"""Number of connection attempts within a host's patience."""


class Watched(Protocol):
    """Something on a host."""

    def lose(self, reason: str) -> None:
        """Give the host up. Waiting tasks get the reason, and anything that arrives later is ignored."""
        ...


class HostMonitor:
    """Watches one host, on the loop that runs where it is made.

    A probe is a new connection to a port, which the host's kernel answers. It does not wait for a process that
    computes, and it avoids the long pauses of a connection that was cut. A host is given up if no probe succeeded
    within its `patience`. Time during which this process was suspended is not counted.
    """

    def __init__(self, port: HealthPort, probe: Callable[[HealthPort], Awaitable[bool]]) -> None:
        """`probe`: returns True if the host has answered."""
        self._port = port
        self._probe = probe
        self._waiting: set[Reply] = set()
        self._watched: WeakSet[Watched] = WeakSet()
        self._watching: asyncio.Task[None] | None = None
        self._answer_came = False

    def watch(self, reply: Reply, source: Watched) -> None:
        """Watch the host until the reply has arrived. `source`: what the reply comes from."""
        if reply.done:
            return
        self._watched.add(source)
        self._waiting.add(reply)
        reply.add_callback(partial(self._answered, reply))
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())

    def _answered(self, reply: Reply) -> None:
        self._waiting.discard(reply)
        self._answer_came = True

    async def _watch(self) -> None:
        probes: set[asyncio.Task[None]] = set()
        pause, silent, last = self._port.patience / PROBES, 0.0, clock()
        try:
            while self._waiting and silent < self._port.patience:
                await asyncio.sleep(pause)
                now = clock()
                silent, last = 0.0 if self._answer_came else silent + min(now - last, 2 * pause), now
                self._answer_came = False
                probes.add(probe := asyncio.create_task(self._ask()))
                probe.add_done_callback(probes.discard)
        finally:
            self._watching = None
            for probe in probes:
                probe.cancel()
        if self._waiting:
            self._give_up()

    async def _ask(self) -> None:
        if await self._probe(self._port):
            self._answer_came = True

    def _give_up(self) -> None:
        reason = (
            f"nothing was heard of its host ({self._port.ip}) for {self._port.patience:g} s, which is run.patience: "
            "the host or its network is down"
        )
        watched, self._watched = list(self._watched), WeakSet()
        for each in watched:
            each.lose(reason)


async def is_reachable(port: HealthPort) -> bool:
    """Return True if the host accepts a connection. Its kernel does so even while its process computes."""
    with socket.socket(socket.AF_INET6 if ":" in port.ip else socket.AF_INET) as probe:
        probe.setblocking(False)
        with suppress(OSError):  # including TimeoutError
            async with asyncio.timeout(port.patience):
                await asyncio.get_running_loop().sock_connect(probe, (port.ip, port.port))
        try:
            probe.getpeername()
        except OSError:
            return False
        return True


_monitors: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[HealthPort, HostMonitor]] = WeakKeyDictionary()


def monitor_of(port: HealthPort) -> HostMonitor:
    """Return the monitor of this host, on the loop that runs now."""
    monitors = _monitors.setdefault(asyncio.get_running_loop(), {})
    return monitors.setdefault(port, HostMonitor(port, is_reachable))
