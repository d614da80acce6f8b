"""Calls and streams to ranks in other processes, made by the controller or by a rank that holds a handle."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pickle import PicklingError
from typing import Final, TypeVar, cast

from meshrl.engines.ranks import unsendable
from meshrl.engines.remote.messages import Call, Failure, Reply, Stopped, StreamEnd, boot_id
from meshrl.engines.remote.pickling import pickle_scripts_by_value
from meshrl.engines.remote.pool_ref import PoolRef
from meshrl.engines.remote.process import Process, RankMember
from meshrl.errors import ContractError, MeshStopped, RankDied, RankFailed
from meshrl.events import clock
from meshrl.mesh import Member, OnSpan, Ref, Request

T = TypeVar("T")

_NEWS: Final = 0.1
"""Most seconds from the failure of a rank to the news of the death of another rank that caused it."""
_FAR_NEWS: Final = 5.0
"""The same if ranks that wait for each other are on other machines. Last output of the dead one is fetched first."""


class Caller:
    """The part of an engine that works in every process."""

    def __init__(self, references: type[PoolRef], inline_bytes: int, shares_memory: bool = False) -> None:
        """`references`: to values of `put`. `inline_bytes`, `shares_memory`: the values of the properties."""
        self._references = references
        self._inline_bytes = inline_bytes
        self._shares_memory = shares_memory

    @property
    def inline_bytes(self) -> int:
        """Size in bytes of the largest column that travels with a call. A divided one counts by the ranks' average."""
        return self._inline_bytes

    @property
    def shares_memory(self) -> bool:
        """True if all ranks are processes of this machine, and no other machine is ever added."""
        return self._shares_memory

    def __reduce__(self) -> tuple[type["Caller"], tuple[type[PoolRef], int, bool]]:
        return Caller, (self._references, self.inline_bytes, self.shares_memory)

    def put(self, value: object) -> Ref:
        """Keep a value once, for all that fetch it."""
        return self._references.put(value)

    async def call(self, endpoint: str, requests: Sequence[Request], seen: OnSpan | None = None) -> list[object]:
        """Call each member and wait for all results."""
        sent: list[SentCall] = []
        answers: list[asyncio.Task[object]] = []
        check_members(endpoint, requests)
        calls: Iterable[SentCall] = (
            SentCall(request, endpoint, seen=seen and partial(seen, index)) for index, request in enumerate(requests)
        )
        if is_collective(endpoint, requests):
            calls = list(calls)  # pickled before the first is sent: all ranks are called, or none
        try:
            for each in calls:
                each.send()
                sent.append(each)
            if await _all_well(sent):
                return [each.result() for each in sent]
            answers = [asyncio.create_task(each.answer()) for each in sent]
            return await asyncio.gather(*answers)
        except RankFailed as error:
            cancel(sent)
            raise await first_cause(error, [each.member for each in sent], answers)  # noqa: B904 -- it has its cause
        finally:
            cancel(sent)
            abandon(answers)

    async def stream(
        self, endpoint: str, requests: Sequence[Request], consumed: Sequence[int], seen: OnSpan | None = None
    ) -> AsyncGenerator[object]:
        """Yield the consumed members' values as they come. A rank is at most one value ahead of the reader."""
        sent: list[SentCall] = []
        ends: list[asyncio.Task[None]] = []
        arrivals: asyncio.Queue[tuple[SentCall, Reply]] = asyncio.Queue()
        check_members(endpoint, requests)
        try:
            for index, request in enumerate(requests):
                on_span = seen and partial(seen, index)
                call = SentCall(request, endpoint, stream=True, consumed=index in consumed, seen=on_span)
                call.send()
                sent.append(call)
            for call in sent:
                call.announce(call.reply, arrivals)
                if call.consumed:
                    call.request_next(arrivals)
            running = set(sent)
            while running:
                call, reply = await arrivals.get()
                if reply is not call.reply:
                    value = call.member.answer(call.process, endpoint, reply)
                    call.consumed = not isinstance(value, StreamEnd)
                    if call.consumed:
                        call.request_next(arrivals)
                        yield value
                elif call.consumed and reply.error is not None:
                    call.cancel()  # the rank may not know it, and then answers the request for its next value
                if call in running and call.reply.done and not call.consumed:
                    call.result()
                    running.discard(call)
        except RankFailed as error:
            cancel(sent)
            ends = [asyncio.create_task(_ended(each)) for each in sent]
            raise await first_cause(error, [each.member for each in sent], ends)  # noqa: B904 -- it has its cause
        finally:
            cancel(sent)
            abandon(ends)

    async def restart(self, members: Sequence[Member]) -> None:
        """Raise ContractError: a rank has no processes to restart an actor in."""
        name = cast("RankMember", members[0]).spawn.name
        raise ContractError(f"respawn({name}) was called on a rank: call it where {name} was spawned")

    async def stop(self, members: Sequence[Member]) -> None:
        """Cancel the actors' calls, wait for their end, and drop the actors. Continues if the caller is cancelled."""
        await asyncio.gather(*(member.stop() for member in cast("Sequence[RankMember]", members)))


class SentCall:
    """A call of an endpoint, or a stream, on one member."""

    def __init__(
        self,
        request: Request,
        endpoint: str,
        *,
        stream: bool = False,
        consumed: bool = False,
        seen: Callable[[float, float], None] | None = None,
    ) -> None:
        """Pickle the arguments. `seen`: called with start and end on the rank, on the clock of this process."""
        self.member: RankMember = cast("RankMember", request.member)
        self.endpoint = endpoint
        self.consumed = consumed
        """True while the caller reads its values."""
        self.process: Process = self.member.process
        self.ended: bool = False
        self._stream = stream
        self._seen = seen
        self._timed = seen is not None
        self._began = clock() if seen else 0.0
        prepare = self.process.channel.prepare
        if request.arguments or request.keywords:
            arguments = request.arguments, dict(request.keywords)
            self._send = pickled(f"{self.member.spawn.name}.{endpoint}", partial(prepare, arguments))
        else:
            self._send = prepare(None)

    def send(self) -> None:
        """Send it to the rank."""
        process = self.process
        self.number: int = process.sent
        self.reply: Reply = self._send(
            Call(
                self.endpoint,
                self.member.spawn.key,
                process.caller,
                self.number,
                self._stream,
                self.consumed,
                self._timed,
            )
        )
        process.sent += 1  # later calls wait only for sent ones
        del self._send  # and the arguments with it

    @property
    def has_failed(self) -> bool:
        """True if the answer is not a result."""
        if self.reply.error is not None:
            return True
        value = self.reply.value
        return isinstance(cast("tuple[object, ...]", value)[0] if self._timed else value, Failure | Stopped)

    async def answer(self) -> object:
        """Return the result, or None at a stream's end. Raises `RankFailed`, `RankDied` or `MeshStopped`."""
        await self.reply.wait()
        return self.result()

    def result(self) -> object:
        """Return the result, like `answer`, once it has arrived."""
        value = self.member.answer(self.process, self.endpoint, self.reply)
        self.ended = True
        if self._timed:
            value, began, ended = cast("tuple[object, float, float]", value)
            self._report(began - self.process.ahead, ended - self.process.ahead)
        return self.member.result(self.endpoint, value)

    def request_next(self, arrivals: "asyncio.Queue[tuple[SentCall, Reply]]") -> None:
        """Request a stream's next value, or `StreamEnd`."""
        self.announce(self.process.channel.request("next", self.process.caller, self.number), arrivals)

    def announce(self, reply: Reply, arrivals: "asyncio.Queue[tuple[SentCall, Reply]]") -> None:
        """Put a reply into the queue when it arrives."""
        reply.add_callback(partial(arrivals.put_nowait, (self, reply)))

    def cancel(self) -> None:
        """Cancel it on the rank once, unless it has ended. A second time would interrupt its clean-up.

        On an actor whose ranks wait for each other it continues there.
        """
        if not self.ended and self.process.death is None:
            self.ended = True
            if not self.member.spawn.together:
                self.process.channel.notify("cancel", self.process.caller, self.number)
            self._report(self._began, clock())  # as seen from here: nobody waits for the rank's answer

    def _report(self, began: float, ended: float) -> None:
        if self._seen is not None:
            self._seen(began, ended)
            self._seen = None


def pickled(where: str, pickle: Callable[[], T]) -> T:
    """Run `pickle`. ContractError for values that cannot be pickled, such as a lock."""
    pickle_scripts_by_value()
    try:
        return pickle()
    except (TypeError, PicklingError) as error:
        raise unsendable(where, error) from error


async def _all_well(sent: Sequence[SentCall]) -> bool:
    """Wait until all have answered or one has failed. True if none failed. No tasks, because most calls are short."""
    over: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    left = len(sent)

    def arrived(each: SentCall) -> None:
        nonlocal left
        left -= 1
        if not over.done() and (not left or each.has_failed):
            over.set_result(not each.has_failed)

    for each in sent:
        each.reply.add_callback(partial(arrived, each))
    return await over


def check_members(endpoint: str, requests: Sequence[Request]) -> None:
    """Raise `MeshStopped` or `RankDied`, before any rank is called, if a rank takes no calls."""
    for request in requests:
        cast("RankMember", request.member).check(endpoint)


def is_collective(endpoint: str, requests: Sequence[Request]) -> bool:
    """True if ranks wait for each other in this call. ContractError if it is not to all of them."""
    spawn = cast("RankMember", requests[0].member).spawn
    if not spawn.together or len(spawn.ranks) == 1:
        return False
    if len(requests) < len(spawn.ranks):
        raise ContractError(
            f"{spawn.name}.{endpoint} was called on {len(requests)} of {len(spawn.ranks)} ranks, which would wait for "
            "the others: call a `CollectiveActor` on all of its ranks, not through `at`"
        )
    return True


def cancel(sent: Iterable[SentCall]) -> None:
    """Cancel the calls that have not ended."""
    for each in sent:
        each.cancel()


async def all_or_first(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Wait for all, or until the first failure, which is raised."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    for task in done:
        task.result()


def abandon(tasks: list[asyncio.Task[T]]) -> None:
    """Cancel tasks and forget them.

    A failure refers by its traceback to the caller's variables, and these must not refer back to it. Such a cycle would
    keep the call's arguments, and their values in the store, until Python collects cycles.
    """
    for task in tasks:
        task.cancel()
    tasks.clear()


async def first_cause(
    error: Exception,
    members: Sequence[RankMember],
    others: "Iterable[asyncio.Task[object]] | Iterable[asyncio.Task[None]]",
) -> Exception:
    """Return the failure, or the death of another of these ranks if it is reported while the `others` end.

    A rank whose peer dies in a collective often fails before the death is known.
    """
    if isinstance(error, RankFailed):
        waiting, now = {other for other in others if not other.done()}, asyncio.get_running_loop().time
        until = now() + (_FAR_NEWS if any(map(_is_far, members)) else _NEWS)
        while not (dead := next((each for each in members if each.process.death), None)):
            if not waiting or now() >= until:
                break
            _, waiting = await asyncio.wait(waiting, timeout=until - now(), return_when=asyncio.FIRST_COMPLETED)
        if dead is not None:
            died = dead.death_error(error.endpoint, dead.process)
            if isinstance(died, RankDied):
                died.__cause__ = error
                return died
    return error


def _is_far(member: RankMember) -> bool:
    """True if other ranks wait for this one, on another machine than this."""
    known = member.process.known
    return member.spawn.together and known is not None and known.boot != boot_id()


async def _ended(call: SentCall) -> None:
    """Wait until a call has ended, and record a death of its process."""
    with suppress(RankFailed, RankDied, MeshStopped):
        await call.answer()
