"""Actors: plain classes with `@endpoint` methods that a mesh can call."""

import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

F = TypeVar("F", bound=Callable[..., object])
T = TypeVar("T")

_ENDPOINT = "__meshrl_endpoint__"


class Actor:
    """The base of classes that a mesh can run. It has no public attributes that could collide with yours."""


def endpoint(method: F) -> F:
    """Mark an async method or async generator as callable through a mesh. The method itself does not change."""
    setattr(method, _ENDPOINT, True)
    return method


def is_endpoint(method: object) -> bool:
    """True if this function itself is decorated with `@endpoint`."""
    return getattr(method, _ENDPOINT, False) is True


class CollectiveActor(ABC):
    """Mixin for actors whose endpoints run collectives.

    A call runs to its end on all ranks. If its caller is cancelled, the caller is free at once, but the ranks continue:
    if one stopped, the others would wait for it.
    """

    @abstractmethod
    def agree(self, work: Callable[[], T]) -> list[T]:
        """Run `work` on each rank, and return the results of all ranks. If it raises on one rank, all ranks raise."""


def free_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def boot_id() -> str:
    """Identify this machine since its start. If that is unknown, identify this process."""
    known = Path("/proc/sys/kernel/random/boot_id")
    return known.read_text("ascii").strip() if known.is_file() else f"{socket.gethostname()} {os.getpid()}"


@dataclass(frozen=True)
class Rank:
    """The rank that an actor runs on: its place on the mesh, and its resources."""

    index: int = 0
    size: int = 1
    axes: Mapping[str, int] = field(default_factory=lambda: {"dp": 0})
    """The coordinate of this rank on each axis."""
    shape: Mapping[str, int] = field(default_factory=lambda: {"dp": 1})
    """The size of each axis, slowest first."""
    threads: int = field(default_factory=free_cores)
    """CPU threads that this rank may compute with."""
    gpus: float = 0.0
    """GPUs that its mesh asks for, for each rank."""


rank_context: ContextVar[Rank] = ContextVar("meshrl_rank")


def current_rank() -> Rank:
    """Return the rank that this code runs on. Outside a mesh, it is the only rank of a mesh of one, with all cores."""
    return rank_context.get(None) or Rank()
