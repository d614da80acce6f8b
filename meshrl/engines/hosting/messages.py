"""The messages between a caller and a rank's process, regardless of the transport."""

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from meshrl.mesh import Rank, Ref


class Door(NamedTuple):
    """A port at which a host takes connections while it is there."""

    ip: str
    port: int
    patience: float
    """Seconds after which a host that takes none is given up."""


class Place(NamedTuple):
    """Where a rank's process is."""

    pid: int
    host: str
    ip: str
    node: str
    """What identifies the machine among those of the engine."""
    port: int
    """A port that was free there a moment ago."""
    boot: str
    """The machine, since it was started: processes with the same have the same monotonic clock."""
    socket: tuple[str, bytes] | None = None
    """The path at which it answers processes of its machine too, and what these have to show."""
    door: Door | None = None
    """Where other machines see whether this one is there."""
    files: Sequence[str] = ()
    """Those of its machine to which all goes that it writes."""


def boot() -> str:
    """What identifies this machine from one start of it to the next; where that is not known, this process."""
    known = Path("/proc/sys/kernel/random/boot_id")
    return known.read_text("ascii").strip() if known.exists() else f"{socket.gethostname()} {os.getpid()}"


def free_port() -> int:
    """A port that nobody has at this moment."""
    with socket.socket() as found:
        found.bind(("", 0))
        port: int = found.getsockname()[1]
    return port


class Ask(NamedTuple):
    """A call of an endpoint, or the opening of a stream: all but its arguments."""

    endpoint: str
    key: str
    """The actor, among those that the process hosts."""
    line: str
    """Who calls: calls of one line start in the order of their numbers."""
    number: int
    consumed: bool = True
    """Of a stream: whether the caller takes this rank's values."""
    timed: bool = False
    """Whether the answer says when it ran: `(answer, began, ended)`."""


Arguments: TypeAlias = tuple[tuple[object, ...], Mapping[str, object]]
"""Those by position, and those by name."""
NO_ARGUMENTS: Final[Arguments] = (), {}


class Construction(NamedTuple):
    """An actor to be made."""

    key: str
    attempt: int
    """How many times it was made here before. What was stopped before it arrived is not begun."""
    rank: Rank
    environment: Mapping[str, str]
    recipe: Ref
    """The class, the arguments and the keywords. Unpickled after the environment is set: that may load torch."""


@dataclass(frozen=True)
class Failure:
    """The answer of what raised on the rank."""

    reason: str
    traceback: str
    cause: bytes | None = None
    """The exception, where it can travel."""


class Stopped:
    """The answer of a rank on which the actor is stopped."""


class Over:
    """The answer of a stream that has no more values."""
