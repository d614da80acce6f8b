"""Find the split of ranks, the layouts and the value of `ahead` with the shortest steps, by simulation.

`make_plan` lists the candidates for a configuration on some GPUs or cores. It drops those that do not fit into memory
or cannot be among the fastest, and simulates the others. It returns settings to paste.

A simulation runs a script in virtual time on roles that only take time (the backend `sim`). The forecast of `meshrl
simulate` adapts the durations of a recorded run to the places where calls will run.
"""

from meshrl.planning.forecast import Forecast, ahead_of, forecast_of, simulate_job, sources
from meshrl.planning.pace import Pace, lowest_cost
from meshrl.planning.plan import Plan, Proposal, Wanted, make_plan
from meshrl.planning.records import GUESSES, WARM_UP, Fit, Guesses, Record, fit, fit_ends
from meshrl.planning.space import Devices

__all__ = [
    "GUESSES",
    "WARM_UP",
    "Devices",
    "Fit",
    "Forecast",
    "Guesses",
    "Pace",
    "Plan",
    "Proposal",
    "Record",
    "Wanted",
    "ahead_of",
    "fit",
    "fit_ends",
    "forecast_of",
    "lowest_cost",
    "make_plan",
    "simulate_job",
    "sources",
]
