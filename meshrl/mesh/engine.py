"""The protocol of engines: reserve slots for ranks, start actors on them, call them, and stop them.

Everything above (handles, meshes, algorithms) reaches ranks only through this protocol.
"""

import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias

from meshrl.errors import ConfigError
from meshrl.mesh.actor import Rank
from meshrl.mesh.refs import Ref

PATIENCE: Final = 10.0
"""Seconds to wait for an unreachable host before its ranks count as lost."""
INLINE_BYTES: Final = 65536
"""Default size in bytes of the largest column that is sent with a call."""


@dataclass(frozen=True)
class Resources:
    """The resources of each rank of a mesh. Raises `ConfigError` for values that no machine can provide."""

    cpus: int | None = None
    """CPU threads of each rank. None: the mesh's ranks share the engine's free cores. 0: no core is reserved."""
    gpus: float = 0.0
    """GPUs of each rank. Below 1, a share of one GPU."""
    custom: Mapping[str, float] = field(default_factory=dict[str, float], hash=False)
    """Custom resources of the cluster that each rank needs, by name."""
    placement: Literal["pack", "spread"] = "pack"
    """`pack` puts ranks on few machines, `spread` on many."""
    min_ranks: int = 0
    """Lowest number of ranks that the mesh can start and continue with. 0: all of them."""

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
    """A thread or a process that is reserved for one rank. Actors of one mesh share its slots."""

    @property
    def threads(self) -> int:
        """CPU threads of the rank."""
        ...


class Member(Protocol):
    """One actor instance on one slot."""

    @property
    def rank(self) -> Rank:
        """Its place on the mesh."""
        ...

    @property
    def place(self) -> str:
        """Process and host of the rank, for messages."""
        ...

    @property
    def has_started(self) -> bool:
        """False for a rank that has not started yet (meshes may start with `min_ranks`)."""
        ...


class Request(NamedTuple):
    """A call to one rank."""

    member: Member
    arguments: tuple[object, ...]
    keywords: Mapping[str, object]


OnSpan: TypeAlias = Callable[[int, float, float], None]
"""Called when a request has ended on its rank, with the request's number and its start and end on the clock of the
caller's event loop. It may be called in another thread, and for a cancelled call after that call has ended."""


class Engine(Protocol):
    """The protocol of engines, which run ranks.

    Large values are not sent with calls. Ranks fetch a value of `put` when they read it. Columns of a result with more
    than `inline_bytes` stay on the rank that made them (see `HasRefs.hold`). Arrays arrive read-only.
    """

    @property
    def inline_bytes(self) -> int | None:
        """Size in bytes of the largest column that is sent with a call or a result, on average over the ranks.

        None: all columns are sent with calls.
        """
        ...

    @property
    def shares_memory(self) -> bool:
        """True if all ranks are processes of this machine, which share its memory."""
        ...

    def put(self, value: object) -> Ref:
        """Store a value once, for all ranks that fetch it."""
        ...

    async def reserve(self, count: int, resources: Resources, log: str = "") -> Sequence[Slot]:
        """Reserve slots for `count` ranks. Their processes write to LOG-RANK.log. ConfigError if they cannot exist."""
        ...

    async def release(self, slots: Sequence[Slot]) -> None:
        """Release the slots and stop actors still running on them."""
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
        """Construct the actors again on the same slots, with the arguments of their start."""
        ...

    async def stop(self, members: Sequence[Member]) -> None:
        """Cancel the actors' calls and drop the actors."""
        ...

    def call(self, endpoint: str, requests: Sequence[Request], seen: OnSpan | None = None) -> Awaitable[list[object]]:
        """Call each member, and return the results in the order of the requests.

        Calls of one caller start on a member in the order in which they were made. The first failure cancels the
        other calls and is raised as `RankFailed`. Cancelling the awaiting task cancels the call on every rank.
        """
        ...

    def stream(
        self, endpoint: str, requests: Sequence[Request], consumed: Sequence[int], seen: OnSpan | None = None
    ) -> AsyncGenerator[object]:
        """Run each member's generator, and yield the values of the requests in `consumed` as they come.

        A consumed rank is at most one value ahead of the reader. The values of other ranks are dropped.
        """
        ...

    async def close(self) -> None:
        """Stop everything."""
        ...
