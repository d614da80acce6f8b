"""The best split of the ranks, layouts and `ahead` among many settings, found by the simulator.

`make_plan` lists what a configuration could be on some GPUs or cores. It drops settings that do not fit into memory or
cannot be among the fastest. It simulates the rest with the code of `meshrl simulate`, and prints what to paste.
"""

from meshrl.planning.plan import Plan, Proposal, Wanted, make_plan
from meshrl.planning.space import Devices

__all__ = ["Devices", "Plan", "Proposal", "Wanted", "make_plan"]
