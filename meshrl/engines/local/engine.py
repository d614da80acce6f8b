"""The local engine: ranks are threads of this process, each with its own event loop.

Torch releases the interpreter lock while it computes, so two meshes do work at the same time. Nothing is shared by
accident: values that pass between caller and rank are immutable (such as a `Batch`) or copied.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import cast

import numpy as np

from meshrl.data import Column, frozen, private
from meshrl.engines.local.rank_thread import LocalCall, LocalMember, LocalSlot, Receiver, Turns, answer
from meshrl.engines.ranks import check_count, isolated
from meshrl.errors import ConfigError, MeshStopped
from meshrl.mesh import INLINE_BYTES, Member, OnSpan, Rank, Ref, Request, Resources, Slot, free_cores, put_large


class LocalRef(Ref):
    """A value that ranks of this process share. It is not copied, because nobody can write to it."""

    def __init__(self, value: object) -> None:
        self.value: object = value
        if isinstance(value, np.ndarray) and (value.flags.writeable or not value.flags.owndata):
            self.value = frozen(value.copy())
        elif type(value) is dict:  # columns
            self.value = {name: private(column) for name, column in cast("dict[str, Column]", value).items()}

    @classmethod
    async def fetch(cls, held: Sequence[Ref]) -> list[object]:
        """Return the values. Mutable Python values are copied when a column is put together."""
        return [each.value for each in cast("Sequence[LocalRef]", held)]


class LocalEngine:
    """The engine whose ranks are threads of this process.

    `cores` is the number of CPU cores for all meshes together. `inline_bytes`: see `Engine`. With `isolates = False`
    arguments and results are not copied, for actors that never write to their arguments.
    """

    def __init__(
        self, cores: int | None = None, inline_bytes: int | None = INLINE_BYTES, *, isolates: bool = True
    ) -> None:
        self.cores: int = cores or free_cores()
        self.inline_bytes = inline_bytes
        self.shares_memory = False  # a value is passed by reference
        self._isolates = isolates
        self._slots: list[LocalSlot] = []
        self._members: list[LocalMember] = []

    def put(self, value: object) -> Ref:
        """Keep a value, which all ranks share."""
        return LocalRef(value)

    async def reserve(self, count: int, resources: Resources, log: str = "") -> Sequence[LocalSlot]:
        """Reserve places for `count` ranks, with the threads that they ask for, up to the number of free cores.

        If no core is free, a rank still gets one thread. With `cpus = 0` a rank has no thread and runs in the caller's
        event loop. This is for actors that compute nothing, such as fakes. Raises ConfigError for no ranks, and for
        resources other than `cpus`.
        """
        check_count(count)
        if resources.gpus or resources.custom:
            requested = {"gpus": resources.gpus, **resources.custom}
            named = ", ".join(f"{name} = {amount:g}" for name, amount in requested.items() if amount)
            raise ConfigError(
                f"a mesh asks for {named}, but the local engine has only threads: set "
                "run.engine = 'processes', or 'ray' for several machines"
            )
        free = self.cores - sum(slot.threads for slot in self._slots if slot.cores)
        wanted = self.cores if resources.cpus is None else resources.cpus
        threads = max(1, min(wanted, free // count)) if wanted else 0
        turns = Turns()
        slots = [LocalSlot(threads, turns) for _ in range(count)]
        self._slots += slots
        return slots

    async def release(self, slots: Sequence[Slot]) -> None:
        """Stop what runs on the slots and free their cores."""
        await self.stop([member for member in self._members if member.slot in slots])
        self._slots = [slot for slot in self._slots if slot not in slots]

    async def start(
        self,
        slots: Sequence[Slot],
        ranks: Sequence[Rank],
        create: type,
        arguments: tuple[object, ...],
        keywords: Mapping[str, object],
    ) -> Sequence[LocalMember]:
        """Construct the actors concurrently. If one fails, all are stopped. MeshStopped if their mesh has stopped."""
        if not set(slots) <= set(self._slots):
            raise MeshStopped(f"{create.__name__} cannot be spawned: its mesh is stopped")
        places = zip(cast("Sequence[LocalSlot]", slots), ranks, strict=True)
        members = [LocalMember(slot, create.__name__, rank) for slot, rank in places]
        self._members += members
        try:
            starts = (member.construct(create, arguments, keywords) for member in members)
            outcomes = await asyncio.gather(*starts, return_exceptions=True)
            for outcome in outcomes:
                if outcome is not None:
                    raise outcome
        except BaseException:
            await self.stop(members)
            raise
        return members

    async def restart(self, members: Sequence[Member]) -> None:
        """Stop the actors and construct them again. If one fails, all are stopped. MeshStopped if their mesh has."""
        again = cast("Sequence[LocalMember]", members)
        for member in again:
            if member.slot not in self._slots:
                raise MeshStopped(f"{member.name} cannot be respawned on rank {member.rank.index}: its mesh is stopped")
        self._members += [member for member in again if member not in self._members]
        outcomes = await asyncio.gather(*(member.restart() for member in again), return_exceptions=True)
        for outcome in outcomes:
            if outcome is not None:
                await self.stop(members)
                raise outcome

    async def stop(self, members: Sequence[Member]) -> None:
        """Cancel the actors' calls, wait for their end, and let the actors go."""
        stops = [asyncio.ensure_future(member.stop()) for member in cast("Sequence[LocalMember]", members)]
        if stops:
            await asyncio.gather(*stops)
        self._members = [member for member in self._members if member not in members]

    async def call(self, endpoint: str, requests: Sequence[Request], seen: OnSpan | None = None) -> list[object]:
        """Call each member and wait for all results."""
        results = _Results(asyncio.get_running_loop(), len(requests), self._answer, seen)
        calls = self._calls(endpoint, requests, results)
        try:
            for call in calls:
                call.send()
            return await results.done
        finally:
            for index in results.waiting.copy():
                calls[index].cancel()
            del calls, results  # a failure's traceback refers to these, and the cycle would keep the arguments

    async def stream(
        self, endpoint: str, requests: Sequence[Request], consumed: Sequence[int], seen: OnSpan | None = None
    ) -> AsyncGenerator[object]:
        """Yield the consumed members' values as they come. A rank is at most one value ahead of the reader."""
        values = _Values(asyncio.get_running_loop(), len(requests), consumed, self._answer, seen)
        calls = self._calls(endpoint, requests, values)
        try:
            for call in calls:
                call.send()
            while await values.arrival():
                yield values.take()
        finally:
            for call in calls:
                call.cancel()
            del calls, values  # as in `call`

    def _calls(self, endpoint: str, requests: Sequence[Request], receiver: Receiver) -> list[LocalCall]:
        return [
            LocalCall(endpoint, each, receiver, index, isolate=self._isolates) for index, each in enumerate(requests)
        ]

    def _answer(self, value: object) -> object:
        """Return a result as the caller gets it."""
        held = put_large(value, self.put, self.inline_bytes)
        return isolated(held) if self._isolates else held

    async def close(self) -> None:
        """Stop every actor and end every thread."""
        await self.release(list(self._slots))


class _Results:
    """The results of one call on several ranks. Only the last one wakes the caller."""

    def __init__(
        self, caller: asyncio.AbstractEventLoop, count: int, finish: Callable[[object], object], seen: OnSpan | None
    ) -> None:
        self.seen = seen
        self.done: asyncio.Future[list[object]] = caller.create_future()
        self.waiting = set(range(count))
        self._caller = caller
        self._finish = finish
        self._results: list[object] = [None] * count

    async def run(self, call: LocalCall) -> None:
        self._results[call.index] = self._finish(await cast("Awaitable[object]", await call.invoke()))
        call.report()
        self.waiting.discard(call.index)
        if not self.waiting:
            answer(self._caller, self._settle, None)

    def fail(self, error: BaseException) -> None:
        answer(self._caller, self._settle, error)

    def _settle(self, error: BaseException | None) -> None:
        if not self.done.done():
            if error is None:
                self.done.set_result(self._results)
            else:
                self.done.set_exception(error)


class _Values:
    """The caller's side of several ranks' generators."""

    def __init__(
        self,
        caller: asyncio.AbstractEventLoop,
        members: int,
        consumed: Sequence[int],
        finish: Callable[[object], object],
        seen: OnSpan | None,
    ) -> None:
        self.seen = seen
        self._values: deque[tuple[object, Callable[[], object]]] = deque()
        self._consumed = frozenset(consumed)
        self._open = members
        self._caller = caller
        self._finish = finish
        self._error: BaseException | None = None
        self._arrived = asyncio.Event()

    async def arrival(self) -> bool:
        """Wait for a value. False if all generators have ended. Raises the first failure, after earlier values."""
        while self._error is None and self._open and not self._values:
            self._arrived.clear()
            await self._arrived.wait()
        if self._error is not None and not self._values:
            raise self._error
        return bool(self._values)

    def take(self) -> object:
        """Return the next value. Its rank continues, unless a rank has failed."""
        value, taken = self._values.popleft()
        if self._error is None:
            taken()
        return value

    async def run(self, call: LocalCall) -> None:
        """Run a generator. A consumed one waits until the reader takes its value."""
        loop = call.member.loop
        free = asyncio.Semaphore(1)
        values = cast("AsyncGenerator[object] | AsyncIterator[object]", await call.invoke())
        try:
            async for value in values:
                if call.index not in self._consumed:
                    continue
                await free.acquire()
                answer(self._caller, self._arrive, self._finish(value), lambda: answer(loop, free.release))
        finally:
            if isinstance(values, AsyncGenerator):
                await values.aclose()
        call.report()
        answer(self._caller, self._end)

    def fail(self, error: BaseException) -> None:
        answer(self._caller, self._fail, error)

    def _arrive(self, value: object, taken: Callable[[], object]) -> None:
        self._values.append((value, taken))
        self._arrived.set()

    def _end(self) -> None:
        self._open -= 1
        self._arrived.set()

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self._arrived.set()
