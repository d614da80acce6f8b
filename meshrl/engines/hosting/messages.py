"""The messages between a caller and a rank's process, regardless of the transport."""

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from meshrl.mesh import Rank, Ref


class Door(NamedTuple):
    """A port at which a host accepts connections while it is reachable."""

    ip: str
    port: int
    patience: float
    """Seconds without an answer after which a host is given up."""


class Place(NamedTuple):
    """The place of a rank's process."""

    pid: int
    host: str
    ip: str
    node: str
    """Identifies the machine within the engine."""
    port: int
    """A port that is reserved for a server of this process."""
    boot: str
    """Identifies the machine since its start. Processes with the same value have the same monotonic clock."""
    socket: tuple[str, bytes] | None = None
    """The path at which it also answers processes of its machine, and the secret that these have to show."""
    door: Door | None = None
    """The port at which other machines see whether this one is reachable."""
    files: Sequence[str] = ()
    """Files of its machine that receive all its output."""


def boot() -> str:
    """Identify this machine since its start. If that is unknown, identify this process."""
    known = Path("/proc/sys/kernel/random/boot_id")
    return known.read_text("ascii").strip() if known.exists() else f"{socket.gethostname()} {os.getpid()}"


def reserved_port() -> socket.socket:
    """Return a socket that reserves a port: while it is open, the system gives the port to nobody who asks for any.

    A server that asks for this port by its number, and reuses addresses as torch's store does, may listen there. That
    is so on Linux.
    """
    reserving = socket.socket()
    reserving.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserving.bind(("", 0))
    return reserving


class Ask(NamedTuple):
    """A call of an endpoint, or the opening of a stream, without its arguments."""

    endpoint: str
    key: str
    """The actor, among those in the process."""
    line: str
    """The caller. Its calls start in the order of their numbers."""
    number: int
    consumed: bool = True
    """For a stream, True if the caller reads this rank's values."""
    timed: bool = False
    """True if the answer includes its times: `(answer, began, ended)`."""


Arguments: TypeAlias = tuple[tuple[object, ...], Mapping[str, object]]
"""Positional and keyword arguments."""
NO_ARGUMENTS: Final[Arguments] = (), {}


class Construction(NamedTuple):
    """An actor to construct."""

    key: str
    attempt: int
    """How many times it was made here before. An attempt that was stopped before it arrived is not started."""
    rank: Rank
    environment: Mapping[str, str]
    recipe: Ref
    """The class, the arguments and the keywords. Unpickled after the environment is set, because it may load torch."""


@dataclass(frozen=True)
class Failure:
    """The answer after an exception on the rank."""

    reason: str
    traceback: str
    cause: bytes | None = None
    """The exception, if it can be pickled."""


class Stopped:
    """The answer of a rank whose actor is stopped."""


class Over:
    """The answer of a stream without more values."""
