"""Files by which a running run and its observers talk: `now.json`, and requests in `control/`."""

import stat
from pathlib import Path
from typing import Final, Literal, TypeAlias

import msgspec

NOW: Final = "now.json"
"""File in the folder of a running run: a `Now`, rewritten each second and removed at the run's end."""
LOOKS: Final = 1.0
"""Longest time between two looks, in seconds."""
Command: TypeAlias = Literal["pause", "resume", "checkpoint", "stop"]

PAUSED: Final = "the end of a pause"
"""What a paused script waits for."""
CONTROL: Final = "control"
"""Folder of the requests, which are files."""
REQUESTS: Final = ("pause", "checkpoint", "stop")


class Waits(msgspec.Struct, frozen=True):
    """A task that waits: `trainer` for `a batch`, `3 of 64 groups are ready`."""

    who: str
    what: str
    on: str
    seconds: float
    """Seconds so far."""


class Runs(msgspec.Struct, frozen=True):
    """A running call: `Policy.update` on `rank 0 (...)`."""

    where: str
    ranks: str
    seconds: float
    """Seconds so far."""


class Now(msgspec.Struct, frozen=True):
    """The state of a run at one moment."""

    at: float
    """Seconds since its start."""
    waits: list[Waits]
    calls: list[Runs]


def ask(run: Path, command: Command) -> None:
    """Send a request to a run, by its folder. The run carries it out before its next step. OSError if writing fails."""
    folder = run / CONTROL
    folder.mkdir(exist_ok=True)
    if command == "resume":
        (folder / "pause").unlink(missing_ok=True)
    else:
        (folder / command).touch()


def asked(run: Path) -> list[str]:
    """Return the open requests to a run."""
    return [each for each in REQUESTS if requested_at(run / CONTROL / each)]


def requested_at(file: Path) -> int:
    """Return when a request was written, in nanoseconds. 0 if there is no readable request."""
    try:
        found = file.stat()
    except OSError:
        return 0
    return found.st_mtime_ns if stat.S_ISREG(found.st_mode) else 0
