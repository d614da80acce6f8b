"""The route of a large value: the machines that pass it on."""

from collections.abc import Awaitable, Sequence
from typing import Final, NamedTuple, Protocol, TypeAlias

from meshrl.engines.ray.nodes import Home


class _Asked(Protocol):
    def remote(self, *arguments: object) -> Awaitable[object]:
        """Send a call."""
        ...


class Handle(Protocol):
    """The Ray actor of a `RankProcess`."""

    host_copy: _Asked
    hand_on: _Asked
    answers: _Asked


class Stop(NamedTuple):
    """A rank on the route of a value."""

    handle: Handle
    home: Home


Route: TypeAlias = Sequence[Stop]
"""One rank on each machine, from the machine that holds a value to the one that needs it. Empty: Ray brings it."""

near: Final[list[Stop]] = []
"""Ranks of this machine that forward its values. If this process is one, it comes first."""
