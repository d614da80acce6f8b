"""Planning: find the split of ranks, the layouts and the value of `ahead` with the shortest steps, by simulation.

`make_plan` lists the candidates for a configuration on some GPUs or cores. It drops those that do not fit into memory
or cannot be among the fastest, and simulates the others with the code of `meshrl simulate`. It returns settings to
paste.
"""

from meshrl.planning.plan import Plan, Proposal, Wanted, make_plan
from meshrl.planning.space import Devices

__all__ = ["Devices", "Plan", "Proposal", "Wanted", "make_plan"]
