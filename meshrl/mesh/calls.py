"""Running calls of this process: their events, and which ranks have not answered for long."""

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from itertools import count
from types import TracebackType
from typing import Final, Protocol, Self, TypeVar, cast

import numpy as np

from meshrl.errors import CallTimeout
from meshrl.events import Call, Sink, Span, clock
from meshrl.mesh.engine import Member
from meshrl.mesh.sharding import Rows

R = TypeVar("R")

_SHOWN: Final = 3
"""Ranks that are named at most."""
_numbers: Final = count()
_open: Final[set["Waiting"]] = set()
_longest: Final[dict[str, float]] = {}
"""Longest time in seconds that a call of each endpoint has taken so far."""


class Waiting:
    """A running call, a stream's next value, or work of this process itself, which has no members."""

    def __init__(self, where: str, members: Sequence[Member]) -> None:
        """`where`: the actor and the endpoint. `members`: the ranks that were called."""
        self.where = where
        self._members = members
        self._ended: set[int] = set()
        self.since: float = 0.0
        self._reported = 0.0
        """Seconds after which `slow` reported the call."""

    async def until(self, answer: Awaitable[R], timeout: float | None) -> R:  # noqa: ASYNC109 -- a role has it
        """Await an answer. Raises `CallTimeout` after `timeout` seconds."""
        limit = asyncio.timeout(timeout)
        try:
            with self.running():
                async with limit:
                    return await answer
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise CallTimeout(
                f"{self.where} has not answered within timeout = {timeout:g} s: {self.ranks} may still be running. "
                "Find out what that process does, or raise the role's timeout if this is normal"
            ) from error

    @contextmanager
    def running(self) -> Generator[None]:
        """Count it as running inside the block."""
        self.since, self._reported = time.monotonic(), 0.0
        _open.add(self)
        try:
            yield
        finally:
            _open.discard(self)
            _longest[self.where] = max(_longest.get(self.where, 0.0), time.monotonic() - self.since)

    def answered(self, number: int) -> None:
        """Note that one of the ranks has ended. Any thread may call it."""
        self._ended.add(number)

    @property
    def ranks(self) -> str:
        """Name the ranks that have not answered, and their processes."""
        left = [member for number, member in enumerate(self._members) if number not in self._ended]
        shown = ", ".join(f"rank {member.rank.index} ({member.place})" for member in left[:_SHOWN])
        return shown + (f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else "")

    def slow(self, after: float) -> str | None:
        """Describe a call that has run for `after` seconds, and again each time that has doubled. Otherwise None."""
        seconds = time.monotonic() - self.since
        if seconds < max(after, 2 * self._reported, 2 * _longest.get(self.where, 0.0)):
            return None
        self._reported = seconds
        on = f" on {self.ranks}" if self._members else ""
        return f"{self.where}{on} has been running for {seconds:.0f} s"


def slow_calls(after: float) -> Iterator[str]:
    """Yield a sentence for each call of this process that has run for `after` seconds, twice as long, and so on.

    An endpoint that was slow before is reported once it takes twice as long.
    """
    for waiting in list(_open):
        if message := waiting.slow(after):
            yield message


def running_calls() -> list[tuple[str, str, float]]:
    """List this process's running calls: actor and endpoint, the ranks that have not answered, and seconds."""
    now = time.monotonic()
    return [(waiting.where, waiting.ranks, now - waiting.since) for waiting in list(_open)]


def own_place() -> str:
    """Name this process, for messages."""
    return f"process {os.getpid()} on {socket.gethostname()}"


class Observation:
    """Emits a `Call` when the block ends, and a `Span` for each rank that says when it ran."""

    def __init__(
        self, to: Sink, mesh: str, actor: str, endpoint: str, members: Sequence[Member], arguments: Iterable[object]
    ) -> None:
        """`members`: the ranks that are called, in the order of the requests."""
        self._to = to
        self._mesh, self._actor, self._endpoint, self._members = mesh, actor, endpoint, members
        self._id = next(_numbers)
        batches = [batch for batch in map(_batch, arguments) if batch is not None]
        tokens = [int(batch.lengths.sum()) for batch in batches if _has_tokens(batch)]
        self._rows = sum(map(len, batches)) if batches else None
        self._tokens = sum(tokens) if tokens else None
        self._began = to.now()
        self._start = clock() - self._began
        self.waiting: Waiting = Waiting(f"{actor}.{endpoint}", members)

    def __call__(self, number: int, began: float, ended: float) -> None:
        """Record when a request ran on its rank, as the engine's `OnSpan`."""
        self.waiting.answered(number)
        rank, began, ended = self._members[number].rank.index, began - self._start, ended - self._start
        self._to.emit(Span(self._id, self._mesh, rank, self._actor, self._endpoint, began, ended))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Leaving a stream early is not a failure.
        failed = None if kind is None or kind is GeneratorExit else kind.__name__
        ended = clock() - self._start
        self._to.emit(Call(self._id, self._actor, self._endpoint, self._began, ended, self._rows, self._tokens, failed))


class _Batch(Sized, Protocol):
    """The part of `Batch` that is read here. `Batch` itself lies above this module."""

    @property
    def lengths(self) -> Rows: ...

    @property
    def stored(self) -> Mapping[str, object]: ...


def _batch(value: object) -> _Batch | None:
    """Return the value if it is a batch. Values without a length, such as handles, are not asked for attributes."""
    columns: object = getattr(value, "stored", None) if isinstance(value, Sized) else None
    return cast("_Batch", value) if isinstance(columns, Mapping) else None


def _has_tokens(batch: _Batch) -> bool:
    """True if any column holds tokens. Without one, `lengths` is 1 for each row."""
    return any(isinstance(getattr(column, "lengths", None), np.ndarray) for column in batch.stored.values())
