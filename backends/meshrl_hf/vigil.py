"""Who of the ranks that share a process group dies, the others hear at once: NCCL would let them wait for its timeout.

Each rank holds a connection to the first one. The system closes those of a process that ends, however it ends.
"""

import secrets
import selectors
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from torch.distributed.distributed_c10d import Store

from meshrl.mesh import Rank

_KEY: Final = "vigil"
_TOKEN: Final = 16
"""Bytes by which the first rank knows the others."""
_NUMBER: Final = struct.Struct("<I")
_PATIENCE: Final = 10.0
"""Seconds that who connects has to say who it is."""
_KEEPALIVE: Final = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""After a minute without an answer the host of a rank counts as gone."""


class Vigil:
    """One rank's watch over the others: `died` is called once, in a thread, with the number of one that is gone."""

    def __init__(self, store: Store, rank: Rank, host: str, died: Callable[[int], None]) -> None:
        """All ranks make theirs at the same time. `host`: where the others reach the first rank."""
        self._died = died
        if rank.index == 0:
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            listening = socket.create_server(("", 0), family=family, backlog=rank.size, dualstack_ipv6=both)
            token = secrets.token_bytes(_TOKEN)
            store.set(_KEY, f"{listening.getsockname()[1]} {token.hex()}")
            watch = self._over(listening, token, rank.size - 1)
        else:
            port, told = store.get(_KEY).decode().split()
            first = _kept(socket.create_connection((host, int(port))))
            first.sendall(bytes.fromhex(told) + _NUMBER.pack(rank.index))
            watch = self._of(first)
        threading.Thread(target=watch, name="vigil", daemon=True).start()

    def _over(self, listening: socket.socket, token: bytes, others: int) -> Callable[[], None]:
        """What the first rank does: it tells all of the first that is gone."""

        def watch() -> None:
            there: dict[socket.socket, int] = {}
            with selectors.DefaultSelector() as selector, listening:
                while len(there) < others:
                    connection = _kept(listening.accept()[0])
                    connection.settimeout(_PATIENCE)
                    hello = _read(connection, _TOKEN + _NUMBER.size)
                    connection.settimeout(None)
                    if secrets.compare_digest(hello[:_TOKEN], token):
                        there[connection] = _NUMBER.unpack(hello[_TOKEN:])[0]
                        selector.register(connection, selectors.EVENT_READ)
                    else:
                        connection.close()
                ((key, _), *_) = selector.select()
                gone = key.fileobj
                assert isinstance(gone, socket.socket)  # noqa: S101 - no other was registered
                dead = there.pop(gone)
                for each in there:
                    with suppress(OSError):
                        each.sendall(_NUMBER.pack(dead))
                self._died(dead)
            for each in (gone, *there):
                each.close()

        return watch

    def _of(self, first: socket.socket) -> Callable[[], None]:
        """What each other rank does: it waits until the first tells it of one, or is gone itself."""

        def watch() -> None:
            with first:
                told = _read(first, _NUMBER.size)
            self._died(_NUMBER.unpack(told)[0] if told else 0)

        return watch


def _read(connection: socket.socket, size: int) -> bytes:
    """So many bytes; none where the other end is gone before."""
    got = b""
    with suppress(OSError):
        while len(got) < size and (more := connection.recv(size - len(got))):
            got += more
    return got if len(got) == size else b""


def _kept(connection: socket.socket) -> socket.socket:
    """The connection, which ends where the other host does not answer."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection
