"""Report the loss of a rank to the others of its process group. Collectives would wait for their timeout.

Each rank holds a connection to the first one. The system closes the connections of a process that ends in any way, and
those to a host that has not answered for some time.
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

_KEY: Final = "rank monitor"
_TOKEN: Final = 16
"""Bytes of the secret by which the first rank recognises the others."""
_NUMBER: Final = struct.Struct("<I")
_REPORT: Final = struct.Struct("<I?")
"""Number of the lost rank, and whether its host is silent."""
_HELLO: Final = 10.0
"""Seconds that a connecting process has to identify itself."""
_CONNECTED: Final = 120.0
"""Seconds within which all ranks connect. They have met just before."""
_FAREWELL: Final = 0xFFFFFFFF
"""Sent instead of a number by a living rank that closes its monitor."""
_PROBES: Final = 5
"""Number of unanswered probes after which the system gives up a host."""
_LONGEST: Final = 32767.0
"""Most seconds that the system accepts."""


class RankMonitor:
    """Watches the other ranks of a process group from one of them.

    Calls `lost` once, in a thread, with the number of the lost rank, and whether its host is silent. If not, its
    process has ended.
    """

    def __init__(
        self,
        store: Store,
        rank: Rank,
        host: str,
        lost: Callable[[int, bool], None],
        patience: float,
        connected: float = _CONNECTED,
    ) -> None:
        """All ranks construct theirs together. `host`: where the others reach the first rank.

        `patience`: seconds after which a host that does not answer is given up. A rank that has not connected within
        `connected` seconds counts as lost.
        """
        self._lost, self._patience, self._closed = lost, patience, False
        if rank.index == 0:
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            listening = socket.create_server(("", 0), family=family, backlog=rank.size, dualstack_ipv6=both)
            token = secrets.token_bytes(_TOKEN)
            store.set(_KEY, f"{listening.getsockname()[1]} {token.hex()}")
            self._own, closing = socket.socketpair()
            arguments = (listening, closing, token, set(range(1, rank.size)), connected)
            self._thread = threading.Thread(target=self._watch_all, args=arguments, daemon=True)
        else:
            port, secret = store.get(_KEY).decode().split()
            self._own = _with_keepalive(socket.create_connection((host, int(port)), connected), patience)
            self._own.settimeout(None)
            self._own.sendall(bytes.fromhex(secret) + _NUMBER.pack(rank.index))
            self._thread = threading.Thread(target=self._watch_first, daemon=True)
        self._thread.name = "meshrl-rank-monitor"
        self._thread.start()

    def close(self) -> None:
        """Stop watching. `lost` is not called any more, and the others do not count this as a death."""
        self._closed = True
        with suppress(OSError):  # it has ended, or the first rank is gone
            self._own.sendall(_NUMBER.pack(_FAREWELL))
            self._own.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._own.close()

    def _watch_all(
        self, listening: socket.socket, closing: socket.socket, token: bytes, awaited: set[int], connected: float
    ) -> None:
        """Watch on the first rank, and report the first loss to all. `awaited`: unconnected ranks."""
        ranks: dict[socket.socket, int] = {}
        until, gone, silent = time.monotonic() + connected, _FAREWELL, False
        with selectors.DefaultSelector() as selector, listening, closing:
            selector.register(closing, selectors.EVENT_READ)
            selector.register(listening, selectors.EVENT_READ)
            while gone == _FAREWELL and not self._closed:
                left = max(0.0, until - time.monotonic()) if awaited else None
                ready = [key.fileobj for key, _ in selector.select(left)]
                if not ready and awaited:
                    gone = min(awaited)
                for each in ranks.keys() & ready:
                    selector.unregister(each)
                    with each:
                        farewell, unanswered = _read(each, _NUMBER.size)
                    if not farewell:
                        gone, silent = ranks[each], unanswered
                    del ranks[each]
                if listening in ready and (accepted := self._accept(listening, token)):
                    connection, number = accepted
                    ranks[connection] = number
                    awaited.discard(number)
                    selector.register(connection, selectors.EVENT_READ)
                    if not awaited:
                        selector.unregister(listening)
            while awaited and any(key.fileobj is listening for key, _ in selector.select(0)):
                if accepted := self._accept(listening, token):  # it has connected, and would hear of a death
                    ranks[accepted[0]] = accepted[1]
                    awaited.discard(accepted[1])
        for each in ranks:
            with each, suppress(OSError):
                each.sendall(_REPORT.pack(gone, silent))
        self._report(gone, silent)

    def _watch_first(self) -> None:
        """Watch on another rank: wait for the first rank's report, or for its loss."""
        with self._own:
            report, silent = _read(self._own, _REPORT.size)
        gone, silent = _REPORT.unpack(report) if report else (0, silent)
        self._report(gone, silent)

    def _accept(self, listening: socket.socket, token: bytes) -> tuple[socket.socket, int] | None:
        """Accept a connection from a rank, and return its number. None for a stranger."""
        connection = _with_keepalive(listening.accept()[0], self._patience)
        connection.settimeout(_HELLO)
        hello, _ = _read(connection, _TOKEN + _NUMBER.size)
        connection.settimeout(None)
        if secrets.compare_digest(hello[:_TOKEN], token):
            return connection, _NUMBER.unpack(hello[_TOKEN:])[0]
        connection.close()
        return None

    def _report(self, gone: int, silent: bool) -> None:
        if gone != _FAREWELL and not self._closed:
            self._lost(gone, silent)


def _read(connection: socket.socket, size: int) -> tuple[bytes, bool]:
    """Read `size` bytes. Empty if the other end is gone before, and then True if it is because its host is silent."""
    content = b""
    try:
        while len(content) < size and (more := connection.recv(size - len(content))):
            content += more
    except ConnectionError:  # its process has ended
        return b"", False
    except OSError:
        return b"", True
    return content if len(content) == size else b"", False


def _with_keepalive(connection: socket.socket, patience: float) -> socket.socket:
    """Let the system end a connection if the other host has not answered for `patience` seconds."""
    patience = min(patience, _LONGEST)
    probing = max(1, round(patience / 2 / _PROBES))
    idle = max(1, round(patience) - probing * _PROBES)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in {"TCP_KEEPIDLE": idle, "TCP_KEEPINTVL": probing, "TCP_KEEPCNT": _PROBES}.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection
