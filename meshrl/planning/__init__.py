"""Which split of the ranks, which layouts and how far ahead: the best of many settings, by the simulator.

`make_plan` lists what a configuration could be on some GPUs or cores, leaves out what does not fit into memory or
cannot be among the fastest, has the rest simulated by the code of `meshrl simulate`, and says what to paste.
"""

from meshrl.planning.plan import Plan, Proposal, Wanted, make_plan
from meshrl.planning.space import Devices

__all__ = ["Devices", "Plan", "Proposal", "Wanted", "make_plan"]
