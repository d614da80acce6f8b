"""The messages between the engine and its template process, each preceded by its length in four bytes."""

import socket
from collections.abc import Mapping, Sequence
from struct import Struct
from typing import Final, TypeAlias

import msgspec

from meshrl.mesh import Share

_LENGTH: Final = Struct("<I")


class Begin(msgspec.Struct, tag="begin", frozen=True):
    """Start a rank's process. The socket that it answers on is sent along, and the folder of `log`."""

    key: str
    folder: str
    """Its current folder."""
    paths: Sequence[str]
    """Its import path."""
    environment: Mapping[str, str]
    cores: Sequence[int]
    """The cores that it is pinned to. Empty: not pinned."""
    token: bytes
    inline_bytes: int
    share: Share
    """Its share of shared memory."""
    log: str = ""
    """The file for its output, in a folder that is sent along. Empty: it writes to the engine's output."""


class Kill(msgspec.Struct, tag="kill", frozen=True):
    """End a rank's process at once."""

    key: str


class Close(msgspec.Struct, tag="close", frozen=True):
    """End all ranks and the template. The engine's process continues."""


class Ended(msgspec.Struct, tag="ended", frozen=True):
    """Report that a rank's process has ended."""

    key: str
    how: str


Order: TypeAlias = Begin | Kill | Close | Ended


def send(control: socket.socket, order: Order, files: Sequence[int] = ()) -> None:
    """Send a whole order, with open files."""
    frame = msgspec.msgpack.encode(order)
    whole = _LENGTH.pack(len(frame)) + frame
    sent = socket.send_fds(control, [whole], list(files))
    control.sendall(whole[sent:])


def receive(control: socket.socket) -> tuple[Order, list[int]] | None:
    """Receive the next order, with its files. None if the other side is gone."""
    head, files, _, _ = socket.recv_fds(control, _LENGTH.size, 2)
    while head and len(head) < _LENGTH.size:
        more = control.recv(_LENGTH.size - len(head))
        if not more:
            return None
        head += more
    if not head:
        return None
    left = _LENGTH.unpack(head)[0]
    parts: list[bytes] = []
    while left:
        part = control.recv(left)
        if not part:
            return None
        parts.append(part)
        left -= len(part)
    return msgspec.msgpack.decode(b"".join(parts), type=Order), files
