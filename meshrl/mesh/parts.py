"""The parts of an actor along the axis that divides rows: which rows each takes, and which are present."""

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import ParamSpec, TypeVar, cast

import numpy as np

from meshrl.mesh.actor import CollectiveActor, Rank
from meshrl.mesh.engine import Request
from meshrl.mesh.handle import BoundEndpoint, Deployment, Handle, Plans, at, deployment_of
from meshrl.mesh.sharding import Rows

P = ParamSpec("P")
A = TypeVar("A")
R = TypeVar("R")
T = TypeVar("T")


def parts(endpoint: Callable[..., object]) -> int:
    """How many parts the rows of an endpoint's calls are divided into: 1 where it is not on a mesh or shards none."""
    called = cast("object", endpoint)
    if not isinstance(called, BoundEndpoint):
        return 1
    return max((called.whole.along(axes).parts for axes in called.endpoint.shards.values()), default=1)


def routed(endpoint: Callable[P, R], owners: Rows) -> Callable[P, R]:
    """Decide which part of its rows each rank gets: `routed(sampler.generate, owners)(prompts, sampling)`.

    `owners`, int64[rows], has a number below `parts(endpoint)` for each row; a rank's number is its coordinate on the
    axis that rows are sharded over. What is not on a mesh is given all rows. ContractError, of the call, where they do
    not fit its rows.
    """
    called = cast("object", endpoint)
    if not isinstance(called, BoundEndpoint):
        return endpoint
    return cast("Callable[P, R]", BoundEndpoint(called.whole, called.endpoint, owners))


def ranks(actor: object) -> list[Rank]:
    """Where the actor's ranks are on the mesh."""
    return [member.rank for member in deployment_of(actor, "ranks").members]


def replicas(actor: A) -> list[A]:
    """The ranks of an actor, each as an actor of its own, where each can be called, and die, without the others.

    Else the actor itself: it is not on a mesh, its ranks wait for each other, or a part goes over several of them.
    """
    deployment = _deployment(actor)
    if deployment is None or not _apart(deployment):
        return [actor]
    return [at(actor, dp=index) for index in range(len(deployment.members))]


def streams(endpoint: Callable[P, AsyncIterator[T]], owners: Rows) -> Callable[P, dict[int, AsyncIterator[T]]]:
    """A call of a stream, taken apart: one of each of the `replicas` that is not away, by its number.

    `owners`: as of `routed`. Rows are numbered as if the call were one; one stream ends without the others.
    """
    called = cast("object", endpoint)

    def opened(*args: P.args, **kwargs: P.kwargs) -> dict[int, AsyncIterator[T]]:
        if not isinstance(called, BoundEndpoint) or not _apart(called.whole):
            return {0: routed(endpoint, owners)(*args, **kwargs)}
        there = called.whole.present
        numbers = [member.rank.axes["dp"] for member in there.members]
        bound = BoundEndpoint(there, called.endpoint, np.searchsorted(numbers, owners))
        requests, plans = bound.requests(args, kwargs)
        return {
            number: cast("AsyncIterator[T]", _alone(bound, request, plans))
            for number, request in zip(numbers, requests, strict=True)
        }

    return opened


def _alone(bound: BoundEndpoint, request: Request, plans: Plans) -> AsyncIterator[object]:
    """The part of a call that one rank is asked for."""
    alone = replace(bound.deployment, members=[request.member], shape={**bound.deployment.shape, "dp": 1})
    return BoundEndpoint(alone, bound.endpoint).stream(request.arguments, request.keywords, ([request], plans))


def least(actor: object) -> int:
    """How many ranks of the actor's mesh are enough, where the others may come and go; 0: all are wanted."""
    deployment = _deployment(actor)
    return deployment.least if deployment else 0


def is_away(actor: object) -> bool:
    """Whether any rank of the actor is left out of calls."""
    deployment = _deployment(actor)
    return bool(deployment and deployment.away & {member.rank.index for member in deployment.members})


def leave_out(actor: object) -> None:
    """Send the actor's ranks no call that does not name them by `at`, until `take_in`."""
    if deployment := _deployment(actor):
        deployment.away.update(member.rank.index for member in deployment.members)


def take_in(actor: object) -> None:
    """Send the actor's ranks calls again."""
    if deployment := _deployment(actor):
        deployment.away.difference_update(member.rank.index for member in deployment.members)


def _apart(deployment: Deployment) -> bool:
    """Whether each of several ranks works without the others: those of one axis do, if they are not collective."""
    several = len(deployment.members) > 1 and deployment.shape.get("dp") == len(deployment.members)
    return several and not issubclass(deployment.actor, CollectiveActor)


def _deployment(actor: object) -> Deployment | None:
    """An actor's, if it is on a mesh."""
    return cast("Deployment", object.__getattribute__(actor, "_meshrl")) if isinstance(actor, Handle) else None
