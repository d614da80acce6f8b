"""Simulation in virtual time: how long a schedule takes, without a model and without waiting.

It has a clock that jumps from event to event, latencies for actors, roles that only take time (the backend `sim`), and
the forecast of `meshrl simulate`, which adapts the durations of a recorded run to the places where calls will run.
"""

from meshrl.simulation.clock import Deadlock, LeftRunning, VirtualLoop, simulate
from meshrl.simulation.forecast import Forecast, ahead_of, forecast_of, simulate_job, sources
from meshrl.simulation.json_state import State, read_state
from meshrl.simulation.latency import Crash, Latency, Lognormal, Recorded, crashing, delayed, per_row, per_token
from meshrl.simulation.pace import Pace, lowest_cost
from meshrl.simulation.records import GUESSES, WARM_UP, Fit, Guesses, Record, fit, fit_ends

__all__ = [
    "GUESSES",
    "WARM_UP",
    "Crash",
    "Deadlock",
    "Fit",
    "Forecast",
    "Guesses",
    "Latency",
    "LeftRunning",
    "Lognormal",
    "Pace",
    "Record",
    "Recorded",
    "State",
    "VirtualLoop",
    "ahead_of",
    "crashing",
    "delayed",
    "fit",
    "fit_ends",
    "forecast_of",
    "lowest_cost",
    "per_row",
    "per_token",
    "read_state",
    "simulate",
    "simulate_job",
    "sources",
]
