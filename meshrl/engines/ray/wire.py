"""What the caller and the rank's process of the Ray engine say to each other."""

import asyncio
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias, cast
from weakref import WeakValueDictionary

import ray
from ray import ObjectRef
from ray.exceptions import ObjectLostError

from meshrl.engines.ray.pickling import carry_modules
from meshrl.errors import DataError, MeshStopped
from meshrl.mesh import Rank, Ref


class RayRef(Ref):
    """A value in Ray's object store. In one process there is one such object for it."""

    __slots__ = ("__weakref__", "ref")

    way = "the object store"

    def __init__(self, ref: "ObjectRef[object]") -> None:
        self.ref = ref
        _known[ref.binary()] = self

    @classmethod
    def put(cls, value: object) -> "RayRef":
        """Keep a value; numpy arrays in it are read without a copy on the same machine."""
        if not ray.is_initialized():  # Ray would join whatever cluster it finds
            raise MeshStopped("the engine is closed: nothing can be sent to its ranks any more")
        carry_modules()
        ref: ObjectRef[object] = ray.put(value)
        return cls(ref)

    @classmethod
    async def fetch(cls, held: Sequence[Ref]) -> list[object]:
        """The values, arrays read-only. Raises `DataError` if one is lost."""
        refs = [each.ref for each in cast("Sequence[RayRef]", held)]
        if not ray.is_initialized():
            raise DataError(
                "a column lies on the ranks of an engine that is closed, and is lost: load what is needed before"
            )
        try:
            _, elsewhere = ray.wait(refs, num_returns=len(refs), timeout=0)
            if elsewhere:
                await asyncio.gather(*elsewhere)
            return ray.get(refs)  # what is on this machine is only mapped: faster at once than awaited one by one
        except ObjectLostError as error:
            raise DataError(
                f"a column lies on a rank that has died or was stopped, and is lost ({type(error).__name__}): make the "
                "batch again, or load what is needed later while its ranks live"
            ) from None

    def __reduce__(self) -> tuple[Callable[..., "RayRef"], tuple[object, ...]]:
        return _received, (self.ref,)


_known: WeakValueDictionary[bytes, RayRef] = WeakValueDictionary()


def _received(ref: "ObjectRef[object]") -> RayRef:
    return _known.get(ref.binary()) or RayRef(ref)


class Place(NamedTuple):
    """Where a rank's process is."""

    pid: int
    host: str
    ip: str
    node: str
    """Ray's id of the node."""
    port: int
    """A port that was free there a moment ago."""
    boot: str
    """The machine, since it was started: processes with the same have the same monotonic clock."""


def boot() -> str:
    """What identifies this machine from one start of it to the next; where that is not known, this process."""
    known = Path("/proc/sys/kernel/random/boot_id")
    return known.read_text("ascii").strip() if known.exists() else f"{socket.gethostname()} {os.getpid()}"


CYCLE: Final = 256
"""Numbers of calls that follow one another have different names up to here."""


class Ask(NamedTuple):
    """A call of an endpoint, or the opening of a stream: all but its arguments.

    It travels as the name of Ray's task. As an argument it would make an empty call a fifth slower. Ray keeps some
    kilobytes for each name that it has seen, on both sides, so names come again: a number travels modulo `CYCLE`, where
    the rank knows the rest.
    """

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

    def label(self, *, whole: bool) -> str:
        """The task's name. `whole`: the number may be too far from those that the rank has seen."""
        number = f"={self.number}" if whole else str(self.number % CYCLE)
        return f"{self.endpoint} {self.key} {self.line} {number} {self.consumed:d} {self.timed:d}"

    @classmethod
    def current(cls, whole: Callable[[str, int], int]) -> "Ask":
        """What the task that runs now was asked. `whole`: the number of a line's call, from what is told of it."""
        endpoint, key, line, number, consumed, timed = str(ray.get_runtime_context().get_task_name()).split()
        told = int(number[1:]) if number.startswith("=") else whole(line, int(number))
        return cls(endpoint, key, line, told, consumed == "1", timed == "1")


Arguments: TypeAlias = tuple[tuple[object, ...], Mapping[str, object]]
"""Those by position, and those by name."""


class Construction(NamedTuple):
    """An actor to be made."""

    key: str
    attempt: int
    """How many times it was made here before. What was stopped before it arrived is not begun."""
    rank: Rank
    environment: Mapping[str, str]
    recipe: RayRef
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
