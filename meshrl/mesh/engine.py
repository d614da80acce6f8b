"""The engine protocol: reserve places for ranks, start actors in them, call them, stop them.

Everything above (handles, meshes, algorithms) speaks to ranks through this and nothing else.
"""

import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias

from meshrl.errors import ConfigError
from meshrl.mesh.actor import Rank
from meshrl.mesh.refs import Ref

PATIENCE: Final = 10.0
"""Seconds after which a host that cannot be reached is given up."""
INLINE_BYTES: Final = 65536
"""The largest column that travels with a call, if nothing else is said."""


@dataclass(frozen=True)
class Resources:
    """What each rank of a mesh may use. Raises `ConfigError` for what no machine can give."""

    cpus: int | None = None
    """CPU threads a rank; None: the engine's free cores, shared by the mesh's ranks; 0: no core of its own."""
    gpus: float = 0.0
    """GPUs a rank; below 1, a share of one."""
    custom: Mapping[str, float] = field(default_factory=dict[str, float], hash=False)
    """What else of the cluster's own resources each rank needs."""
    placement: Literal["pack", "spread"] = "pack"
    """The ranks on as few nodes as can be, or on as many."""
    least: int = 0
    """Ranks that are enough for the mesh to begin, and to go on: others come and go; 0: all."""

    def __post_init__(self) -> None:
        if (self.cpus or 0) < 0 or (self.cpus or 0) % 1:
            raise ConfigError(f"cpus = {self.cpus}: write a whole number, 0 or more")
        if not 0 <= self.gpus < math.inf or (self.gpus > 1 and self.gpus % 1):
            raise ConfigError(f"gpus = {self.gpus}: write a whole number, or a share of one GPU below 1")
        for name, amount in self.custom.items():
            if not 0 <= amount < math.inf:
                raise ConfigError(f"custom = {{{name} = {amount}}}: write 0 or more")
        if self.placement not in ("pack", "spread"):
            raise ConfigError(f"placement = {self.placement!r}: write 'pack' or 'spread'")


class Slot(Protocol):
    """A reserved place for one rank: a thread or a process. Actors of one mesh share its slots."""

    @property
    def threads(self) -> int:
        """CPU threads granted to the rank."""
        ...


class Member(Protocol):
    """One actor instance on one slot."""

    @property
    def rank(self) -> Rank:
        """Its place on the mesh."""
        ...

    @property
    def place(self) -> str:
        """Its process and host, for messages."""
        ...

    @property
    def is_made(self) -> bool:
        """Whether it has been there: of a mesh that began with fewer ranks some have not."""
        ...


class Request(NamedTuple):
    """What one rank is asked to do."""

    member: Member
    arguments: tuple[object, ...]
    keywords: Mapping[str, object]


OnSpan: TypeAlias = Callable[[int, float, float], None]
"""Is told when a request began and ended on its rank: the request's number, and both times on the clock of the
caller's loop. It may be told in another thread, and of a call that was cancelled after that has ended."""


class Engine(Protocol):
    """Where ranks run.

    Large values do not travel with calls. What `put` holds is fetched by the ranks that read it; of what a rank
    returns, columns of more than `inline_bytes` stay where they were made (see `HasRefs.hold`). Arrays arrive
    read-only.
    """

    @property
    def inline_bytes(self) -> int | None:
        """The largest column that travels with a call to a rank, or from it, on average over the ranks that divide it.

        None: all do.
        """
        ...

    @property
    def shares_memory(self) -> bool:
        """Whether all ranks are processes of this machine, which share its memory."""
        ...

    def put(self, value: object) -> Ref:
        """Keep a value, once, for whoever fetches it."""
        ...

    async def reserve(self, count: int, resources: Resources, log: str = "") -> Sequence[Slot]:
        """Places for `count` ranks, whose processes write to LOG-RANK.log. ConfigError where they cannot exist."""
        ...

    async def release(self, slots: Sequence[Slot]) -> None:
        """Give the places back; whatever still runs there is stopped."""
        ...

    async def start(
        self,
        slots: Sequence[Slot],
        ranks: Sequence[Rank],
        create: type,
        arguments: tuple[object, ...],
        keywords: Mapping[str, object],
    ) -> Sequence[Member]:
        """Construct an actor on each slot. If one fails, all are stopped and `RankFailed` is raised."""
        ...

    async def restart(self, members: Sequence[Member]) -> None:
        """Construct the actors again, in place and with the arguments of their start."""
        ...

    async def stop(self, members: Sequence[Member]) -> None:
        """Cancel the actors' calls and let the actors go."""
        ...

    def call(self, endpoint: str, requests: Sequence[Request], seen: OnSpan | None = None) -> Awaitable[list[object]]:
        """Call each member; the results in the order of the requests.

        Calls of one caller start on a member in the order they were made. The first failure cancels the
        others and is raised as `RankFailed`; cancelling the awaiting task cancels the call on every rank.
        """
        ...

    def stream(
        self, endpoint: str, requests: Sequence[Request], consumed: Sequence[int], seen: OnSpan | None = None
    ) -> AsyncGenerator[object]:
        """Run each member's generator; the values of the requests in `consumed`, as they come.

        A rank that is consumed is at most one value ahead of the reader; the others run along unheard.
        """
        ...

    async def close(self) -> None:
        """Stop everything."""
        ...
