"""The single tree of errors. Each says what happened, where, the numbers, and what to do."""

import asyncio
import difflib
from collections.abc import Iterable, Mapping


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` most likely meant, or None."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return close[0] if close else None


def did_you_mean(name: str, known: Iterable[str], form: str = "{!r}") -> str:
    """`did you mean 'lr'?`, for an error's message; empty where no known name is near. `form`: how that is written."""
    near = nearest(name, known)
    return f"did you mean {form.format(near)}?" if near else ""


def shortened(value: object) -> str:
    """A value as an error shows it, in at most 60 letters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def described(error: BaseException) -> str:
    """`ValueError: what`, in letters that every file holds; also of an error whose own text cannot be made."""
    try:
        text = str(error)
    except (Exception, SystemExit, asyncio.CancelledError) as worse:  # noqa: BLE001 -- a user's class may do anything
        text = f"(its text cannot be made: str() raised {type(worse).__name__})"
    # A half of a surrogate pair is no letter of UTF-8.
    return f"{type(error).__name__}: {text}".encode(errors="backslashreplace").decode()


class MeshrlError(Exception):
    """Any error that meshrl raises on purpose."""


class ConfigError(MeshrlError):
    """A configuration file, key or value is wrong."""


class NoRoom(ConfigError):
    """The machines that are there could not hold a mesh, not even idle."""


class ContractError(MeshrlError):
    """An actor's endpoints, or a call of one, do not fit the mesh."""


class DataError(MeshrlError):
    """A batch, a column or a data file is not what it should be."""


class DataLost(DataError):
    """What a rank made and kept, such as a column of a batch, has gone with its process or its host."""

    def __init__(self, where: str, reason: str, what: str = "what a rank made") -> None:
        self.where = where
        self.reason = reason
        self.what = what
        super().__init__(
            f"{what} lay on {where} and is lost: {reason}; make the batch again, or load what is needed later while "
            "its ranks live"
        )

    def __reduce__(self) -> tuple[type["DataLost"], tuple[object, ...]]:
        return DataLost, (self.where, self.reason, self.what)


def is_lost(error: BaseException | None) -> bool:
    """Whether it is `DataLost`, here or on a rank that asked for the data."""
    return isinstance(error, DataLost) or (isinstance(error, RankFailed) and is_lost(error.__cause__))


class ModelError(MeshrlError):
    """A model folder or file cannot be used."""


class EngineDied(ModelError):
    """What an actor computes with has ended, such as an inference engine's process: a `respawn` makes another."""


class BackendError(MeshrlError):
    """A backend is unknown, not installed, or has no such role."""


class MeshStopped(MeshrlError):
    """A call to an actor whose mesh has stopped."""


class CallTimeout(MeshrlError):
    """A call, or a stream's next value, took longer than the role's `timeout`."""


class ReplicasDisagree(MeshrlError):
    """Ranks that must return the same value did not."""


class RankFailed(MeshrlError):
    """An endpoint (or a constructor: endpoint `__init__`) raised on a rank.

    `__cause__` is the exception itself where it could be carried; `traceback` is the rank's own, as text.
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
    """The process of a rank is gone; calls on it are refused until `respawn`.

    `written` has the last lines that it wrote, where the run keeps them.
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
            f"calls on it fail until it is made again with `await respawn(...)`{written and chr(10)}{written}"
        )

    def __reduce__(self) -> tuple[type["RankDied"], tuple[object, ...]]:
        told = (self.actor, self.rank, self.axes, self.endpoint, self.pid, self.host, self.reason, self.written)
        return RankDied, told
