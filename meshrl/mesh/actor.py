"""Actors: plain classes whose `@endpoint` methods a mesh may call."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TypeVar

F = TypeVar("F", bound=Callable[..., object])
T = TypeVar("T")

_ENDPOINT = "__meshrl_endpoint__"


class Actor:
    """Base of what a mesh can run. It has no public attributes, so nothing collides with yours."""


def endpoint(method: F) -> F:
    """Mark an async method (or async generator) as callable through a mesh. It changes nothing else."""
    setattr(method, _ENDPOINT, True)
    return method


def is_endpoint(method: object) -> bool:
    """Whether `@endpoint` stands on this very function."""
    return getattr(method, _ENDPOINT, False) is True


class CollectiveActor(ABC):
    """Base, beside its role, of an actor whose ranks wait for each other, as in collectives.

    A call that was sent runs to its end on all of them. If its caller is cancelled, he is free at once and the ranks go
    on: one that left would keep the others waiting.
    """

    @abstractmethod
    def agree(self, work: Callable[[], T]) -> list[T]:
        """Do some work on each rank; what it gives on all of them. Where it raises on one, all raise."""


def free_cores() -> int:
    """The CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class Rank:
    """Where an actor runs: its place on the mesh and what it may use there."""

    index: int = 0
    size: int = 1
    axes: Mapping[str, int] = field(default_factory=lambda: {"dp": 0})
    """This rank's coordinate on each axis."""
    shape: Mapping[str, int] = field(default_factory=lambda: {"dp": 1})
    """The size of each axis, slowest first."""
    threads: int = field(default_factory=free_cores)
    """CPU threads granted to this rank's numerics."""


rank_context: ContextVar[Rank] = ContextVar("meshrl_rank")


def current_rank() -> Rank:
    """The rank that this code runs on. Outside a mesh: the only rank of a mesh of one, with all cores."""
    return rank_context.get(None) or Rank()
