"""The parts of an actor along the axis that divides rows: which rows each takes, and which parts are available."""

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import ParamSpec, TypeVar, cast

import numpy as np

from meshrl.mesh.actor import CollectiveActor, Rank
from meshrl.mesh.engine import Request
from meshrl.mesh.handle import BoundEndpoint, Deployment, Handle, Plans, at, deployment_of
from meshrl.mesh.scatter import Planner
from meshrl.mesh.sharding import Rows

P = ParamSpec("P")
A = TypeVar("A")
R = TypeVar("R")
T = TypeVar("T")


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
    if deployment is None or not _apart(deployment):
        return [actor]
    return [at(actor, dp=index) for index in range(len(deployment.members))]


def streams(endpoint: Callable[P, AsyncIterator[T]], owners: Rows) -> Callable[P, dict[int, AsyncIterator[T]]]:
    """Split a call of a stream into one stream for each available replica, by the replica's number.

    `owners`: as for `routed`. Rows are numbered as in a single call. The streams end independently of each other.
    """
    called = cast("object", endpoint)

    def opened(*args: P.args, **kwargs: P.kwargs) -> dict[int, AsyncIterator[T]]:
        if not isinstance(called, BoundEndpoint) or not _apart(called.whole):
            return {0: routed(endpoint, owners)(*args, **kwargs)}
        present = called.whole.present
        numbers = [member.rank.axes["dp"] for member in present.members]
        bound = BoundEndpoint(present, called.endpoint, np.searchsorted(numbers, owners))
        requests, plans = bound.requests(args, kwargs)
        return {
            number: cast("AsyncIterator[T]", _alone(bound, request, plans))
            for number, request in zip(numbers, requests, strict=True)
        }

    return opened


def _alone(bound: BoundEndpoint, request: Request, plans: Plans) -> AsyncIterator[object]:
    """Return the part of a call for one rank."""
    alone = replace(bound.deployment, members=[request.member], shape={**bound.deployment.shape, "dp": 1})
    return BoundEndpoint(alone, bound.endpoint).stream(request.arguments, request.keywords, ([request], plans))


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


def _apart(deployment: Deployment) -> bool:
    """True if the ranks work independently: if there are several along one axis, and they are not collective."""
    several = len(deployment.members) > 1 and deployment.shape.get("dp") == len(deployment.members)
    return several and not issubclass(deployment.actor, CollectiveActor)


def _deployment(actor: object) -> Deployment | None:
    """Return the deployment of an actor, or None if it is not on a mesh."""
    return cast("Deployment", object.__getattribute__(actor, "_meshrl")) if isinstance(actor, Handle) else None
