"""Virtual time: what a schedule would take, without a model and without waiting.

A clock that leaps from event to event, latencies to put on actors, roles that only take time (the backend `sim`),
and the forecast of `meshrl simulate` from the pace of a run that has been.
"""

from meshrl.simulation.clock import Deadlock, LeftRunning, VirtualLoop, simulate
from meshrl.simulation.forecast import simulate_job
from meshrl.simulation.json_state import State, read_state
from meshrl.simulation.latency import Crash, Latency, Lognormal, Recorded, crashing, delayed, per_row, per_token

__all__ = [
    "Crash",
    "Deadlock",
    "Latency",
    "LeftRunning",
    "Lognormal",
    "Recorded",
    "State",
    "VirtualLoop",
    "crashing",
    "delayed",
    "per_row",
    "per_token",
    "read_state",
    "simulate",
    "simulate_job",
]
