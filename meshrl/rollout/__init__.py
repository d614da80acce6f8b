"""TODO-room."""

from meshrl.rollout.replay import DIFFERENCE, Loop, Schedule, load_into, read_schedule, schedule
from meshrl.rollout.stream import Rollouts, Score, rollouts
from meshrl.rollout.synchronous import greedy_baseline, has_signal, publish, rollout

__all__ = [
    "DIFFERENCE",
    "Loop",
    "Rollouts",
    "Schedule",
    "Score",
    "greedy_baseline",
    "has_signal",
    "load_into",
    "publish",
    "read_schedule",
    "rollout",
    "rollouts",
    "schedule",
]
