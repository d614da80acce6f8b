"""TODO-room."""

from meshrl.engines.local.engine import LocalEngine
from meshrl.engines.local.event_loop import RankLoop
from meshrl.engines.local.rank_thread import LocalMember, LocalSlot
from meshrl.engines.local.shared_task import Turns

__all__ = [
    "LocalEngine",
    "LocalMember",
    "LocalSlot",
    "RankLoop",
    "Turns",
]
