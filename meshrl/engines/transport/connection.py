"""Frames on a non-blocking socket: each is preceded by its length in four bytes."""

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from struct import Struct
from typing import Final
from weakref import WeakSet

from meshrl import log
from meshrl.errors import described

_LENGTH: Final = Struct("<I")
LONGEST: Final = (1 << 32) - 1
"""Most bytes of a frame."""
_CHUNK: Final = 1 << 16
"""Bytes of one read. For 128 KiB and more, the C library may map fresh pages each time."""


class Connection:
    """One end, on the loop that runs where it is made. Frames arrive whole and in order."""

    def __init__(
        self, end: socket.socket, received: Callable[[bytes], None], ended: Callable[[], None], most: int = LONGEST
    ) -> None:
        """`received`: gets each frame. `ended`: called once when the other side is gone. `most`: bytes of a frame."""
        end.setblocking(False)
        leave_to_parent(end)
        self.socket = end
        self.most = most
        self._loop = asyncio.get_running_loop()
        self._received = received
        self._ended = ended
        self._arrived = bytearray()
        self._waiting: list[memoryview] = []
        """Bytes that the socket has not taken yet."""
        self._open = True
        self._loop.add_reader(end, self._read)

    def send(self, frame: bytes) -> None:
        """Send a frame, now or when the other side has room. No effect if it is gone."""
        if not self._open:
            return
        if len(frame) > LONGEST:
            raise TypeError(f"a call's values have {len(frame)} bytes, but a call can carry at most {LONGEST}")
        whole = _LENGTH.pack(len(frame)) + frame
        if self._waiting:
            self._waiting.append(memoryview(whole))
            return
        sent = self._taken(memoryview(whole))
        if sent < len(whole):
            self._waiting.append(memoryview(whole)[sent:])
            self._loop.add_writer(self.socket, self._write)

    def close(self) -> None:
        """Close this end, without calling `ended`."""
        if self._open:
            self._open = False
            with suppress(RuntimeError):  # the loop is closed
                self._loop.remove_reader(self.socket)
                self._loop.remove_writer(self.socket)
            self.socket.close()

    def _taken(self, part: memoryview) -> int:
        """Return the number of bytes that the socket took."""
        try:
            return self.socket.send(part)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:  # the reader notices it
            return len(part)

    def _write(self) -> None:
        while self._waiting:
            sent = self._taken(self._waiting[0])
            if sent < len(self._waiting[0]):
                self._waiting[0] = self._waiting[0][sent:]
                return
            self._waiting.pop(0)
        self._loop.remove_writer(self.socket)

    def _read(self) -> None:
        try:
            some = self.socket.recv(_CHUNK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            some = b""
        if not some:
            self._end()
            return
        if self._arrived:
            self._arrived += some
            left = self._deliver(self._arrived)
            del self._arrived[: len(self._arrived) - left]
        elif left := self._deliver(some):
            self._arrived += some[len(some) - left :]

    def _deliver(self, arrived: bytes | bytearray) -> int:
        """Pass on the whole frames. Returns the number of bytes that are left."""
        at, most = 0, len(arrived)
        try:
            while self._open and most - at >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(arrived, at)
                if length > self.most:
                    self._end()
                    break
                begin, end = at + _LENGTH.size, at + _LENGTH.size + length
                if most < end:
                    break
                at = end
                self._received(bytes(memoryview(arrived)[begin:end]))
        except Exception as error:  # noqa: BLE001 -- deliver no frame twice, and do not wait for a wrong one
            log.warning(f"a connection is closed, because its frame could not be read: {described(error)}")
            self._end()
        return most - at if self._open else 0

    def _end(self) -> None:
        if self._open:
            self.close()
            self._ended()


_sockets: WeakSet[socket.socket] = WeakSet()


def leave_to_parent(own: socket.socket) -> None:
    """Close a socket in forked processes, where it would outlive this process."""
    _sockets.add(own)


def _forked() -> None:
    for own in list(_sockets):
        own.close()


os.register_at_fork(after_in_child=_forked)
