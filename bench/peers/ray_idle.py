"""Bare Ray's contestant in bench/calls.py: async actors that do nothing, on the caller's cluster."""

import asyncio
import os
from collections.abc import Awaitable, Sequence
from typing import Protocol, cast

import ray


class BareIdle:
    """The same as `Idle`, as an async Ray actor."""

    async def nothing(self) -> None:
        """No argument, no result."""

    async def pid(self) -> int:
        """Return its process id."""
        return os.getpid()

    async def wait(self) -> None:
        """Wait forever."""
        await asyncio.Event().wait()


class BareMethod(Protocol):
    """A method of a Ray actor."""

    def remote(self) -> Awaitable[object]:
        """Send a call."""
        ...


class BareHandle(Protocol):
    """Ray's handle of a `BareIdle`."""

    nothing: BareMethod
    pid: BareMethod
    wait: BareMethod


def bare_actors(count: int) -> list[BareHandle]:
    """Start async Ray actors that reserve no core."""
    made = ray.remote(BareIdle).options(num_cpus=0, max_concurrency=1000)
    return [cast("BareHandle", made.remote()) for _ in range(count)]


async def everyone(methods: Sequence[BareMethod]) -> None:
    """Call each actor once."""
    await asyncio.gather(*(method.remote() for method in methods))
