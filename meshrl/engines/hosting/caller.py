"""Calls and streams to ranks in other processes, made by the controller or by a rank that holds a handle."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar, cast

from meshrl.engines.hosting.messages import Over, boot
from meshrl.engines.hosting.pickling import check_picklable
from meshrl.engines.hosting.process import RankMember, Sent, sendable
from meshrl.errors import ContractError, RankDied, RankFailed
from meshrl.mesh import Member, OnSpan, Ref, Request

T = TypeVar("T")

_NEWS: Final = 0.1
"""Most seconds from the failure of a rank to the news of the death of another rank that caused it."""
_FAR_NEWS: Final = 5.0
"""The same if ranks that wait for each other are on other machines. Last output of the dead one is fetched first."""


class Caller(ABC):
    """The part of an engine that works in every process."""

    def __init__(self, inline_bytes: int, shares_memory: bool = False) -> None:
        """`inline_bytes`, `shares_memory`: the values of the properties."""
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

    @abstractmethod
    def put(self, value: object) -> Ref:
        """Keep a value once, for all that fetch it."""

    async def call(self, endpoint: str, requests: Sequence[Request], seen: OnSpan | None = None) -> list[object]:
        """Call each member and wait for all results."""
        sent: list[Sent] = []
        answers: list[asyncio.Task[object]] = []
        check_members(endpoint, requests)
        check_sendable(endpoint, requests)
        try:
            for index, request in enumerate(requests):  # one by one, so that sent ones can be cancelled
                sent.append(Sent(request, endpoint, seen=seen and partial(seen, index)))
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
        sent: list[Sent] = []
        readers: list[asyncio.Task[None]] = []
        arrivals: asyncio.Queue[_Value | Exception | None] = asyncio.Queue()
        check_members(endpoint, requests)
        try:
            for index, request in enumerate(requests):
                noted = seen and partial(seen, index)
                sent.append(Sent(request, endpoint, stream=True, consumed=index in consumed, seen=noted))
            readers = [asyncio.create_task(_read(each, arrivals)) for each in sent]
            running = len(readers)
            while running:
                arrival = await arrivals.get()
                if isinstance(arrival, _Value):
                    arrival.taken.set()
                    yield arrival.value
                elif arrival is None:
                    running -= 1
                else:
                    cancel(sent)
                    raise await first_cause(arrival, [each.member for each in sent], readers)
        finally:
            arrival = None  # see `abandon`
            cancel(sent)
            abandon(readers)

    async def restart(self, members: Sequence[Member]) -> None:
        """Raise ContractError: a rank has no processes to restart an actor in."""
        name = cast("RankMember", members[0]).spawn.name
        raise ContractError(f"respawn({name}) was called on a rank: call it where {name} was spawned")

    async def stop(self, members: Sequence[Member]) -> None:
        """Cancel the actors' calls, wait for their end, and drop the actors. Continues if the caller is cancelled."""
        await asyncio.gather(*(member.stop() for member in cast("Sequence[RankMember]", members)))


async def _all_well(sent: Sequence[Sent]) -> bool:
    """Wait until all have answered or one has failed. True if none failed. No tasks, because most calls are short."""
    over: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    left = len(sent)

    def arrived(each: Sent) -> None:
        nonlocal left
        left -= 1
        if not over.done() and (not left or each.has_failed):
            over.set_result(not each.has_failed)

    for each in sent:
        each.reply.tell(partial(arrived, each))
    return await over


def check_members(endpoint: str, requests: Sequence[Request]) -> None:
    """Raise `MeshStopped` or `RankDied`, before any rank is called, if a rank takes no calls."""
    for request in requests:
        cast("RankMember", request.member).check(endpoint)


def check_sendable(endpoint: str, requests: Sequence[Request]) -> None:
    """If ranks wait for each other, raise any error of sending before the first call: all are called, or none."""
    spawn = cast("RankMember", requests[0].member).spawn
    if not spawn.together or len(spawn.ranks) == 1:
        return
    if len(requests) < len(spawn.ranks):
        raise ContractError(
            f"{spawn.name}.{endpoint} was called on {len(requests)} of {len(spawn.ranks)} ranks, which would wait for "
            "the others: call a `CollectiveActor` on all of its ranks, not through `at`"
        )
    for request in requests:
        sendable(f"{spawn.name}.{endpoint}", partial(check_picklable, (request.arguments, dict(request.keywords))))


def cancel(sent: Iterable[Sent]) -> None:
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
            died = dead.obituary(error.endpoint, dead.process)
            if isinstance(died, RankDied):
                died.__cause__ = error
                return died
    return error


def _is_far(member: RankMember) -> bool:
    """True if other ranks wait for this one, on another machine than this."""
    known = member.process.known
    return member.spawn.together and known is not None and known.boot != boot()


@dataclass(frozen=True)
class _Value:
    value: object
    taken: asyncio.Event


async def _read(sent: Sent, arrivals: "asyncio.Queue[_Value | Exception | None]") -> None:
    """Pass on the values of one rank, each after the reader took the one before."""
    answer = asyncio.create_task(sent.answer())
    try:
        while sent.consumed and not isinstance(value := await _next(sent, answer), Over):
            taken = asyncio.Event()
            arrivals.put_nowait(_Value(value, taken))
            await taken.wait()
        await answer
        arrivals.put_nowait(None)
    except Exception as error:  # noqa: BLE001 -- the reader gets it
        arrivals.put_nowait(error)
    finally:
        answer.cancel()


async def _next(sent: Sent, answer: asyncio.Task[object]) -> object:
    """Return the next value, or `Over`. Watches `answer` too, which reports a failure before the stream began."""
    following = asyncio.create_task(sent.next())
    try:
        await asyncio.wait({following, answer}, return_when=asyncio.FIRST_COMPLETED)
        if answer.done() and answer.exception() is not None:
            sent.cancel()
        return await following
    finally:
        following.cancel()
