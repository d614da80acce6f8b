"""Handles, which `spawn` returns: a handle looks like the actor, and sends each call to its ranks.

Also the parts of an actor along the axis that divides rows, the calls that are running, and their events.
"""

import asyncio
import os
import socket
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Sized,
)
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Final, Never, ParamSpec, Protocol, TypeAlias, TypeVar, cast

import numpy as np

from meshrl.errors import CallTimeout, ContractError, MeshrlError, did_you_mean
from meshrl.events import Call, Span, sink
from meshrl.mesh import scatter
from meshrl.mesh.actor import CollectiveActor, Rank
from meshrl.mesh.contract import Contract, Endpoint
from meshrl.mesh.engine import Engine, Member, OnSpan, Request
from meshrl.mesh.refs import put_large, resolve
from meshrl.mesh.scatter import UNDIVIDED, MeshView, Plan, Planner, make_plan, scatter_args
from meshrl.mesh.sharding import Axes, Rows

P = ParamSpec("P")
A = TypeVar("A")
R = TypeVar("R")
T = TypeVar("T")

_ENDED: Final = object()
Plans: TypeAlias = dict[Axes, Plan]
"""The division of rows over each group of axes."""
Scattered: TypeAlias = tuple[list[Request], Plans]
"""What is sent to each rank, and how rows were divided."""


@dataclass(frozen=True)
class Deployment:
    """A spawned actor class: its contract, its ranks and their engine."""

    actor: type
    contract: Contract
    shape: Mapping[str, int]
    members: Sequence[Member]
    """One member for each rank. The last axis varies fastest."""
    engine: Engine
    mesh: str
    """The name of the mesh, for events."""
    timeout: float | None = None
    """Seconds that a call, or the next value of a stream, may take."""
    planner: Planner = make_plan
    """Divides the rows of a call."""
    min_ranks: int = 0
    """Lowest number of ranks that the actor can work with. 0: all of them."""
    away: set[int] = field(default_factory=set[int], compare=False, repr=False)
    """The numbers of the ranks that calls leave out. All views of the actor share this set."""
    _seen: dict[Axes, MeshView] = field(default_factory=dict, init=False, compare=False, repr=False)
    """Cached results of `along`."""

    @property
    def present(self) -> "Deployment":
        """The deployment without the ranks that are away, or all of it if none would be left."""
        here = [member for member in self.members if member.rank.index not in self.away]
        return replace(self, members=here, shape={**self.shape, "dp": len(here)}) if self.away and here else self

    @property
    def is_apart(self) -> bool:
        """True if the ranks work independently: if there are several along one axis, and they are not collective."""
        several = len(self.members) > 1 and self.shape.get("dp") == len(self.members)
        return several and not issubclass(self.actor, CollectiveActor)

    def along(self, axes: Axes) -> MeshView:
        """Return the ranks along these axes."""
        if axes not in self._seen:
            self._seen[axes] = MeshView.of(axes, self.shape)
        return self._seen[axes]


class Handle:
    """Represents an actor on a mesh, and is typed as the actor itself."""

    __slots__ = ("__weakref__", "_meshrl")

    def __init__(self, deployment: Deployment) -> None:
        self._meshrl = deployment

    @property  # type: ignore[misc]  # Python reads it and never sets it
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The actor's class, so that `isinstance(policy, Policy)` is True, in agreement with the type of `spawn`."""
        return self._meshrl.actor

    def __getattr__(self, name: str) -> "BoundEndpoint":
        if name.startswith("_"):  # Python's own look-ups are never endpoints
            raise AttributeError(name)
        deployment = self._meshrl
        if name in deployment.contract:
            return BoundEndpoint(deployment, deployment.contract[name])
        hint = did_you_mean(name, deployment.contract) or f"it has {', '.join(sorted(deployment.contract))}"
        raise AttributeError(f"{deployment.actor.__name__} on a mesh has no endpoint {name!r}: {hint}")

    def __repr__(self) -> str:
        shape = ", ".join(f"{axis}={size}" for axis, size in self._meshrl.shape.items())
        return f"<{self._meshrl.actor.__name__} on {shape}>"

    def __copy__(self) -> "Handle":
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> "Handle":
        return self

    def __reduce__(self) -> tuple[Callable[..., "Handle"], tuple[object, ...]]:
        it = self._meshrl
        ranks = dict(it.shape), list(it.members)
        return _received, (it.actor, dict(it.contract), *ranks, it.engine, it.mesh, it.timeout, it.planner)


def _received(*fields: Any) -> Handle:
    return Handle(Deployment(*fields))


class BoundEndpoint:
    """One endpoint of a handle."""

    def __init__(self, deployment: Deployment, endpoint: Endpoint, owners: Rows | None = None) -> None:
        self.whole = deployment
        self.deployment: Deployment = deployment.present
        self.endpoint = endpoint
        self.owners = owners
        """The part that takes each row, if the caller has decided it."""
        self.where: str = f"{deployment.actor.__name__}.{endpoint.name}"
        """`Actor.endpoint`, for messages."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Return a coroutine of the joined result, or a stream."""
        return self.stream(args, kwargs) if self.endpoint.stream else self._call(args, kwargs)

    def __repr__(self) -> str:
        return f"<{self.where}{self.endpoint.signature}>"

    async def each(self, *args: object, **kwargs: object) -> object:
        """Return the result of each rank, in the order of the ranks."""
        return await self._call(args, kwargs, join=False)

    async def _call(self, args: tuple[object, ...], kwargs: Mapping[str, object], *, join: bool = True) -> object:
        it, kind, axes = self.deployment, self.endpoint.result.kind, self.endpoint.result.axes
        is_watched = it.timeout is not None or sink.get() is not None
        with observed(self, (*args, *kwargs.values())) if is_watched else nullcontext() as waiting:
            requests, plans = self.requests(args, kwargs)
            answer = it.engine.call(self.endpoint.name, requests, waiting.seen if waiting else None)
            results = await (waiting.until(answer, it.timeout) if waiting else answer)
            if not join:
                return results
            if kind == "plain":
                return results[0]
            chosen = it.along(axes).replica
            parts = [results[number] for number in chosen]
            if kind != "same":
                return self._joined(parts, plans.get(axes, UNDIVIDED))
            if len(parts) > 1:
                ranks = [it.members[number].rank.index for number in chosen]
                scatter.check_same(await resolve(parts), ranks, self.where)
            return parts[0]

    def _joined(self, parts: Sequence[object], plan: Plan | None) -> object:
        try:
            return scatter.joined(self.endpoint.result.kind, parts, plan)
        except MeshrlError as error:
            raise type(error)(f"{self.where}: {error}") from error

    async def stream(
        self, args: tuple[object, ...], kwargs: Mapping[str, object], scattered: Scattered | None = None
    ) -> AsyncGenerator[object]:
        """Yield the values of a call. `scattered`: the result of `requests`, if it is known."""
        it, axes = self.deployment, self.endpoint.result.axes
        is_watched = it.timeout is not None or sink.get() is not None
        with observed(self, (*args, *kwargs.values())) if is_watched else nullcontext() as waiting:
            requests, plans = scattered or self.requests(args, kwargs)
            plan = None if plans.get(axes) else UNDIVIDED
            consumed = it.along(axes).replica if axes else [0]
            values = it.engine.stream(self.endpoint.name, requests, consumed, waiting.seen if waiting else None)
            try:
                while True:
                    answer = anext(values, _ENDED)
                    value = await (waiting.until(answer, it.timeout) if waiting else answer)
                    if value is _ENDED:
                        break
                    yield self._joined([value], plan) if axes else value
            finally:
                await values.aclose()

    def requests(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Scattered:
        """Return what is sent to each rank, and the division of rows over each group of axes."""
        members, shards, along = self.deployment.members, self.endpoint.shards, self.deployment.along
        try:
            bound = self.endpoint.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise ContractError(f"{self.where}{self.endpoint.signature} was called wrongly: {error}") from None
        engine = self.deployment.engine
        for name, value in bound.arguments.items():  # sent once, for any number of ranks
            arrays, parts = name not in shards, along(shards[name]).parts if name in shards else 1
            limit = engine.inline_bytes and engine.inline_bytes * parts  # each rank receives only its rows
            bound.arguments[name] = put_large(value, engine.put, limit, arrays=arrays, shares=engine.shares_memory)
        plans: Plans = {}
        for axes in set(shards.values()):
            values = {name: bound.arguments.get(name) for name, over in shards.items() if over == axes}
            try:
                plans[axes] = self.deployment.planner(values, along(axes).parts, self.owners)
            except ContractError as error:
                raise ContractError(f"{self.where}: {error}") from None
        shares = {name: (plans[axes], along(axes).indices) for name, axes in shards.items() if plans[axes]}
        scattered = zip(members, scatter_args(bound, shares, len(members)), strict=True)
        return [Request(member, positional, named) for member, (positional, named) in scattered], plans


_SHOWN: Final = 3
"""Ranks that are named at most."""
_numbers: Final = count()
_open: Final[set["Waiting"]] = set()
_longest: Final[dict[str, float]] = {}
"""Longest time in seconds that a call of each endpoint has taken so far."""


class Waiting:
    """A running call, a stream's next value, or work of this process itself, which has no members."""

    def __init__(self, where: str, members: Sequence[Member] = ()) -> None:
        """`where`: the actor and the endpoint. `members`: the ranks that were called."""
        self.where = where
        self.members = members
        self.ended: set[int] = set()
        """The numbers of the ranks that have answered. Any thread may add one."""
        self.seen: OnSpan | None = None
        """Records when a request ran on its rank, if events are recorded."""
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

    @property
    def ranks(self) -> str:
        """Name the ranks that have not answered, and their processes."""
        left = [member for number, member in enumerate(self.members) if number not in self.ended]
        shown = ", ".join(f"rank {member.rank.index} ({member.place})" for member in left[:_SHOWN])
        return shown + (f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else "")

    def slow(self, after: float) -> str | None:
        """Describe a call that has run for `after` seconds, and again each time that has doubled. Otherwise None."""
        seconds = time.monotonic() - self.since
        if seconds < max(after, 2 * self._reported, 2 * _longest.get(self.where, 0.0)):
            return None
        self._reported = seconds
        on = f" on {self.ranks}" if self.members else ""
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


@contextmanager
def observed(bound: BoundEndpoint, arguments: Iterable[object]) -> Generator[Waiting]:
    """Emit a `Call` when the block ends, and a `Span` for each rank that says when it ran, if events are recorded."""
    to, it = sink.get(), bound.deployment
    waiting = Waiting(bound.where, it.members)
    if to is None:
        yield waiting
        return
    number, actor, endpoint = next(_numbers), it.actor.__name__, bound.endpoint.name
    rows, tokens = _sizes(arguments)
    began, start = to.now(), to.began
    ended = waiting.ended

    def seen(index: int, since: float, until: float) -> None:
        ended.add(index)
        rank = it.members[index].rank.index
        to.emit(Span(number, it.mesh, rank, actor, endpoint, since - start, until - start))

    waiting.seen = seen
    failed = None
    try:
        yield waiting
    except GeneratorExit:  # leaving a stream early is not a failure
        raise
    except BaseException as error:
        failed = type(error).__name__
        raise
    finally:
        to.emit(Call(number, actor, endpoint, began, to.now(), rows, tokens, failed))


class _Batch(Sized, Protocol):
    """The part of `Batch` that is read here. `Batch` itself lies above this module."""

    @property
    def lengths(self) -> Rows: ...

    @property
    def stored(self) -> Mapping[str, object]: ...


def _sizes(arguments: Iterable[object]) -> tuple[int | None, int | None]:
    """Count the rows and the tokens of the batches among a call's arguments. None if none has any.

    Values without a length, such as handles, are not asked for attributes.
    """
    sized = [each for each in arguments if isinstance(each, Sized)]
    batches = [cast("_Batch", each) for each in sized if isinstance(getattr(each, "stored", None), Mapping)]
    tokens = [
        int(batch.lengths.sum())  # without a column of tokens, it is 1 for each row
        for batch in batches
        if any(isinstance(getattr(column, "lengths", None), np.ndarray) for column in batch.stored.values())
    ]
    return sum(map(len, batches)) if batches else None, sum(tokens) if tokens else None


def each(endpoint: Callable[P, Coroutine[object, Never, R]]) -> Callable[P, Coroutine[object, Never, list[R]]]:
    """Call an endpoint without joining its results: returns a list with one result for each rank.

    `results = await each(policy.update)(batch)`. Raises ContractError for an endpoint that is a stream.
    """
    called = cast("object", endpoint)
    if isinstance(called, BoundEndpoint):
        if called.endpoint.stream:
            raise ContractError(f"{called.where} is a stream: iterate at(...) of each rank instead of each()")
        return cast("Callable[P, Coroutine[object, Never, list[R]]]", called.each)

    async def alone(*args: P.args, **kwargs: P.kwargs) -> list[R]:
        return [await endpoint(*args, **kwargs)]

    return alone


def at(actor: A, **axes: int) -> A:
    """Return the ranks at these coordinates, as an actor: `at(policy, dp=0)`. ContractError if there are none."""
    deployment = deployment_of(actor, "at")
    for axis, index in axes.items():
        size = deployment.shape.get(axis)
        if size is None or not 0 <= index < size:
            has = ", ".join(f"{axis} from 0 to {size - 1}" for axis, size in deployment.shape.items())
            raise ContractError(f"at({deployment.actor.__name__}, {axis}={index}): the mesh has {has}")
    members = [m for m in deployment.members if all(m.rank.axes[axis] == index for axis, index in axes.items())]
    shape = {axis: 1 if axis in axes else size for axis, size in deployment.shape.items()}
    return cast("A", Handle(replace(deployment, members=members, shape=shape)))


def limited(actor: A, timeout: float | None) -> A:
    """Return the same actor with a time limit in seconds for calls and stream values, which raise `CallTimeout`."""
    return cast("A", Handle(replace(deployment_of(actor, "limited"), timeout=timeout)))


async def respawn(actor: object) -> None:
    """Construct the actor again on all its ranks, with the arguments of its spawn. Dead processes are replaced.

    The actor's state is lost, and so are batches with columns on a rank that died.
    """
    deployment = deployment_of(actor, "respawn")
    await deployment.engine.restart(deployment.members)


async def stop(actor: object) -> None:
    """Cancel the actor's calls and stop it on its ranks. Later calls raise `MeshStopped`."""
    deployment = deployment_of(actor, "stop")
    await deployment.engine.stop(deployment.members)


def deployment_of(actor: object, verb: str) -> Deployment:
    """Return the deployment of an actor on a mesh. For other objects, ContractError names the function `verb`."""
    if not isinstance(actor, Handle):
        raise ContractError(f"{verb}() needs an actor that was spawned on a mesh, not a {type(actor).__name__}")
    deployment: Deployment = object.__getattribute__(actor, "_meshrl")
    return deployment


def parts(endpoint: Callable[..., object]) -> int:
    """Return the number of parts that an endpoint's rows are divided into: 1 off a mesh, or without sharded rows."""
    called = cast("object", endpoint)
    if not isinstance(called, BoundEndpoint):
        return 1
    return max((called.whole.along(axes).parts for axes in called.endpoint.shards.values()), default=1)


def routed(endpoint: Callable[P, R], owners: Rows) -> Callable[P, R]:
    """Choose the rows that each rank gets: `routed(sampler.generate, owners)(prompts, sampling)`.

    `owners`, int64[rows], has a number below `parts(endpoint)` for each row. A rank's number is its coordinate on the
    axis that rows are sharded over. An object that is not on a mesh gets all rows. The call raises ContractError if the
    owners do not fit its rows.
    """
    called = cast("object", endpoint)
    if not isinstance(called, BoundEndpoint):
        return endpoint
    return cast("Callable[P, R]", BoundEndpoint(called.whole, called.endpoint, owners))


def planned(actor: A, planner: Planner) -> A:
    """Return the same actor, whose calls divide their rows by this function. ContractError off a mesh."""
    return cast("A", Handle(replace(deployment_of(actor, "planned"), planner=planner)))


def ranks(actor: object) -> list[Rank]:
    """Return the actor's ranks, with their places on the mesh."""
    return [member.rank for member in deployment_of(actor, "ranks").members]


def replicas(actor: A) -> list[A]:
    """Return each rank of an actor as an actor, if the ranks work independently of each other.

    Otherwise returns the actor itself: if it is not on a mesh, its ranks wait for each other, or a part has several
    ranks.
    """
    deployment = _deployment(actor)
    if deployment is None or not deployment.is_apart:
        return [actor]
    return [at(actor, dp=index) for index in range(len(deployment.members))]


def streams(endpoint: Callable[P, AsyncIterator[T]], owners: Rows) -> Callable[P, dict[int, AsyncIterator[T]]]:
    """Split a call of a stream into one stream for each available replica, by the replica's number.

    `owners`: as for `routed`. Rows are numbered as in a single call. The streams end independently of each other.
    """
    called = cast("object", endpoint)

    def opened(*args: P.args, **kwargs: P.kwargs) -> dict[int, AsyncIterator[T]]:
        if not isinstance(called, BoundEndpoint) or not called.whole.is_apart:
            return {0: routed(endpoint, owners)(*args, **kwargs)}
        present = called.whole.present
        numbers = [member.rank.axes["dp"] for member in present.members]
        bound = BoundEndpoint(present, called.endpoint, np.searchsorted(numbers, owners))
        requests, plans = bound.requests(args, kwargs)
        alone = {**present.shape, "dp": 1}
        each = [
            BoundEndpoint(replace(present, members=[request.member], shape=alone), called.endpoint)
            for request in requests
        ]
        return {
            number: cast("AsyncIterator[T]", one.stream(request.arguments, request.keywords, ([request], plans)))
            for number, one, request in zip(numbers, each, requests, strict=True)
        }

    return opened


def min_ranks(actor: object) -> int:
    """Return the lowest number of ranks that the actor's mesh can work with. 0: all of them."""
    deployment = _deployment(actor)
    return deployment.min_ranks if deployment else 0


def is_away(actor: object) -> bool:
    """True if calls leave out a rank of the actor."""
    deployment = _deployment(actor)
    return bool(deployment and deployment.away & {member.rank.index for member in deployment.members})


def leave_out(actor: object) -> None:
    """Leave the actor's ranks out of calls until `take_in`, except for calls that name them by `at`."""
    if deployment := _deployment(actor):
        deployment.away.update(member.rank.index for member in deployment.members)


def take_in(actor: object) -> None:
    """Include the actor's ranks in calls again."""
    if deployment := _deployment(actor):
        deployment.away.difference_update(member.rank.index for member in deployment.members)


def _deployment(actor: object) -> Deployment | None:
    """Return the deployment of an actor, or None if it is not on a mesh."""
    return cast("Deployment", object.__getattribute__(actor, "_meshrl")) if isinstance(actor, Handle) else None
