"""Ranks as threads of this process: the engine for laptops, tests and the simulator.

Each rank has an event loop and its own copies of arguments, so a script that works here also works if ranks are
processes.
"""

from meshrl.engines.local.engine import LocalEngine as LocalEngine
from meshrl.engines.local.loops import RankLoop as RankLoop
from meshrl.engines.local.rank_thread import LocalMember as LocalMember, LocalSlot as LocalSlot
