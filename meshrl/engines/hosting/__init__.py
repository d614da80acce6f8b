"""Ranks that are processes, regardless of how they are started: both ends of a call, and the actors.

A `Caller` sends calls through the `Channel` of each rank's `Process`. The controller's `HostingEngine` is a caller, and
each rank that holds a handle has one. The `Host` in the process keeps the order of calls, runs them and answers.
"""

from meshrl.engines.hosting.call_order import CYCLE, CallerQueue
from meshrl.engines.hosting.caller import Caller
from meshrl.engines.hosting.channel import Broken, Channel, Gone, Reply, Service
from meshrl.engines.hosting.engine import HostingEngine
from meshrl.engines.hosting.host import Host, work_as
from meshrl.engines.hosting.messages import (
    NO_ARGUMENTS,
    Arguments,
    Ask,
    Construction,
    Door,
    Failure,
    Place,
    Stopped,
    boot,
)
from meshrl.engines.hosting.patience import patiently
from meshrl.engines.hosting.pickling import (
    Pickler,
    carries,
    carry_modules,
    check_picklable,
    is_installed,
    packed,
    unpacked,
)
from meshrl.engines.hosting.process import Process, RankMember, clock_ahead
from meshrl.engines.hosting.rank_log import LogFolder, RankLog
from meshrl.engines.hosting.reservation import ProcessSlot, Reservation, environments
from meshrl.engines.hosting.vigil import KNOCKS, Vigil, knocked, vigil

__all__ = [
    "CYCLE",
    "KNOCKS",
    "NO_ARGUMENTS",
    "Arguments",
    "Ask",
    "Broken",
    "Caller",
    "CallerQueue",
    "Channel",
    "Construction",
    "Door",
    "Failure",
    "Gone",
    "Host",
    "HostingEngine",
    "LogFolder",
    "Pickler",
    "Place",
    "Process",
    "ProcessSlot",
    "RankLog",
    "RankMember",
    "Reply",
    "Reservation",
    "Service",
    "Stopped",
    "Vigil",
    "boot",
    "carries",
    "carry_modules",
    "check_picklable",
    "clock_ahead",
    "environments",
    "is_installed",
    "knocked",
    "packed",
    "patiently",
    "unpacked",
    "vigil",
    "work_as",
]
