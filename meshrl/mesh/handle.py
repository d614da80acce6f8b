"""Handles, which `spawn` returns. A handle looks like the actor and sends each call to its ranks."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Final, Never, ParamSpec, TypeAlias, TypeVar, cast

from meshrl.errors import ContractError, MeshrlError, did_you_mean
from meshrl.events import sink
from meshrl.mesh import scatter
from meshrl.mesh.calls import Observation, Waiting
from meshrl.mesh.contract import Contract, Endpoint, read_contract
from meshrl.mesh.engine import Engine, Member, Request
from meshrl.mesh.refs import put_large, resolve
from meshrl.mesh.scatter import UNDIVIDED, Along, Plan, Planner, make_plan, scatter_args
from meshrl.mesh.sharding import Axes, Rows

P = ParamSpec("P")
A = TypeVar("A")
R = TypeVar("R")

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
    _seen: dict[Axes, Along] = field(default_factory=dict, init=False, compare=False, repr=False)
    """Cached results of `along`."""

    @property
    def name(self) -> str:
        """The name of the class, for messages."""
        return self.actor.__name__

    @property
    def present(self) -> "Deployment":
        """The deployment without the ranks that are away, or all of it if none would be left."""
        here = [member for member in self.members if member.rank.index not in self.away]
        return replace(self, members=here, shape={**self.shape, "dp": len(here)}) if self.away and here else self

    def along(self, axes: Axes) -> Along:
        """Return the ranks along these axes."""
        if axes not in self._seen:
            self._seen[axes] = Along.of(axes, self.shape)
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
        raise AttributeError(f"{deployment.name} on a mesh has no endpoint {name!r}: {hint}")

    def __repr__(self) -> str:
        shape = ", ".join(f"{axis}={size}" for axis, size in self._meshrl.shape.items())
        return f"<{self._meshrl.name} on {shape}>"

    def __copy__(self) -> "Handle":
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> "Handle":
        return self

    def __reduce__(self) -> tuple[Callable[..., "Handle"], tuple[object, ...]]:
        it = self._meshrl
        return _received, (it.actor, dict(it.shape), list(it.members), it.engine, it.mesh, it.timeout, it.planner)


def _received(actor: type, shape: Mapping[str, int], *others: Any) -> Handle:
    return Handle(Deployment(actor, read_contract(actor, shape), shape, *others))


class BoundEndpoint:
    """One endpoint of a handle."""

    def __init__(self, deployment: Deployment, endpoint: Endpoint, owners: Rows | None = None) -> None:
        self.whole = deployment
        self.deployment: Deployment = deployment.present
        self.endpoint = endpoint
        self.owners = owners
        """The part that takes each row, if the caller has decided it."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Return a coroutine of the joined result, or a stream."""
        return self.stream(args, kwargs) if self.endpoint.stream else self._call(args, kwargs)

    def __repr__(self) -> str:
        return f"<{self.where}{self.endpoint.signature}>"

    @property
    def where(self) -> str:
        """`Actor.endpoint`, for messages."""
        return f"{self.deployment.name}.{self.endpoint.name}"

    async def each(self, *args: object, **kwargs: object) -> list[object]:
        """Return the result of each rank, in the order of the ranks."""
        with self._observed(args, kwargs) as seen:
            return (await self._results(args, kwargs, seen))[0]

    async def _call(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        with self._observed(args, kwargs) as seen:
            return await self._joined(*await self._results(args, kwargs, seen))

    def _observed(
        self, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> AbstractContextManager[Observation | None]:
        to, it = sink.get(), self.deployment
        if to is None:
            return nullcontext()
        return Observation(to, it.mesh, it.name, self.endpoint.name, it.members, (*args, *kwargs.values()))

    async def _results(
        self, args: tuple[object, ...], kwargs: Mapping[str, object], seen: Observation | None
    ) -> tuple[list[object], Plans]:
        requests, plans = self.requests(args, kwargs)
        answer = self.deployment.engine.call(self.endpoint.name, requests, seen)
        return await self._answered(answer, seen), plans

    async def _answered(self, answer: Awaitable[R], seen: Observation | None) -> R:
        timeout = self.deployment.timeout
        if seen is None and timeout is None:
            return await answer
        waiting = seen.waiting if seen else Waiting(self.where, self.deployment.members)
        return await waiting.until(answer, timeout)

    async def _joined(self, results: Sequence[object], plans: Plans) -> object:
        kind, axes = self.endpoint.result.kind, self.endpoint.result.axes
        if kind == "plain":
            return results[0]
        chosen = self.deployment.along(axes).replica
        parts = [results[number] for number in chosen]
        if kind == "same":
            if len(parts) > 1:
                ranks = [self.deployment.members[number].rank.index for number in chosen]
                scatter.check_same(await resolve(parts), ranks, self.where)
            return parts[0]
        if kind == "gather":
            return self._gather(parts, plans.get(axes, UNDIVIDED))
        return scatter.mean(parts) if kind == "mean" else scatter.total(parts)

    def _gather(self, parts: Sequence[object], plan: Plan | None) -> object:
        try:
            return scatter.gather(parts, plan)
        except MeshrlError as error:
            raise type(error)(f"{self.where}: {error}") from error

    async def stream(
        self,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        scattered: Scattered | None = None,
    ) -> AsyncGenerator[object]:
        """Yield the values of a call. `scattered`: the result of `requests`, if it is known."""
        with self._observed(args, kwargs) as seen:
            requests, plans = scattered or self.requests(args, kwargs)
            axes = self.endpoint.result.axes
            plan = None if plans.get(axes) else UNDIVIDED
            consumed = self.deployment.along(axes).replica if axes else [0]
            stream = self.deployment.engine.stream(self.endpoint.name, requests, consumed, seen)
            try:
                while (value := await self._answered(anext(stream, _ENDED), seen)) is not _ENDED:
                    yield self._gather([value], plan) if axes else value
            finally:
                await stream.aclose()

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


def each(
    endpoint: Callable[P, Coroutine[object, Never, R]],
) -> Callable[P, Coroutine[object, Never, list[R]]]:
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
            raise ContractError(f"at({deployment.name}, {axis}={index}): the mesh has {has}")
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
