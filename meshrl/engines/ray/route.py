"""The route of a large value: which machine sends to which."""

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
    """A rank by which a value goes."""

    handle: Handle
    home: Home


Route: TypeAlias = Sequence[Stop]
"""One rank on each machine, from that on which a value lies to the one where it is wanted. Empty: Ray brings it."""

near: Final[list[Stop]] = []
"""Ranks of this machine that hand on what lies here; where this process is one, itself first."""
