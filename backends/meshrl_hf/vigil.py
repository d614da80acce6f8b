"""Report the death of a rank to the others of its process group at once: NCCL would wait for its timeout.

Each rank holds a connection to the first one. The system closes the connections of a process that ends in any way.
"""

import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from torch.distributed.distributed_c10d import Store

from meshrl.mesh import Rank

_KEY: Final = "vigil"
_TOKEN: Final = 16
"""Bytes of the secret by which the first rank recognises the others."""
_NUMBER: Final = struct.Struct("<I")
_PATIENCE: Final = 10.0
"""Seconds that a connecting process has to identify itself."""
_CONNECTED: Final = 120.0
"""Seconds within which all ranks connect. They have met just before."""
_FAREWELL: Final = 0xFFFFFFFF
"""Sent instead of a number by a living rank that closes its vigil."""
_KEEPALIVE: Final = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""The host of a rank counts as gone after a minute without an answer."""


class Vigil:
    """One rank's watch over the others. Calls `died` once, in a thread, with the number of a rank that is gone."""

    def __init__(
        self, store: Store, rank: Rank, host: str, died: Callable[[int], None], patience: float = _CONNECTED
    ) -> None:
        """All ranks construct theirs together. `host`: where the others reach the first rank.

        A rank that has not connected within `patience` seconds counts as gone.
        """
        self._died = died
        self._closed = False
        if rank.index == 0:
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            listening = socket.create_server(("", 0), family=family, backlog=rank.size, dualstack_ipv6=both)
            token = secrets.token_bytes(_TOKEN)
            store.set(_KEY, f"{listening.getsockname()[1]} {token.hex()}")
            self._own, closing = socket.socketpair()
            watch = self._over(listening, closing, token, set(range(1, rank.size)), patience)
        else:
            port, told = store.get(_KEY).decode().split()
            self._own = _kept(socket.create_connection((host, int(port)), patience))
            self._own.settimeout(None)
            self._own.sendall(bytes.fromhex(told) + _NUMBER.pack(rank.index))
            watch = self._of(self._own)
        self._thread = threading.Thread(target=watch, name="vigil", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the watch. `died` is not called any more, and the others do not count this as a death."""
        self._closed = True
        with suppress(OSError):  # it has ended, or the first rank is gone
            self._own.sendall(_NUMBER.pack(_FAREWELL))
            self._own.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._own.close()

    def _over(
        self, listening: socket.socket, closing: socket.socket, token: bytes, awaited: set[int], patience: float
    ) -> Callable[[], None]:
        """Return the first rank's watch, which reports the first death to all. `awaited`: unconnected ranks."""
        there: dict[socket.socket, int] = {}

        def watch() -> None:
            until, gone = time.monotonic() + patience, _FAREWELL
            with selectors.DefaultSelector() as selector, listening, closing:
                selector.register(closing, selectors.EVENT_READ)
                selector.register(listening, selectors.EVENT_READ)
                while gone == _FAREWELL and not self._closed:
                    left = max(0.0, until - time.monotonic()) if awaited else None
                    ready = [key.fileobj for key, _ in selector.select(left)]
                    if not ready and awaited:
                        gone = min(awaited)
                    for each in there.keys() & ready:
                        selector.unregister(each)
                        with each:
                            gone = gone if _read(each, _NUMBER.size) else there[each]
                        del there[each]
                    if listening in ready and (came := _greeted(listening, token)):
                        connection, number = came
                        there[connection] = number
                        awaited.discard(number)
                        selector.register(connection, selectors.EVENT_READ)
                        if not awaited:
                            selector.unregister(listening)
            for each in there:
                with each, suppress(OSError):
                    each.sendall(_NUMBER.pack(gone))
            self._tell(gone)

        return watch

    def _of(self, first: socket.socket) -> Callable[[], None]:
        """Return another rank's watch, which waits for the first rank's report, or for its death."""

        def watch() -> None:
            with first:
                told = _read(first, _NUMBER.size)
            self._tell(_NUMBER.unpack(told)[0] if told else 0)

        return watch

    def _tell(self, gone: int) -> None:
        if gone != _FAREWELL and not self._closed:
            self._died(gone)


def _greeted(listening: socket.socket, token: bytes) -> tuple[socket.socket, int] | None:
    """Accept a connection from a rank, and return its number. None for a stranger."""
    connection = _kept(listening.accept()[0])
    connection.settimeout(_PATIENCE)
    hello = _read(connection, _TOKEN + _NUMBER.size)
    connection.settimeout(None)
    if secrets.compare_digest(hello[:_TOKEN], token):
        return connection, _NUMBER.unpack(hello[_TOKEN:])[0]
    connection.close()
    return None


def _read(connection: socket.socket, size: int) -> bytes:
    """Read `size` bytes. Empty if the other end is gone before."""
    got = b""
    with suppress(OSError):
        while len(got) < size and (more := connection.recv(size - len(got))):
            got += more
    return got if len(got) == size else b""


def _kept(connection: socket.socket) -> socket.socket:
    """Configure a connection so that it ends if the other host does not answer."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection
