"""What the log says of the route of weights."""

import numpy as np
import pytest
from structlog.testing import capture_logs

from meshrl import Weights
from meshrl.weights import ArrivalLog


class Arrived(Weights):
    """Weights that came by a route."""

    route = "memory"

    @property
    def ways(self) -> frozenset[str]:
        return frozenset((self.route,))


def arrived(route: str, version: int) -> Weights:
    weights = Arrived(version, {"one": np.ones(2, np.float32)})
    weights.route = route
    return weights


def test_a_route_is_said_once_and_again_when_it_changes() -> None:
    arrivals = ArrivalLog()
    with capture_logs() as said:
        for version, route in enumerate(["collectives", "collectives", "the object store", "collectives"]):
            arrivals.note(arrived(route, version))
    assert [(line["version"], line["by"]) for line in said] == [
        (0, "collectives"),
        (2, "the object store"),
        (3, "collectives"),
    ]
    assert said[0]["because"] == "the policy is on another machine"


@pytest.mark.parametrize(
    ("route", "reason"),
    [
        ("shared memory", "the policy is on this machine"),
        ("changes through the object store", 'policy.weight_sync = "delta"'),
        ("broadcast by gloo", 'policy.weight_sync = "broadcast"'),
    ],
)
def test_a_route_has_its_reason(route: str, reason: str) -> None:
    with capture_logs() as said:
        ArrivalLog().note(arrived(route, 0))
    assert [line["because"] for line in said] == [reason]
