"""What the log says of the route of weights."""

import numpy as np
from structlog.testing import capture_logs

from meshrl import Weights
from meshrl.data import ArrivalLog


class Arrived(Weights):
    """Weights that came by a route."""

    route = "memory"

    @property
    def ways(self) -> frozenset[str]:
        return frozenset((self.route,))


def test_a_route_is_said_with_its_reason_once_and_again_when_it_changes() -> None:
    arrivals = ArrivalLog()
    reasons = {
        "collectives": "the policy is on another machine",
        "the object store": "the policy is on another machine, and collectives do not carry these weights",
        "shared memory": "the policy is on this machine",
        "changes through the object store": 'policy.weight_sync = "delta"',
        "broadcast by gloo": 'policy.weight_sync = "broadcast"',
    }
    with capture_logs() as said:
        for version, route in enumerate(["collectives", *reasons, "collectives"]):
            weights = Arrived(version, {"one": np.ones(2, np.float32)})
            weights.route = route
            arrivals.note(weights)
    assert [line["version"] for line in said] == [0, 2, 3, 4, 5, 6]
    routes = [*reasons, "collectives"]
    assert [(line["by"], line["because"]) for line in said] == [(route, reasons[route]) for route in routes]
