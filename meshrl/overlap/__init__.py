"""Rollouts that run while the policy trains, with a hard bound on staleness.

`rollouts` is the stream that a script reads from and publishes to. The ledger counts what may begin, so that no row
older than `ahead` publications is ever trained on. A recorded schedule can be repeated bit by bit.
"""

from meshrl.overlap.replay import CACHE, DIFFERENCE, Loop, Schedule, read_kept_rows, read_schedule, schedule
from meshrl.overlap.stream import Rollouts, rollouts
from meshrl.overlap.stream_state import Score
from meshrl.overlap.synchronous import greedy_baseline, has_signal, publish, rollout

__all__ = [
    "CACHE",
    "DIFFERENCE",
    "Loop",
    "Rollouts",
    "Schedule",
    "Score",
    "greedy_baseline",
    "has_signal",
    "publish",
    "read_kept_rows",
    "read_schedule",
    "rollout",
    "rollouts",
    "schedule",
]
