"""The errors of meshrl. Each says what happened, where, the numbers, and what to do."""

import asyncio
import difflib
import os
import re
from collections.abc import Iterable, Mapping
from errno import EDQUOT, EMFILE, ENFILE, ENOMEM, ENOSPC, errorcode
from pathlib import Path
from traceback import walk_tb
from typing import Final, cast

_NO_ROOM: Final = (ENOSPC, EDQUOT, EMFILE, ENFILE, ENOMEM)
_TEXTS: Final = "|".join(
    (
        *map(os.strerror, _NO_ROOM),
        "can't start new thread",
        "No usable temporary directory",
        "Cannot fork",
        "fork: Resource temporarily",
        "fork: retry",
    )
)
_PYTHONS: Final = ("can't start new thread", "[Errno 2] No usable temporary directory")
"""How errors of Python begin in such cases, which have no number for it."""
_NO_ROOM_TOLD: Final = re.compile(rf"\b(?:{'|'.join(map(errorcode.__getitem__, _NO_ROOM))})\b|(?i:{_TEXTS})")
"""Matches what programs and libraries say in such cases."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that `name` most likely meant, or None."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return close[0] if close else None


def did_you_mean(name: str, known: Iterable[str], form: str = "{!r}") -> str:
    """Return `did you mean 'lr'?` for an error message, or "" if no known name is near. `form`: format of the name."""
    near = nearest(name, known)
    return f"did you mean {form.format(near)}?" if near else ""


def shortened(value: object) -> str:
    """Return a value as an error message shows it, in at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def described(error: BaseException) -> str:
    """Return `ValueError: message` in characters that every file can hold, even if the error's message raises."""
    try:
        text = str(error)
    except (Exception, SystemExit, asyncio.CancelledError) as worse:  # noqa: BLE001 -- a user's class may do anything
        text = f"(its text cannot be made: str() raised {type(worse).__name__})"
    # UTF-8 cannot encode half a surrogate pair.
    return f"{type(error).__name__}: {text}{unset_variable(error)}".encode(errors="backslashreplace").decode()


_LOOK_UPS: Final = (type(os.environ).__getitem__.__code__, type(os.environ).__delitem__.__code__)


def unset_variable(error: BaseException) -> str:
    """Return what to do about a KeyError of `os.environ`, as a sentence in brackets. "" for any other error."""
    if not isinstance(error, KeyError) or not any(
        frame.f_code in _LOOK_UPS for frame, _ in walk_tb(error.__traceback__)
    ):
        return ""
    return (
        " (the environment of this process has no such variable: set it where the run is started, and name it in "
        "run.environment, which carries it to ranks on a cluster)"
    )


class MeshrlError(Exception):
    """Any error that meshrl raises on purpose."""


class ConfigError(MeshrlError):
    """A configuration file, key or value is wrong."""


class NoRoom(ConfigError):
    """The available machines could not hold a mesh even if they were idle."""


class OtherVersions(ConfigError):
    """A machine has other versions of packages than the controller."""


class ContractError(MeshrlError):
    """An actor's endpoint, or a call of it, does not fit the mesh."""


class DataError(MeshrlError):
    """A batch, a column or a data file is not as it should be."""


class DataLost(DataError):
    """Data that a rank kept, such as a column of a batch, was lost with its process or its host."""

    def __init__(self, where: str, reason: str, what: str = "what a rank made") -> None:
        self.where = where
        self.reason = reason
        self.what = what
        super().__init__(
            f"{what} cannot be read from {where}: {reason}. Make the batch again, or load what you need later while "
            "its ranks live"
        )

    def __reduce__(self) -> tuple[type["DataLost"], tuple[object, ...]]:
        return DataLost, (self.where, self.reason, self.what)


def is_lost(error: BaseException | None) -> bool:
    """True for `DataLost`, raised here or on a rank that fetched the data."""
    return isinstance(error, DataLost) or (isinstance(error, RankFailed) and is_lost(error.__cause__))


class Damaged(DataError):
    """A file of a checkpoint is not as it was written."""


def damage_of(error: BaseException | None) -> Damaged | None:
    """Return the `Damaged` that was raised here or on a rank. None for any other error."""
    if isinstance(error, RankFailed):
        return damage_of(error.__cause__)
    return error if isinstance(error, Damaged) else None


class SetAside(DataError):
    """The checkpoint that a run resumed from is damaged and was set aside. The run can resume from an earlier one."""


class ModelError(MeshrlError):
    """A model folder or file cannot be used."""


class EngineDied(ModelError):
    """An actor's backend process has ended, such as an inference engine. `respawn` starts another."""


class Discard(MeshrlError):
    """Raised by a user's code to discard its episode or row. The reward is unknown, whatever `errors` says."""


class MachineFault(MeshrlError):
    """The machine had no space, files, processes, memory or container for a user's code, however often it was tried."""


class SandboxError(MeshrlError):
    """A sandbox has ended before its episode, or a file of it cannot be read or written."""


def reports_no_space(text: str) -> bool:
    """True if a program says that the machine had no space, files, processes or memory for it."""
    return _NO_ROOM_TOLD.search(text) is not None


def is_of_machine(error: BaseException) -> bool:
    """True for an exception that came of a lack of space, files, processes or memory on the machine."""
    return any(
        isinstance(each, MachineFault)
        or (isinstance(each, OSError) and each.errno in _NO_ROOM)
        or (isinstance(each, BlockingIOError) and _is_of_start(each))
        or (isinstance(each, OSError | RuntimeError) and str(each).startswith(_PYTHONS))
        for each in causes_of(error)
    )


def _is_of_start(error: BaseException) -> bool:
    """True if a process could not be started. A lock or a socket raises the same error."""
    names = {Path(frame.f_code.co_filename).name for frame, _ in walk_tb(error.__traceback__)}
    return bool(names & {"subprocess.py", "popen_fork.py"})


def is_unknown(error: BaseException) -> bool:
    """True for an exception after which a reward is unknown, whatever `errors` says.

    It is discarded, a fault of the machine, or its text says so. The text may also be what a model wrote.
    """
    causes = (each for each in causes_of(error) if isinstance(each, OSError | RuntimeError))
    return is_discarded(error) or is_of_machine(error) or any(reports_no_space(described(each)) for each in causes)


def is_discarded(error: BaseException) -> bool:
    """True for an exception after which a reward is unknown, whatever `errors` says: `Discard`, or `sys.exit(75)`."""
    return any(
        isinstance(each, Discard) or (isinstance(each, SystemExit) and each.code == os.EX_TEMPFAIL)
        for each in causes_of(error)
    )


def causes_of(error: BaseException) -> Iterable[BaseException]:
    """Return an exception, those in its group, and those that they came of on this rank."""
    found: list[BaseException] = []
    left: list[BaseException | None] = [error]
    while left:
        each = left.pop()
        if each is None or any(each is known for known in found):
            continue
        found.append(each)
        if not isinstance(each, RankFailed):
            left.append(each.__cause__ or (None if each.__suppress_context__ else each.__context__))
        if isinstance(each, BaseExceptionGroup):
            left.extend(cast("Iterable[BaseException]", each.exceptions))
    return found


class BackendError(MeshrlError):
    """A backend is unknown, not installed, or has no such role."""


class MeshStopped(MeshrlError):
    """A call to an actor whose mesh has stopped."""


class CallTimeout(MeshrlError):
    """A call, or the next value of a stream, took longer than the role's `timeout`."""


class ReplicasDisagree(MeshrlError):
    """Ranks returned different values where they must agree."""


class RankFailed(MeshrlError):
    """An endpoint, or a constructor (endpoint `__init__`), raised on a rank.

    `__cause__` is the exception itself if it could be sent. `traceback` is the rank's traceback, as text.
    """

    def __init__(
        self, actor: str, rank: int, axes: Mapping[str, int], endpoint: str, reason: str, traceback: str
    ) -> None:
        self.actor = actor
        self.rank = rank
        self.axes: dict[str, int] = dict(axes)
        self.endpoint = endpoint
        self.reason = reason
        self.traceback = traceback
        where = ", ".join(f"{axis}={index}" for axis, index in axes.items())
        super().__init__(
            f"{actor}.{endpoint} on rank {rank} ({where}) failed: {reason}\n"
            f"--- traceback of rank {rank} ---\n{traceback.rstrip()}"
        )

    def __reduce__(self) -> tuple[type["RankFailed"], tuple[object, ...]]:
        return RankFailed, (self.actor, self.rank, self.axes, self.endpoint, self.reason, self.traceback)


class RankDied(MeshrlError):
    """The process of a rank has died. Calls on it are refused until `respawn`.

    `written` holds the last lines of its output, if the run keeps them.
    """

    def __init__(
        self,
        actor: str,
        rank: int,
        axes: Mapping[str, int],
        endpoint: str,
        pid: int,
        host: str,
        reason: str,
        written: str = "",
    ) -> None:
        self.actor = actor
        self.rank = rank
        self.axes: dict[str, int] = dict(axes)
        self.endpoint = endpoint
        self.pid = pid
        self.host = host
        self.reason = reason
        self.written = written
        where = ", ".join(f"{axis}={index}" for axis, index in axes.items())
        super().__init__(
            f"{actor}.{endpoint} on rank {rank} ({where}) failed: its process {pid} on {host} died: {reason}; "
            f"calls on it fail until `await respawn(...)` has replaced it{written and chr(10)}{written}"
        )

    def __reduce__(self) -> tuple[type["RankDied"], tuple[object, ...]]:
        arguments = (self.actor, self.rank, self.axes, self.endpoint, self.pid, self.host, self.reason, self.written)
        return RankDied, arguments
