"""The requests of each model in the order of their numbers, each once, and turns between tenants.

A client numbers the requests of a model from 1; 0 made the model. They may come in any order, and again after a lost
connection. A request is in the journal before it has a place here. It is applied when all before it have been, and its
result stays until two states later, and if it has not been told, for longer: the newest of those, in memory.
"""

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import Final, NamedTuple, TypeAlias

from meshrl import log
from meshrl.errors import DataError, described
from meshrl.tinker.journal import Answered, Asked, Journal, Place, packed, record_at
from meshrl.tinker.requests import OptimStep, Pass, Request
from meshrl.tinker.results import Failure, Result
from meshrl.tinker.rows import Size, size_of

_UNTOLD_BYTES: Final = 1 << 24
"""Size of the results of a model that are kept for longer because nobody has asked for them."""
_AGAIN: Final = 1.0
"""Seconds until it is tried again to write a result that the disk did not take."""


class Conflict(DataError):
    """Two different requests of a model have the same number."""


class Busy(DataError):
    """There is no room for another request now."""


@dataclass(eq=False)
class Pending:
    """A request that waits for its turn."""

    number: int
    request: Request
    nbytes: int
    received: float = field(default_factory=time.time)
    """Unix seconds."""

    @cached_property
    def size(self) -> Size:
        """Its rows and tokens."""
        return size_of(self.request)

    @property
    def cost(self) -> int:
        """The tokens that it reads, or the rows if they are texts, at least 1."""
        return max(1, *self.size)


class ModelQueue:
    """The requests of one model."""

    def __init__(self, model: str, tenant: str, journal: Journal, room: "Room") -> None:
        self.model: Final = model
        self.tenant: Final = tenant
        self.journal: Final = journal
        self.next: int = 0
        """The number of the request whose turn it is."""
        self.state: int = -1
        """The number of the last request in the newest state on disk. -1 before there is one."""
        self.accumulating = False
        """True if gradients wait for a step, so that no state can be written."""
        self.changing = False
        """True while a request changes the model in the trainer: if it fails, nobody knows how far it came."""
        self.steps: int = 0
        """Optimizer steps since that state."""
        self.closed: bool = False
        """True if the client is done with the model, which no longer counts for its tenant."""
        self._room = room
        self._waiting: dict[int, Pending] = {}
        self._digests: dict[int, bytes] = {}
        """By number, of the requests since the state before the newest."""
        self._results: dict[int, Place] = {}
        self._told: set[int] = set()
        self._untold: dict[int, tuple[Result, int]] = {}
        """Results that nobody has asked for, with their bytes, of requests whose records have been removed."""
        self._done: dict[int, asyncio.Event] = {}
        self._begun: Pending | None = None

    def restore(self, state: int) -> None:
        """Read the journal after a restart, and continue behind the requests whose results are known."""
        self.state = state
        asked: dict[int, Pending] = {}
        for record, place in self.journal.records():
            if isinstance(record, Asked):
                asked[record.number] = Pending(record.number, record.request, place.size)
                self._digests[record.number] = _digest(packed(record))
            else:
                self._results[record.number] = place
        self.next = state + 1
        while self.next in asked and self.next in self._results:
            self.next += 1
        for number, pending in asked.items():
            if number >= self.next:
                self._waiting[number] = pending
                self._room.take(self.tenant, pending.nbytes, known=True)

    def applied(self) -> list[Pending]:
        """Return the requests since the newest state that succeeded, from the journal.

        What a request that failed did to the model was undone, and its client may have sent it again.
        """
        asked, succeeded = self._recorded(self.state)
        if not asked.keys() >= succeeded:  # a kill cut off the beginning of the newest file
            asked, succeeded = self._recorded(-1)
        return [asked[number] for number in range(self.state + 1, self.next) if number in succeeded]

    def _recorded(self, state: int) -> tuple[dict[int, Pending], set[int]]:
        asked: dict[int, Pending] = {}
        succeeded: set[int] = set()
        for record, _ in self.journal.records(state):
            if isinstance(record, Asked):
                asked[record.number] = Pending(record.number, record.request, 0)
            elif not isinstance(record.result, Failure):
                succeeded.add(record.number)
        return asked, succeeded

    def add(self, number: int, request: Request) -> bool:
        """Take a request. Returns False if it is a repetition.

        Raises Conflict if another one has its number, Busy if there is no room, and DataError if it cannot be kept.
        """
        record = packed(Asked(number, request))
        digest = _digest(record)
        known = self._digests.get(number)
        if known is not None and known != digest:
            raise Conflict(
                f"request {number} of {self.model} came before with other content: each number is one request"
            )
        if known is not None or number < self.next:
            return False
        # The one that the others wait for is always let in.
        self._room.take(self.tenant, len(record), known=number == self.next)
        try:
            self.journal.add(record)
        except OSError:
            self._room.give(self.tenant, len(record))
            raise
        self._digests[number] = digest
        self._waiting[number] = Pending(number, request, len(record))
        return True

    @property
    def ready(self) -> Pending | None:
        """The request whose turn it is. None if it has not come, or another one is being applied."""
        return None if self._begun else self._waiting.get(self.next)

    def take(self) -> Pending:
        """Begin with the request whose turn it is."""
        pending = self._begun = self._waiting[self.next]
        return pending

    @property
    def is_idle(self) -> bool:
        """True if no request waits."""
        return not self._waiting

    @property
    def is_begun(self) -> bool:
        """True while a request is being applied, or its result cannot be written."""
        return self._begun is not None

    def finish(self, pending: Pending, result: Result) -> None:
        """Keep the result of the request that was begun, and wake who waits for it.

        If it cannot be written, OSError, and the request stays begun: its result must not be told before.
        """
        self._results[pending.number] = self.journal.add(packed(Answered(pending.number, result)))
        del self._waiting[pending.number]
        self._begun = None
        self.next = pending.number + 1
        self._room.give(self.tenant, pending.nbytes)
        if done := self._done.pop(pending.number, None):
            done.set()

    def leave(self) -> None:
        """Count no more for the tenant until it is used again, and forget the requests behind one that has not come.

        Its client has finished, or gives no sign any more.
        """
        self.closed = True
        last = self.next
        while last in self._waiting:
            last += 1
        for number in [each for each in self._waiting if each > last]:
            self._room.give(self.tenant, self._waiting.pop(number).nbytes)
            self._digests.pop(number)
            if done := self._done.pop(number, None):
                done.set()

    def stored(self, state: int) -> None:
        """Note that a state with all requests up to this number is on disk. The journal continues in a new file."""
        before = self.state
        leaving = [each for each in self._digests if each <= before]
        for number in leaving:
            self._keep_untold(number)
        waiting = (packed(Asked(number, self._waiting[number].request)) for number in sorted(self._waiting))
        self.journal.begin(state, before, waiting)
        self.state, self.steps = state, 0
        for number in leaving:
            self._digests.pop(number)
            self._results.pop(number, None)
            self._told.discard(number)

    def _keep_untold(self, number: int) -> None:
        place = self._results.get(number)
        record = record_at(place) if place is not None and number not in self._told else None
        if place is not None and isinstance(record, Answered):
            self._untold[number] = record.result, place.size
        while sum(size for _, size in self._untold.values()) > _UNTOLD_BYTES:
            del self._untold[next(iter(self._untold))]

    def has(self, number: int) -> bool:
        """True if a request is known and its result is here, or will be."""
        return number in self._results or number in self._waiting or number in self._untold

    async def result(self, number: int, seconds: float) -> Result | None:
        """Return the result of a request, once it is there. None if it is not after some seconds."""
        if number in self._waiting:
            done = self._done.setdefault(number, asyncio.Event())
            try:
                async with asyncio.timeout(seconds):
                    await done.wait()
            except TimeoutError:
                return None
        if number in self._untold:
            return self._untold[number][0]
        self._told.add(number)
        record = record_at(self._results[number]) if number in self._results else None
        return record.result if isinstance(record, Answered) else Failure("the result has been removed", "server")


def _digest(record: bytes) -> bytes:
    return hashlib.blake2b(record, digest_size=16).digest()


class Room:
    """The requests and bytes that wait, of all tenants and of each."""

    def __init__(self, requests: int, nbytes: int, of_tenant: Callable[[str], int], share: float = 1.0) -> None:
        """`of_tenant`: the most requests of a tenant. `share`: the part of the bytes that one may have."""
        self._requests, self._nbytes, self._of_tenant = requests, nbytes, of_tenant
        self._most_bytes = int(nbytes * share)
        self._used: dict[str, int] = {}
        self._bytes_of: dict[str, int] = {}
        self._bytes = 0

    def take(self, tenant: str, nbytes: int, *, known: bool = False) -> None:
        """Take room for a request. Busy if there is none. `known`: it is let in all the same."""
        used, mine = self._used.get(tenant, 0), self._bytes_of.get(tenant, 0)
        if not known:
            if used >= self._of_tenant(tenant):
                raise Busy(f"{used} requests of this key wait, which is the most: try again")
            if sum(self._used.values()) >= self._requests:
                raise Busy(f"{self._requests} requests wait, which is the most (requests): try again")
            if mine and mine + nbytes > self._most_bytes:
                raise Busy(
                    f"requests of {mine} bytes of this key wait, and it has no room for {nbytes} more: try again"
                )
            if self._bytes and self._bytes + nbytes > self._nbytes:
                raise Busy(f"requests of {self._bytes} bytes wait, and there is no room for {nbytes} more: try again")
        self._used[tenant], self._bytes_of[tenant] = used + 1, mine + nbytes
        self._bytes += nbytes

    def give(self, tenant: str, nbytes: int) -> None:
        """Give the room of a request back."""
        self._used[tenant] -= 1
        self._bytes_of[tenant] -= nbytes
        self._bytes -= nbytes


class Turns:
    """Whose turn it is: that of the tenant who was served the fewest tokens.

    One who comes back after a pause is not owed what he left to others.
    """

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._active: set[str] = set()

    def choose(self, tenants: Iterable[str]) -> str | None:
        """Return the tenant of these who is to be served. None if there are none."""
        waiting = set(tenants)
        least = min((self._served.get(each, 0.0) for each in self._active & waiting), default=0.0)
        for tenant in waiting - self._active:
            self._served[tenant] = max(self._served.get(tenant, 0.0), least)
        self._active = waiting
        return min(sorted(waiting), key=lambda each: self._served.get(each, 0.0), default=None)

    def charge(self, tenant: str, tokens: int) -> None:
        """Count what a tenant was served."""
        self._served[tenant] = self._served.get(tenant, 0.0) + tokens


Turn: TypeAlias = tuple[ModelQueue, Pending]
"""A request whose turn it is."""


class _Done(NamedTuple):
    """A request that was applied, with its result."""

    queue: ModelQueue
    pending: Pending
    result: Result


_GATHER: Final = 0.003
"""Seconds that a request waits at most for those of other models that could be applied with it."""


class Worker:
    """Applies the requests of all models. Rows of several models with the same loss share a call, and so do steps."""

    def __init__(self, apply: Callable[[Sequence[Turn]], Awaitable[Sequence[Result]]], together: int) -> None:
        """`together`: models whose rows go together, at most."""
        self._apply, self._together = apply, together
        self._queues: dict[str, ModelQueue] = {}
        self._turns = Turns()
        self._more = asyncio.Event()
        self._applied: dict[str, float] = {}
        """Monotonic seconds at which each model's last request was applied."""

    def add(self, queue: ModelQueue) -> None:
        """Serve a queue from now on."""
        self._queues[queue.model] = queue
        self._more.set()

    def remove(self, queue: ModelQueue) -> None:
        """Serve a queue no more."""
        del self._queues[queue.model]
        self._applied.pop(queue.model, None)

    def wake(self) -> None:
        """Look for requests."""
        self._more.set()

    async def run(self, after: Callable[[ModelQueue], Awaitable[None]]) -> None:
        """Apply requests until this is cancelled, or the server itself fails. `after`: called between two requests."""
        unkept: list[_Done] = []
        while True:
            self._more.clear()
            if self._together > 1:
                await self._gather()
            group = self._next()
            if group:
                results = await self._apply(group)
                done = [_Done(*turn, result) for turn, result in zip(group, results, strict=True)]
                self._applied.update(dict.fromkeys((queue.model for queue, _ in group), time.monotonic()))
                for queue, pending in group:
                    self._turns.charge(queue.tenant, pending.cost)
            else:
                done = []
                with suppress(TimeoutError):
                    async with asyncio.timeout(_AGAIN if unkept else None):
                        await self._more.wait()
            tried, unkept = [*unkept, *done], []
            kept: list[ModelQueue] = []
            for each in tried:
                try:
                    each.queue.finish(each.pending, each.result)
                    kept.append(each.queue)
                except OSError as error:
                    unkept.append(each)
                    if each in done:
                        log.warning(
                            f"the result of request {each.pending.number} of {each.queue.model} cannot be written, and "
                            "waits until it can: make room on the disk of tinker.folder",
                            error=described(error),
                        )
            for queue in kept:
                await after(queue)

    async def _gather(self) -> None:
        """Wait a moment for models that had a request since a ready one had its last, so that they share a call."""
        ready = [self._applied.get(model, inf) for model, queue in self._queues.items() if queue.ready]
        active = [self._queues[model] for model, applied in self._applied.items() if ready and applied >= min(ready)]
        with suppress(TimeoutError):
            async with asyncio.timeout(_GATHER):
                while not all(queue.ready for queue in active):
                    self._more.clear()
                    await self._more.wait()

    def _next(self) -> list[Turn]:
        """Begin with the request whose turn it is, and with those of other models that can go with it."""
        ready = [queue for queue in self._queues.values() if queue.ready]
        tenant = self._turns.choose({queue.tenant for queue in ready})
        if tenant is None:
            return []
        ready.sort(key=lambda each: (each.tenant != tenant, _since(each)))
        group = [(ready[0], ready[0].take())]
        kind = _kind_of(group[0][1].request)
        for queue in ready[1:]:
            if (
                kind is not None
                and len(group) < self._together
                and queue.ready
                and _kind_of(queue.ready.request) == kind
            ):
                group.append((queue, queue.take()))
        return group


def _kind_of(request: Request) -> Hashable:
    """Return what requests that can be applied together have in common. None: this one is applied alone."""
    if isinstance(request, Pass) and request.backward:
        return request.loss, frozenset(request.config.items())
    return OptimStep if isinstance(request, OptimStep) else None


def _since(queue: ModelQueue) -> float:
    return queue.ready.received if queue.ready else 0.0
