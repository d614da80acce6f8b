"""Log lines that say by which route weights arrive, and why by this one."""

from typing import Final

from meshrl import log
from meshrl.data.weights import Weights

_REASONS: Final = {
    "memory": "the policy is in this process, or the weights are small",
    "shared memory": "the policy is on this machine",
    "collectives": "the policy is on another machine",
    "the object store": "the policy is on another machine, and collectives do not carry these weights",
    "changes through": 'policy.weight_sync = "delta"',
    "broadcast": 'policy.weight_sync = "broadcast"',
}
"""Why weights take a route, by how its name begins."""


class ArrivalLog:
    """Says by which route a sampler's weights arrive: for the first weights, and when the route changes."""

    def __init__(self) -> None:
        self._said: frozenset[str] = frozenset()

    def note(self, weights: Weights) -> None:
        """Note weights that have arrived."""
        if weights.ways == self._said:
            return
        self._said = weights.ways
        ways = sorted(weights.ways)
        reasons = [reason for way in ways for start, reason in _REASONS.items() if way.startswith(start)]
        log.info("weights arrive", by=", ".join(ways), because="; ".join(reasons), version=weights.version)
