"""Ranks that are processes, regardless of how they are started: both ends of a call, and the actors.

A `Caller` sends calls through the `Channel` of each rank's `Process`. The controller's `RemoteEngine` is a caller, and
each rank that holds a handle has one. The `Host` in the process keeps the order of calls, runs them and answers.

On one machine, a `Server` answers for the `Host` on a socket that only its user may open, a `SocketChannel` reaches it,
and `PoolRef.put` writes large values once into shared memory, which readers map.
"""

from meshrl.engines.remote.caller import Process, clock_ahead
from meshrl.engines.remote.engine import ProcessSlot, RemoteEngine, Reservation, environments
from meshrl.engines.remote.host import Host, work_as
from meshrl.engines.remote.host_monitor import PROBES, HostMonitor, is_reachable, monitor_of
from meshrl.engines.remote.logs import LogFolder, RankLog
from meshrl.engines.remote.messages import (
    NO_ARGUMENTS,
    Arguments,
    Call,
    Channel,
    HealthPort,
    MessageLost,
    Pickler,
    Place,
    ProcessExited,
    Reply,
    Service,
    Stopped,
    register_pickler,
)
from meshrl.engines.remote.pool_ref import PoolRef
from meshrl.engines.remote.sockets import (
    TOKEN_BYTES,
    Address,
    Connection,
    Server,
    SocketChannel,
    listen,
    remove_folder,
    socket_folder,
)

__all__ = [
    "NO_ARGUMENTS",
    "PROBES",
    "TOKEN_BYTES",
    "Address",
    "Arguments",
    "Call",
    "Channel",
    "Connection",
    "HealthPort",
    "Host",
    "HostMonitor",
    "LogFolder",
    "MessageLost",
    "Pickler",
    "Place",
    "PoolRef",
    "Process",
    "ProcessExited",
    "ProcessSlot",
    "RankLog",
    "RemoteEngine",
    "Reply",
    "Reservation",
    "Server",
    "Service",
    "SocketChannel",
    "Stopped",
    "clock_ahead",
    "environments",
    "is_reachable",
    "listen",
    "monitor_of",
    "register_pickler",
    "remove_folder",
    "socket_folder",
    "work_as",
]
