"""Find the split of ranks, the layouts and the value of `ahead` with the shortest steps, by simulation.

`make_plan` lists the candidates for a configuration on some GPUs or cores. It drops those that do not fit into memory
or cannot be among the fastest, and simulates the others. It returns settings to paste.

A simulation runs a script in virtual time on roles that only take time (the backend `sim`). The forecast of `meshrl
simulate` adapts the durations of a recorded run to the places where calls will run.
"""

from meshrl.planning.forecast import Forecast as Forecast, forecast_of as forecast_of, simulate_job as simulate_job
from meshrl.planning.plan import Plan as Plan, PlanOptions as PlanOptions, Proposal as Proposal, make_plan as make_plan
from meshrl.planning.records import RecordedRun as RecordedRun, fit as fit
from meshrl.planning.space import Devices as Devices
