"""Rollouts that run while the policy trains, with a hard bound on staleness.

`rollouts` is the stream that a script reads from and publishes to. The ledger counts what may begin, so that no row
older than `ahead` publications is ever trained on. A recorded schedule can be repeated bit by bit.
"""

from meshrl.overlap.replay import (
    CACHE as CACHE,
    DIFFERENCE as DIFFERENCE,
    Loop as Loop,
    Schedule as Schedule,
    read_kept_rows as read_kept_rows,
    read_schedule as read_schedule,
    schedule as schedule,
)
from meshrl.overlap.stream import Rollouts as Rollouts, rollouts as rollouts
from meshrl.overlap.stream_state import Score as Score
from meshrl.overlap.synchronous import (
    greedy_baseline as greedy_baseline,
    has_signal as has_signal,
    publish as publish,
    rollout as rollout,
)
